"""A traced step computes what eager PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import policylang
from policylang import trace_step
from tests.support.models import ZOO, Example
from tests.tracing.steps import Net, calls, eager_step, loss_of, mean_square, net, trace, twin


@pytest.mark.parametrize("make", ZOO.values(), ids=ZOO.keys())
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


class JacobianNet(nn.Module):
    """Adds to its output a Jacobian that ``torch.func`` takes of a part of itself, and a gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        jacobian = torch.func.jacrev(lambda row: self.inner(row).sin())(x[0])
        z = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(z).cos().sum(), z, create_graph=True)
        return self.outer(x + slope) @ jacobian


def test_derivatives_inside_the_forward() -> None:
    torch.manual_seed(0)
    model, x = JacobianNet(), torch.randn(3, 4)
    loss, gradients = trace_step(model, mean_square, x)(x)
    eager_loss, eager_gradients = eager_step(twin(model), mean_square, x)
    torch.testing.assert_close(loss, eager_loss)
    torch.testing.assert_close(gradients, eager_gradients)


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
        assert leaf.grad is not None
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
        loss, gradients = step(batch)
        eager_loss, eager_gradients = eager_step(twin(model), loss_fn, batch)
        torch.testing.assert_close(loss, eager_loss)
        torch.testing.assert_close(gradients, eager_gradients)


def test_tracing_and_running_under_no_grad() -> None:
    model, x = net()
    with torch.no_grad():
        step = trace_step(model, mean_square, x)
        loss, gradients = step(x)
    eager_loss, eager_gradients = eager_step(twin(model), mean_square, x)
    torch.testing.assert_close((loss, gradients), (eager_loss, eager_gradients))


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

    loss, gradients = trace_step(model, loss_fn, x)(x)
    eager_loss, eager_gradients = eager_step(twin(model), loss_fn, x)
    torch.testing.assert_close((loss, gradients), (eager_loss, eager_gradients))


class Permuted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = F.dropout(self.conv(x).flatten(2).transpose(1, 2), 0.4)
        return F.dropout(rows.sin().view(2, 4, 2, 3).permute(1, 3, 0, 2), 0.3)


@pytest.mark.parametrize("policy", [None, "recompute everything", "recompute everything; save random"])
def test_dropout_of_a_permuted_tensor_draws_what_eager_draws(policy: str | None) -> None:
    """An image as rows of pixels, as in SegFormer's head."""
    torch.manual_seed(0)
    model, x = Permuted(), torch.randn(2, 2, 4, 6)
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


LARGER = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "counter", "flex")]


@pytest.mark.parametrize("name", ["gpt2", "resnet", *LARGER])
def test_two_training_steps_are_bitwise_the_same_with_and_without_a_policy(name: str) -> None:
    example = ZOO[name]()
    plain_model, model = example.module, twin(example.module)
    plain = trace(example)
    step = trace_step(model, loss_of(example), *example.inputs)
    assert step.apply(policylang.parse("recompute everything; optional save matmul")) is step
    assert step.report.recomputed
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (plain_model, model)]
    for seed in (1, 2):
        for each, traced, optimizer in zip((plain_model, model), (plain, step), optimizers, strict=True):
            torch.manual_seed(seed)
            _, gradients = traced(*example.inputs)
            for parameter_name, parameter in each.named_parameters():
                parameter.grad = gradients.get(parameter_name)
            optimizer.step()
    for (key, value), expected in zip(model.state_dict().items(), plain_model.state_dict().values(), strict=True):
        assert torch.equal(value, expected), key


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


def test_a_policy_that_does_not_fit_leaves_the_step_as_it_was() -> None:
    model, x = net()
    step = trace_step(model, mean_square, x)
    nodes = [node.name for node in step.gm.graph.nodes]
    with pytest.raises(policylang.PolicyMatchError):
        step.apply(policylang.parse("save attention"))
    assert [node.name for node in step.gm.graph.nodes] == nodes
    step(x)


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
