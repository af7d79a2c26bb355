"""A call has to bring what was traced; what else it brings is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from policylang import trace_step
from policylang.errors import PolicyGraphError
from tests.tracing.steps import eager_step, mean_square, net, twin


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
    assert refused(step, {**batch, "squared": False}, weights, 0.5).details == (
        "input[0]['squared']: traced with the bool `True`, called with the bool `False`",
    )
    assert refused(step, batch, weights, 0.25).details == (
        "input[2]: traced with the float `0.5`, called with the float `0.25`",
    )
    assert refused(step, batch, [weights[0], 3], 0.5).details == (
        "input[1][1]: traced with float32[8] on cpu, called with the int `3`",
    )


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
