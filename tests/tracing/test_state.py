"""A traced step runs on the model as it is when it is called, and leaves it alone while it is traced."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from policylang import trace_step
from policylang.errors import PolicyGraphError
from policylang.graph import marks
from policylang.graph.collect import collect
from policylang.graph.facts import GraphKind, Phase
from tests.support.models import ZOO
from tests.tracing.test_against_eager import (
    Net,
    assert_like_eager,
    calls,
    eager_step,
    loss_of,
    mean_square,
    net,
    phase,
    trace,
    twin,
)


def test_a_state_dict_loaded_after_tracing_is_seen() -> None:
    model, x = net()
    step = trace_step(model, mean_square, x)
    before = step(x)[0]
    torch.manual_seed(1)
    other = Net()
    model.load_state_dict(other.state_dict())
    assert not torch.equal(step(x)[0], before)
    assert_like_eager(step, other, x)


def test_parameters_put_in_the_place_of_others_are_seen() -> None:
    model, x = net()
    step = trace_step(model, mean_square, x)
    torch.manual_seed(1)
    other = Net()
    model.load_state_dict(other.state_dict(), assign=True)
    assert_like_eager(step, other, x)


def test_a_shared_parameter_has_one_gradient_under_its_first_name() -> None:
    example = ZOO["shared_parameters"]()
    _, gradients = trace(example)(*example.inputs)
    names = [name for name, _ in example.module.named_parameters()]
    assert list(gradients) == names
    assert "embedding.weight" in gradients
    assert "head.weight" not in gradients
    assert not any(name.startswith("layers.2") for name in gradients)
    eager = eager_step(twin(example.module), loss_of(example), *example.inputs)
    torch.testing.assert_close(gradients, eager[1])


def test_frozen_and_unused_parameters_have_no_gradient() -> None:
    model, x = net()
    model.first.weight.requires_grad_(False)
    model.unused = nn.Linear(2, 2)
    step = trace_step(model, mean_square, x)
    assert list(step(x)[1]) == ["first.bias", "second.weight", "second.bias"]
    assert_like_eager(step, model, x)


def test_tracing_leaves_the_model_as_it_was() -> None:
    class Hoarder(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = super().forward(x)
            self.register_buffer("cache", self.last.detach())
            return self.last

    torch.manual_seed(0)
    model, x = Hoarder(), torch.randn(4, 8)
    parameters, before = dict(model.named_parameters()), {key: p.clone() for key, p in model.state_dict().items()}
    step = trace_step(model, mean_square, x)
    assert not hasattr(model, "last")
    assert model.calls == 0
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert "does not repeat the change of `calls`" in str(step)
    model(x).sum().backward()


class Average(nn.Module):
    """Keeps its running mean by putting a new tensor in the buffer's place, as some libraries do."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean


def test_a_buffer_that_the_forward_replaces_is_updated() -> None:
    torch.manual_seed(0)
    model, x = Average(), torch.randn(4, 8)
    other, buffer = twin(model), model.mean
    step = trace_step(model, mean_square, x)
    for _ in range(2):
        step(x)
        eager_step(other, mean_square, x)
    assert model.mean is buffer
    assert torch.equal(model.mean, other.mean)


class Attributes(nn.Module):
    """Keeps tensors as plain attributes: one it writes in place, one it replaces, one that only its owner sets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.count, self.mean, self.scale = torch.zeros(()), torch.zeros(8), torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        y = self.linear(x) * self.scale / self.count
        self.mean = 0.5 * self.mean + y.detach().mean(0)
        self.last = y
        return y - self.mean


def test_tensors_that_are_plain_attributes_are_state_too() -> None:
    torch.manual_seed(0)
    model, x = Attributes(), torch.randn(4, 8)
    model(x)
    model.last = model.last.detach()[:2]
    model.count.zero_()
    other = twin(model)
    step = trace_step(model, mean_square, x)
    assert float(model.count) == 0, "tracing does not count"
    for scale in (1.0, 2.0, 3.0):
        model.scale, other.scale = torch.full((8,), scale), torch.full((8,), scale)
        torch.testing.assert_close(step(x), eager_step(other, mean_square, x))
    assert "does not repeat the change of `last`" in str(step)
    assert torch.equal(model.count, other.count)
    torch.testing.assert_close(model.mean, other.mean)


def test_each_buffer_is_written_once_at_the_end() -> None:
    step = trace(ZOO["counter"]())
    writes = calls(step, torch.ops.aten.copy_.default)
    assert [node.args[0].name for node in writes] == ["buffer_count", "buffer_cache"]
    assert [phase(node) for node in writes] == [marks.EPILOGUE] * 2
    tail = list(step.gm.graph.nodes)[-3:]
    assert tail[:2] == writes
    assert "writes `count`, `cache`" in str(step)


def test_an_input_that_the_loss_writes_to_is_written_to() -> None:
    model, x = net()

    def loss_fn(model: nn.Module, x: Tensor, seen: Tensor) -> Tensor:
        seen[1:] += x[1:]
        return mean_square(model, x) + seen.mean()

    step = trace_step(model, loss_fn, x, torch.zeros(4, 8))
    seen = torch.zeros(4, 8)
    loss, _ = step(x, seen)
    assert torch.equal(seen[1:], x[1:])
    torch.testing.assert_close(loss, loss_fn(model, x, torch.zeros(4, 8)).detach())


def test_an_input_that_requires_a_gradient_can_be_differentiated_inside() -> None:
    """Forces from an energy: the gradient with respect to an input is part of the forward."""
    model, x = net()
    x.requires_grad_()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(model(x).cos().sum(), x, create_graph=True)
        return force.square().mean()

    loss, gradients = trace_step(model, loss_fn, x)(x)
    eager_loss, eager_gradients = eager_step(twin(model), loss_fn, x)
    torch.testing.assert_close(loss, eager_loss)
    torch.testing.assert_close(gradients, eager_gradients)
    assert x.grad is None or len(gradients) == len(eager_gradients)


def test_hooks_on_gradients_are_part_of_the_step() -> None:
    model, x = net()
    model.first.weight.register_hook(lambda gradient: 3 * gradient)
    model.second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0].sign(),))
    loss, gradients = trace_step(model, mean_square, x)(x)
    torch.testing.assert_close((loss, gradients), eager_step(model, mean_square, x))


def test_a_hook_on_a_complete_gradient_is_refused() -> None:
    model, x = net()
    model.second.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(PolicyGraphError, match=r"`second\.bias` has a hook for its complete"):
        trace_step(model, mean_square, x)


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "sgd_momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, weight_decay=0.1),
    "adam_amsgrad": lambda parameters: Adam(parameters, lr=0.01, amsgrad=True, weight_decay=0.1),
    "rmsprop": lambda parameters: RMSprop(parameters, lr=0.01, momentum=0.5),
}


def started(model: nn.Module, make: Callable[[Any], Optimizer], *batch: Any, loss_fn: Any = mean_square) -> Optimizer:
    """An optimizer that has taken one step."""
    optimizer = make(model.parameters())
    eager_step(model, loss_fn, *batch)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_three_steps_with_a_changing_learning_rate(make: Callable[[Any], Optimizer]) -> None:
    model, x = net()
    other = twin(model)
    optimizer, eager_optimizer = started(model, make, x), started(other, make, x)
    step = trace_step(model, mean_square, x, optimizer=optimizer)
    for rate in (0.05, 0.02, 0.01):
        for group in (*optimizer.param_groups, *eager_optimizer.param_groups):
            group["lr"] = rate
        loss, gradients = step(x)
        assert gradients == {}
        eager_loss, _ = eager_step(other, mean_square, x)
        eager_optimizer.step()
        torch.testing.assert_close(loss, eager_loss)
        torch.testing.assert_close(model.state_dict(), other.state_dict())
    torch.testing.assert_close([*optimizer.state.values()], [*eager_optimizer.state.values()])


def two_groups(groups: list[dict[str, Any]], _parameters: Any) -> Optimizer:
    return AdamW(groups, lr=0.01)


def test_a_real_model_with_frozen_parameters_and_two_groups() -> None:
    example = ZOO["resnet"]()
    loss_fn = loss_of(example)
    models = [example.module, twin(example.module)]
    optimizers = []
    for model in models:
        model.stem.requires_grad_(False)
        groups = [
            {"params": [p for p in model.parameters() if p.requires_grad and p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.requires_grad and p.ndim == 1], "lr": 0.003},
        ]
        make = partial(two_groups, groups)
        optimizers.append(started(model, make, *example.inputs, loss_fn=loss_fn))
    step = trace_step(models[0], loss_fn, *example.inputs, optimizer=optimizers[0])
    for _ in range(2):
        step(*example.inputs)
        eager_step(models[1], loss_fn, *example.inputs)
        optimizers[1].step()
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())


def test_tracing_leaves_the_optimizer_as_it_was() -> None:
    model, x = net()
    optimizer = started(model, MAKERS["adamw"], x)
    groups = [dict(group) for group in optimizer.param_groups]
    state = {parameter: dict(own) for parameter, own in optimizer.state.items()}
    trace_step(model, mean_square, x, optimizer=optimizer)
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        assert group.keys() == before.keys()
        assert all(group[key] is before[key] for key in before)
    assert [id(parameter) for parameter in optimizer.state] == [id(parameter) for parameter in state]
    for parameter, own in optimizer.state.items():
        assert all(own[key] is state[parameter][key] for key in own)
        assert float(own["step"]) == 1


def test_the_update_lies_outside_the_forward_and_the_backward() -> None:
    model, x = net()
    optimizer = started(model, MAKERS["adamw"], x)
    facts = collect(trace_step(model, mean_square, x, optimizer=optimizer).gm)
    assert facts.kind is GraphKind.FLAT
    last = max(row for row in range(len(facts)) if facts.phases[row] == Phase.BACKWARD)
    later = range(last + 1, len(facts))
    assert len(later) > 40
    assert {facts.phases[row] for row in later} == {Phase.OUTPUT}
    assert {"aten.copy_.default", "aten.lerp.Scalar"} <= {facts.targets[row] for row in later}
    assert facts.input_names[facts.index["buffer_optimizer_learning_rate_0"]] == "optimizer.learning_rate_0"


def refused(action: Callable[[], Any]) -> Any:
    with pytest.raises(PolicyGraphError) as caught:
        action()
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def test_an_optimizer_without_state() -> None:
    model, x = net()
    optimizer = AdamW(model.parameters())
    diagnostic = refused(lambda: trace_step(model, mean_square, x, optimizer=optimizer))
    assert diagnostic.code == "APL367"
    assert diagnostic.message == "the AdamW has no state yet, and would start from none at each call"
    assert not optimizer.state


def test_an_optimizer_of_another_model() -> None:
    model, x = net()
    diagnostic = refused(lambda: trace_step(model, mean_square, x, optimizer=SGD(twin(model).parameters(), lr=0.1)))
    assert diagnostic.code == "APL367"
    assert "a tensor of shape [8, 8] that is no parameter of the model" in diagnostic.message


def test_an_optimizer_with_other_settings_than_traced() -> None:
    model, x = net()
    optimizer = started(model, MAKERS["sgd_momentum"], x)
    step = trace_step(model, mean_square, x, optimizer=optimizer)
    optimizer.param_groups[0]["momentum"] = 0.5
    diagnostic = refused(lambda: step(x))
    assert diagnostic.code == "APL365"
    assert diagnostic.details == ("group 0: `momentum` was 0.9, now 0.5",)


def test_state_loaded_after_tracing_is_seen() -> None:
    model, x = net()
    optimizer = started(model, MAKERS["adamw"], x)
    step = trace_step(model, mean_square, x, optimizer=optimizer)
    saved_model, saved = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    saved = {**saved, "state": {k: {n: t.clone() for n, t in v.items()} for k, v in saved["state"].items()}}
    step(x)
    after = {key: value.clone() for key, value in model.state_dict().items()}
    step(x)
    model.load_state_dict(saved_model)
    optimizer.load_state_dict(saved)
    step(x)
    assert all(torch.equal(value, after[key]) for key, value in model.state_dict().items())
