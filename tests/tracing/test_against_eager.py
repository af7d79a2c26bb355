"""A traced step computes what eager PyTorch computes; what it cannot hold is refused by name, and calls are checked."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import policylang
from policylang import TracedStep, trace_step
from policylang.errors import PolicyGraphError
from policylang.graph import marks
from tests.support.drawn import slow
from tests.support.models import ZOO, Example, Function


def loss_of(example: Example) -> Callable[..., Tensor]:
    return lambda model, *inputs: example.loss_fn(model(*inputs))


def trace(example: Example) -> TracedStep:
    return trace_step(example.module, loss_of(example), *example.inputs)


def eager_step(model: nn.Module, loss_fn: Callable[..., Tensor], *batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    for parameter in model.parameters():
        parameter.grad = None
    loss = loss_fn(model, *batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def assert_like_eager(
    step: TracedStep, model: nn.Module, *batch: Any, loss_fn: Callable[..., Tensor] | None = None
) -> None:
    found = step(*batch)
    torch.testing.assert_close(found, eager_step(twin(model), loss_fn or mean_square, *batch))


def phase(node: fx.Node) -> str | None:
    return marks.custom(node.meta).get(marks.PHASE)


def calls(step: TracedStep, *targets: Any) -> list[fx.Node]:
    return [node for node in step.gm.graph.nodes if node.op == "call_function" and node.target in targets]


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def net(width: int = 8) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(width), torch.randn(4, width)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


VARIANTS = ("bart", "gpt2", "qwen3", "mixtral", "flex")


@pytest.mark.parametrize("make", [slow(make) if name in VARIANTS else make for name, make in ZOO.items()], ids=ZOO)
def test_loss_gradients_and_buffers_of_two_training_steps(make: Callable[[], Example]) -> None:
    example = make()
    other = twin(example.module)
    step = trace(example)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4) for model in (example.module, other)]
    for seed in (1, 2):
        torch.manual_seed(seed)
        loss, gradients = step(*example.inputs)
        torch.manual_seed(seed)
        eager_loss, eager_gradients = eager_step(other, loss_of(example), *example.inputs)
        torch.testing.assert_close(loss, eager_loss)
        assert gradients.keys() == eager_gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, eager_gradients[name], msg=lambda text, name=name: f"{name}: {text}")
        for name, parameter in example.module.named_parameters():
            parameter.grad = gradients.get(name)
        for optimizer in optimizers:
            optimizer.step()
    for (name, buffer), eager_buffer in zip(example.module.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(buffer, eager_buffer, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", ["resnet", "counter"])
def test_buffers_advance_once_a_step_bit_for_bit(name: str) -> None:
    example = ZOO[name]()
    other = twin(example.module)
    before = {key: value.clone() for key, value in example.module.named_buffers()}
    step = trace(example)
    for key, value in example.module.named_buffers():
        assert torch.equal(value, before[key]), f"tracing changed {key}"
    for _ in range(3):
        step(*example.inputs)
        eager_step(other, loss_of(example), *example.inputs)
    for (key, value), eager in zip(example.module.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(value, eager), key
    assert not torch.equal(next(example.module.buffers()), next(iter(before.values())))


@pytest.mark.parametrize("name", ["gpt2", "dropout"])
def test_dropout_draws_what_eager_draws_and_anew_at_each_step(name: str) -> None:
    example = ZOO[name]()
    step = trace(example)
    torch.manual_seed(7)
    first, again = step(*example.inputs)[0], step(*example.inputs)[0]
    torch.manual_seed(7)
    eager = [eager_step(twin(example.module), loss_of(example), *example.inputs)[0] for _ in range(2)]
    torch.testing.assert_close([first, again], eager)
    assert not torch.equal(first, again)
    torch.manual_seed(7)
    assert torch.equal(step(*example.inputs)[0], first)


def test_tracing_draws_no_random_numbers() -> None:
    example = ZOO["dropout"]()
    state = torch.get_rng_state()
    trace(example)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("around", ["loss", "call"])
def test_autocast(around: str) -> None:
    model, x = net()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=around == "loss" or torch.is_autocast_enabled("cpu")):
            return model(x).float().square().mean()

    with torch.autocast("cpu", torch.bfloat16, enabled=around == "call"):
        step = trace_step(model, loss_fn, x)
        loss, gradients = step(x)
        eager_loss, eager_gradients = eager_step(twin(model), loss_fn, x)
    assert any(node.meta["val"].dtype is torch.bfloat16 for node in step.gm.graph.nodes if node.op == "call_function")
    assert torch.equal(loss, eager_loss)
    assert all(gradients[name].dtype is torch.float32 for name in gradients)
    assert all(torch.equal(gradients[name], eager_gradients[name]) for name in eager_gradients)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(step(x)[0], loss), "an autocast around the call casts a second time"


def test_results_need_no_gradient_and_hold_no_graph() -> None:
    model, x = net()
    loss, gradients = trace_step(model, mean_square, x)(x)
    assert not loss.requires_grad
    assert loss.grad_fn is None
    assert not any(gradient.requires_grad for gradient in gradients.values())
    assert all(parameter.grad is None for parameter in model.parameters())


def with_jacobian() -> nn.Module:
    """Adds to its output a Jacobian that ``torch.func`` takes of a part of itself, and a gradient penalty."""

    def forward(net: nn.Module, x: Tensor) -> Tensor:
        jacobian = torch.func.jacrev(lambda row: net.inner(row).sin())(x[0])
        z = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net.inner(z).cos().sum(), z, create_graph=True)
        return net.outer(x + slope) @ jacobian

    return Function(forward, inner=nn.Linear(4, 4), outer=nn.Linear(4, 4))


def test_derivatives_inside_the_forward() -> None:
    torch.manual_seed(0)
    model, x = with_jacobian(), torch.randn(3, 4)
    assert_like_eager(trace_step(model, mean_square, x), model, x)


def test_loss_in_chunks_with_a_backward_of_each() -> None:
    model, x = net()

    def chunked(model: Net, x: Tensor) -> Tensor:
        hidden = model.first(x).relu()
        leaf = hidden.detach().requires_grad_()
        total = torch.zeros(())
        for chunk in leaf.chunk(2):
            part = model.second(chunk).square().sum() / x.numel()
            part.backward()
            total = total + part.detach()
        return total + (hidden * leaf.grad).sum() - (hidden * leaf.grad).sum().detach()

    loss, gradients = trace_step(model, chunked, x)(x)
    assert all(parameter.grad is None for parameter in model.parameters())
    eager_loss, eager_gradients = eager_step(twin(model), mean_square, x)
    torch.testing.assert_close(loss, eager_loss)
    torch.testing.assert_close(gradients, eager_gradients)


def test_compiled_submodules_are_traced_through() -> None:
    model, x = net()
    expected = eager_step(twin(model), mean_square, x)
    model.first.compile()
    model.second = torch.compile(model.second)
    loss, gradients = trace_step(model, mean_square, x)(x)
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(list(gradients.values()), list(expected[1].values()))


def test_sizes_that_depend_on_data() -> None:
    """As in a mixture of experts: how many rows are chosen is known only when the step runs."""
    model, x = net()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        chosen = x.sum(1).gt(0).nonzero().squeeze(1)
        return model(x.index_select(0, chosen)).square().sum()

    step = trace_step(model, loss_fn, x)
    for batch in (x, -x, torch.cat([x[:3].abs(), -x[3:].abs()])):
        assert_like_eager(step, model, batch, loss_fn=loss_fn)


def test_tracing_and_running_under_no_grad() -> None:
    model, x = net()
    with torch.no_grad():
        step = trace_step(model, mean_square, x)
        loss, gradients = step(x)
    eager_loss, eager_gradients = eager_step(twin(model), mean_square, x)
    torch.testing.assert_close((loss, gradients), (eager_loss, eager_gradients))


@pytest.mark.parametrize("policy", ["save everything", "recompute everything"])
def test_a_recurrent_layer_of_the_cpu(policy: str) -> None:
    """Makes the workspace that its backward reads only where gradients are enabled."""
    torch.manual_seed(0)
    model, x = nn.LSTM(8, 8), torch.randn(3, 2, 8)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[0].sum()

    step = trace_step(model, loss, x).apply(policylang.parse(policy))
    found, expected = step(x), eager_step(twin(model), loss, x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not any(gradient.requires_grad for gradient in found[1].values())


def test_a_model_without_data() -> None:
    """True shapes without their memory: parameters and batch are fake, and so is what comes out."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with FakeTensorMode():
        model, x = Net(4096), torch.empty(1024, 4096)
        step = trace_step(model, mean_square, x)
        loss, gradients = step(x)
    assert isinstance(loss, FakeTensor)
    assert gradients["first.weight"].shape == (4096, 4096)


def test_a_constant_that_is_no_buffer_is_part_of_the_graph() -> None:
    model, x = net()
    mask = torch.rand(8)
    model.scale = torch.rand(8)  # type: ignore[assignment]

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * mask * model.scale + torch.arange(8) + torch.tensor(2.0)).square().mean()

    assert_like_eager(trace_step(model, loss_fn, x), model, x, loss_fn=loss_fn)


def permuted(model: nn.Module, x: Tensor) -> Tensor:
    rows = F.dropout(model.conv(x).flatten(2).transpose(1, 2), 0.4)
    return F.dropout(rows.sin().view(2, 4, 2, 3).permute(1, 3, 0, 2), 0.3)


@pytest.mark.parametrize("policy", [None, "recompute everything", "recompute everything; save random"])
def test_dropout_of_a_permuted_tensor_draws_what_eager_draws(policy: str | None) -> None:
    """An image as rows of pixels, as in SegFormer's head."""
    torch.manual_seed(0)
    model, x = Function(permuted, conv=nn.Conv2d(2, 3, 3)), torch.randn(2, 2, 4, 6)
    step = trace_step(model, lambda model, x: model(x).square().mean(), x)
    if policy is not None:
        step.apply(policylang.parse(policy))
    torch.manual_seed(7)
    loss, gradients = step(x)
    torch.manual_seed(7)
    expected = model(x).square().mean()
    expected.backward()
    assert torch.equal(loss, expected)
    assert all(torch.equal(gradients[name], each.grad) for name, each in model.named_parameters())


def test_a_policy_file_and_its_report(tmp_path: Path) -> None:
    path = tmp_path / "second.apl"
    path.write_text("policy second\nundecided -> save\nrecompute relu\n")
    model, x = net()
    step = trace_step(model, mean_square, x)
    loss, _ = step(x)
    step.apply(str(path))
    assert torch.equal(step(x)[0], loss)
    assert len(calls(step, torch.ops.aten.relu.default)) == 2
    assert step.report.recomputed.names == ("relu",)
    assert str(policylang.report(step)) == str(step.report)
    assert f"{path.name}:3" in str(step.report)


def test_blocks_and_module_paths_are_those_of_the_model() -> None:
    step = trace(ZOO["llama"]())
    step.apply(policylang.parse("blocks layers.*; recompute everything in block; expect exactly 7 mm per block"))
    assert step.report.blocks == 2
    assert any(name.startswith("mm") for name in step.report.recomputed.names)


def test_a_policy_on_a_step_with_its_optimizer() -> None:
    model, x = net()
    other = twin(model)
    steps = []
    for each in (model, other):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        mean_square(each, x).backward()
        optimizer.step()
        steps.append(trace_step(each, mean_square, x, optimizer=optimizer))
    steps[0].apply(policylang.parse("recompute everything"))
    for step in steps:
        step(x)
        step(x)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def refused(step: Any, *batch: Any) -> Any:
    with pytest.raises(PolicyGraphError) as caught:
        step(*batch)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def weighted(model: nn.Module, batch: dict[str, Any], weights: list[Tensor], scale: float = 1.0) -> Tensor:
    output = model(batch["x"]) * weights[0] + weights[1]
    return (output * scale).square().mean() if batch["squared"] else output.abs().mean()


def tree(x: Tensor) -> tuple[dict[str, Any], list[Tensor], float]:
    return {"x": x, "squared": True}, [torch.ones(8), torch.full((8,), 0.5)], 0.5


def test_a_batch_is_any_tree() -> None:
    model, x = net()
    batch = tree(x)
    step = trace_step(model, weighted, *batch)
    loss, gradients = step(*batch)
    eager = eager_step(twin(model), weighted, *batch)
    torch.testing.assert_close((loss, gradients), eager)
    doubled = tree(2 * x)
    torch.testing.assert_close(step(*doubled)[0], eager_step(twin(model), weighted, *doubled)[0])


def test_another_shape() -> None:
    model, x = net()
    diagnostic = refused(trace_step(model, mean_square, x), torch.randn(6, 8))
    assert diagnostic.code == "APL364"
    assert diagnostic.message == "the batch is not the one this step was traced for"
    assert diagnostic.details == ("input[0]: traced with float32[4, 8] on cpu, called with float32[6, 8] on cpu",)
    assert diagnostic.help == "trace one step for each shape, or pad the batch to the traced shape"


def test_another_dtype_device_or_value() -> None:
    model, x = net()
    step = trace_step(model, weighted, *tree(x))
    batch, weights, _ = tree(x)
    assert "called with float64[4, 8]" in refused(step, {**batch, "x": x.double()}, weights, 0.5).details[0]
    assert "called with float32[4, 8] on meta" in refused(step, {**batch, "x": x.to("meta")}, weights, 0.5).details[0]
    (said,) = refused(step, {**batch, "squared": False}, weights, 0.5).details
    assert said == "input[0]['squared']: traced with the bool `True`, called with the bool `False`"
    (said,) = refused(step, batch, weights, 0.25).details
    assert said == "input[2]: traced with the float `0.5`, called with the float `0.25`"
    (said,) = refused(step, batch, [weights[0], 3], 0.5).details
    assert said == "input[1][1]: traced with float32[8] on cpu, called with the int `3`"


def test_too_few_and_too_many_inputs() -> None:
    model, x = net()
    step = trace_step(model, mean_square, x)
    for batch in ((), (x, x)):
        diagnostic = refused(step, *batch)
        assert diagnostic.code == "APL364"
        assert "another structure" in diagnostic.message
    assert diagnostic.details == ("traced: input[0]", "called: input[0], input[1]")


def test_a_key_that_is_missing() -> None:
    model, x = net()
    step = trace_step(model, weighted, *tree(x))
    _, weights, scale = tree(x)
    assert "called: input[0]['x'], input[1][0]" in refused(step, {"x": x}, weights, scale).details[1]


WEIGHT, BIAS = "`second.weight`: ", "`second.bias`: "


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.second.eval(), ("`second`: traced in train mode, now in eval mode",)),
        (
            lambda model: model.second.to(torch.bfloat16),
            (
                f"{WEIGHT}traced with float32[8, 8] on cpu, now bfloat16[8, 8] on cpu",
                f"{BIAS}traced with float32[8] on cpu, now bfloat16[8] on cpu",
            ),
        ),
        (
            lambda model: model.second.to("meta"),
            (
                f"{WEIGHT}traced with float32[8, 8] on cpu, now float32[8, 8] on meta",
                f"{BIAS}traced with float32[8] on cpu, now float32[8] on meta",
            ),
        ),
        (lambda model: model.add_module("third", nn.Linear(2, 2)), ("`third.weight`: new", "`third.bias`: new")),
        (lambda model: delattr(model, "second"), (f"{WEIGHT}gone", f"{BIAS}gone")),
        (
            lambda model: model.first.weight.requires_grad_(False),
            ("`first.weight`: traced with a gradient, now without one",),
        ),
    ],
)
def test_a_model_that_has_changed(change: Callable[[nn.Module], object], said: tuple[str, ...]) -> None:
    model, x = net()
    step = trace_step(model, mean_square, x)
    change(model)
    diagnostic = refused(step, x)
    assert (diagnostic.code, diagnostic.details) == ("APL365", said)


def test_a_change_that_is_undone() -> None:
    model, x = net()
    step = trace_step(model, mean_square, x)
    model.second.eval()
    refused(step, x)
    model.train()
    step(x)


def test_many_differences_are_counted() -> None:
    model, x = net()
    step = trace_step(model, mean_square, x)
    for number in range(10):
        model.register_parameter(f"p{number}", nn.Parameter(torch.zeros(1)))
    details = refused(step, x).details
    assert len(details) == 9
    assert details[-1] == "and 2 more"


def test_text_of_a_step() -> None:
    model, x = net()
    step = trace_step(model, weighted, *tree(x))
    assert str(step).splitlines() == [
        f"traced step of Net: {len(step.gm.graph.nodes)} nodes, 4 gradients",
        "  input[0]['x']: float32[4, 8] on cpu",
        "  input[0]['squared']: the bool `True`",
        "  input[1][0]: float32[8] on cpu",
        "  input[1][1]: float32[8] on cpu",
        "  input[2]: the float `0.5`",
    ]


def refused_step(loss_fn: Callable[..., Any], model: nn.Module | None = None) -> tuple[Any, PolicyGraphError]:
    default, x = net()
    with pytest.raises(PolicyGraphError) as caught:
        trace_step(model or default, loss_fn, x)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic, caught.value


class Output:
    loss = None


class Growing(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.cat([self.cache, x])
        return super().forward(x)


NO_TENSOR = "`loss_fn` returns {}, not a scalar tensor"


@pytest.mark.parametrize(
    ("loss_fn", "model", "code", "message", "help"),
    [
        (lambda model, x: model(x).square(), Net, "APL360",
         "`loss_fn` returns a tensor of shape [4, 8], not a scalar", "reduce it, for example with `.mean()`"),
        (lambda model, x: (model(x).mean(), 3), Net, "APL360", NO_TENSOR.format("a `tuple`"), None),
        (lambda model, x: Output(), Net, "APL360", NO_TENSOR.format("an `Output`"), "return `output.loss`"),
        (mean_square, lambda: Net().requires_grad_(False), "APL361", "no parameter of the model requires a gradient",
         None),
        (mean_square, Growing, None, "the forward replaces `cache` by a tensor of another shape or type", None),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_traced_is_refused(loss_fn, model, code, message, help) -> None:
    diagnostic, _ = refused_step(loss_fn, model())
    assert diagnostic.message == message
    assert code in (None, diagnostic.code)
    assert help in (None, diagnostic.help)


def test_a_loss_of_one_element_is_a_scalar() -> None:
    model, x = net()
    loss, _ = trace_step(model, lambda model, x: model(x).mean().reshape(1), x)(x)
    assert loss.shape == (1,)


@pytest.mark.parametrize("loss_fn", [lambda model, x: model(x).mean().detach(), lambda model, x: x.mean()])
def test_a_loss_that_depends_on_no_parameter(loss_fn: Callable[..., Tensor]) -> None:
    diagnostic, _ = refused_step(loss_fn)
    assert diagnostic.code == "APL361"
    assert "does not depend on any parameter" in diagnostic.message
    assert diagnostic.details == ("parameters that require one: `first.weight`, `first.bias`, `second.weight`, …",)


def test_a_loss_that_depends_on_the_input_alone() -> None:
    model, x = net()
    x.requires_grad_()
    with pytest.raises(PolicyGraphError, match="does not depend on any parameter"):
        trace_step(model, lambda model, x: x.square().mean(), x)


def item(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).mean() * (2.0 if x.sum().item() > 0 else 1.0)


def branch(model: nn.Module, x: Tensor) -> Tensor:
    y = model(x)
    return y.mean() if y.sum() > 0 else y.square().mean()


def loop(model: nn.Module, x: Tensor) -> Tensor:
    return sum((model(x).mean() for _ in range(int(x.abs().sum()))), torch.zeros(()))


@pytest.mark.parametrize("loss_fn", [item, branch, loop])
def test_a_step_that_asks_for_values(loss_fn: Callable[..., Tensor]) -> None:
    diagnostic, error = refused_step(loss_fn)
    assert diagnostic.code == "APL362"
    assert "branches on the values of a tensor" in diagnostic.message
    assert "test_against_eager.py" in diagnostic.details[0]
    assert (
        loss_fn.__code__.co_firstlineno
        < int(diagnostic.details[0].split(":")[1])
        <= loss_fn.__code__.co_firstlineno + 2
    )
    assert "torch.where" in diagnostic.help
    assert error.__cause__ is not None


def test_an_error_of_the_users_own() -> None:
    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.reshape(3, -1)).mean()

    diagnostic, error = refused_step(loss_fn)
    assert diagnostic.code == "APL363"
    assert diagnostic.message.startswith("the step cannot be traced: RuntimeError: ")
    assert "`return model(x.reshape(3, -1)).mean()`" in diagnostic.details[0]
    assert isinstance(error.__cause__, RuntimeError)


def test_a_write_to_what_is_made_of_a_tensor_from_around() -> None:
    from_around = torch.ones(6, 4)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        made = from_around.new_zeros(6, 4)
        made[:, 0] = x.sum()
        return model(made).mean()

    diagnostic, _ = refused_step(loss_fn)
    assert diagnostic.code == "APL363"
    assert "writes to a tensor that is made of one that is no input of the step" in diagnostic.message
    assert "as part of the batch" in diagnostic.help
    assert "`made[:, 0] = x.sum()`" in diagnostic.details[0]


class Overlapping(Net):
    def __init__(self) -> None:
        super().__init__()
        both = torch.zeros(2, 8)
        self.register_buffer("whole", both)
        self.register_buffer("row", both[0])

    def forward(self, x: Tensor) -> Tensor:
        self.row += 1
        return super().forward(x) + self.whole.sum()


def test_a_write_to_one_of_two_buffers_in_the_same_memory() -> None:
    assert refused_step(mean_square, Overlapping())[0].code == "APL366"


@pytest.mark.parametrize("without_data", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
@pytest.mark.filterwarnings("error")
def test_such_a_write_in_a_model_without_data(without_data: Callable[[], AbstractContextManager[Any]]) -> None:
    with without_data():
        model, (_, x) = Overlapping(), net()
    with pytest.raises(PolicyGraphError) as caught:
        trace_step(model, mean_square, x, device="cuda")
    assert [each.code for each in caught.value.diagnostics] == ["APL366"]


def test_a_write_to_a_tensor_of_nobodys() -> None:
    seen = torch.zeros(8)

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        seen.add_(1)
        return (model(x) * seen).mean()

    diagnostic, _ = refused_step(loss_fn)
    assert diagnostic.code == "APL368"
    assert "writes (`aten.add_.Tensor`) to a tensor that is no parameter" in diagnostic.message
    assert "register it as a buffer" in diagnostic.help


def test_the_model_is_whole_after_a_refusal() -> None:
    model, x = net()
    parameters = dict(model.named_parameters())
    with pytest.raises(PolicyGraphError):
        trace_step(model, item, x)
    assert all(value is parameters[name] for name, value in model.named_parameters())
    trace_step(model, mean_square, x)(x)


def test_an_operator_that_runs_with_other_strides_than_it_was_traced_with_is_named() -> None:
    @torch.library.custom_op("policylang_tests::turned", mutates_args=())
    def turned(x: Tensor) -> Tensor:
        return x.t().contiguous().t()

    turned.register_fake(torch.empty_like)
    turned.register_autograd(lambda _context, gradient: gradient)
    model = nn.Linear(4, 4)
    step = trace_step(model, lambda own, x: turned(own(x)).view(-1).sum(), torch.randn(3, 4))
    with pytest.raises(PolicyGraphError, match=r"(?s)APL337.*`policylang_tests.turned.*strides \(1, 3\), .* \(4, 1\)"):
        step(torch.randn(3, 4))


def test_of_an_operator_with_several_results_it_is_the_operator_that_is_named() -> None:
    """PatchTST's batch norm, of patches that are transposed around it."""
    model = nn.BatchNorm1d(4)
    step = trace_step(model, lambda own, x: own(x.transpose(1, 2)).transpose(1, 2).view(-1).sum(), torch.randn(2, 3, 4))
    with pytest.raises(PolicyGraphError, match=r"(?s)APL337.*`aten._native_batch_norm_legit_functional"):
        step(torch.randn(2, 3, 4))
