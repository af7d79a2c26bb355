"""A traced step that contains its optimizer trains as eager PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from policylang import trace_step
from policylang.errors import PolicyGraphError
from policylang.graph.collect import collect
from policylang.graph.facts import GraphKind, Phase
from tests.support.models import ZOO
from tests.tracing.steps import eager_step, loss_of, mean_square, net, twin

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
    for one, two in zip(optimizer.state.values(), eager_optimizer.state.values(), strict=True):
        torch.testing.assert_close(one, two)


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
