"""A step that a graph cannot hold is refused by name, with the line of the user's that is to blame."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from policylang import trace_step
from policylang.errors import PolicyGraphError
from tests.tracing.steps import Net, mean_square, net


def refused(loss_fn: Callable[..., Any], model: nn.Module | None = None) -> tuple[Any, PolicyGraphError]:
    default, x = net()
    with pytest.raises(PolicyGraphError) as caught:
        trace_step(model or default, loss_fn, x)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic, caught.value


def test_a_loss_that_is_not_reduced() -> None:
    diagnostic, _ = refused(lambda model, x: model(x).square())
    assert diagnostic.code == "APL360"
    assert diagnostic.message == "`loss_fn` returns a tensor of shape [4, 8], not a scalar"
    assert diagnostic.help == "reduce it, for example with `.mean()`"


def test_a_loss_that_is_no_tensor() -> None:
    class Output:
        loss = None

    assert (
        refused(lambda model, x: (model(x).mean(), 3))[0].message == "`loss_fn` returns a `tuple`, not a scalar tensor"
    )
    diagnostic, _ = refused(lambda model, x: Output())
    assert diagnostic.message == "`loss_fn` returns an `Output`, not a scalar tensor"
    assert diagnostic.help == "return `output.loss`"


def test_a_loss_of_one_element_is_a_scalar() -> None:
    model, x = net()
    loss, _ = trace_step(model, lambda model, x: model(x).mean().reshape(1), x)(x)
    assert loss.shape == (1,)


def test_nothing_requires_a_gradient() -> None:
    diagnostic, _ = refused(mean_square, Net().requires_grad_(False))
    assert diagnostic.code == "APL361"
    assert diagnostic.message == "no parameter of the model requires a gradient"


@pytest.mark.parametrize("loss_fn", [lambda model, x: model(x).mean().detach(), lambda model, x: x.mean()])
def test_a_loss_that_depends_on_no_parameter(loss_fn: Callable[..., Tensor]) -> None:
    diagnostic, _ = refused(loss_fn)
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
    diagnostic, error = refused(loss_fn)
    assert diagnostic.code == "APL362"
    assert "branches on the values of a tensor" in diagnostic.message
    assert "test_refusals.py" in diagnostic.details[0]
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

    diagnostic, error = refused(loss_fn)
    assert diagnostic.code == "APL363"
    assert diagnostic.message.startswith("the step cannot be traced: RuntimeError: ")
    assert "`return model(x.reshape(3, -1)).mean()`" in diagnostic.details[0]
    assert isinstance(error.__cause__, RuntimeError)


def test_a_buffer_replaced_by_another_shape() -> None:
    class Growing(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(1, 8))

        def forward(self, x: Tensor) -> Tensor:
            self.cache = torch.cat([self.cache, x])
            return super().forward(x)

    diagnostic, _ = refused(mean_square, Growing())
    assert diagnostic.message == "the forward replaces `cache` by a tensor of another shape or type"


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
    diagnostic, _ = refused(mean_square, Overlapping())
    assert diagnostic.code == "APL366"


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

    diagnostic, _ = refused(loss_fn)
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
