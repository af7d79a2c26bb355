"""Joint graphs of programs that write: to inputs that share memory, and to values of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, compiled_function, nop
from torch import Tensor

import policylang
from policylang.errors import PolicyMatchError

Function = Callable[..., Any]
POLICIES = ["undecided -> auto", "save everything", "optional recompute everything"]


def partitioner(text: str) -> Any:
    return policylang.partitioner(policylang.parse(f"policy p\n{text}\n"), agree=False)


def step(function: Function, inputs: list[Tensor], leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    returned = function(*inputs)
    values = [returned] if isinstance(returned, Tensor) else list(returned)
    loss = sum((number + 2) * value.sin().sum() for number, value in enumerate(values))
    assert isinstance(loss, Tensor)
    loss.backward()
    return values, [leaf.grad for leaf in leaves]


def assert_same(function: Function, compiled: Function, made: Callable[[], tuple[list[Tensor], list[Tensor]]]) -> None:
    expected, expected_gradients = step(function, *made())
    found, gradients = step(compiled, *made())
    for one, other in zip([*expected, *expected_gradients], [*found, *gradients], strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or (one.shape == other.shape and torch.allclose(one, other))


@pytest.mark.parametrize("policy", POLICIES)
def test_an_input_whose_memory_another_input_shares_changes_its_shape(policy: str) -> None:
    def function(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Any:
        b.add_(1)
        d.unsqueeze_(0)
        return a + c + d, b.view(-1)

    def made() -> tuple[list[Tensor], list[Tensor]]:
        leaves = [torch.full((2, 2), value, requires_grad=True) for value in (0.5, 0.7)]
        first, second = (leaf.add(1) for leaf in leaves)
        return [first.view(-1), second.view(-1), first.view(-1), second.view(-1)], leaves

    compiled = aot_function(function, nop, nop, partition_fn=partitioner(policy), keep_inference_input_mutations=True)
    assert_same(function, compiled, made)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_that_returns_no_gradient_has_nothing_to_plan(policy: str) -> None:
    """The only gradient goes to a view of an input that asks for none."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        return a.view(-1).requires_grad_()

    inputs = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    returned = aot_function(function, nop, nop, partition_fn=partitioner(policy))(*inputs)
    assert returned.requires_grad
    assert torch.equal(returned, inputs[0].view(-1))
    parted = policylang.parse(f"policy p\n{policy}\n")
    assert aot_function(
        function,
        nop,
        nop,
        partition_fn=lambda *given, **options: policylang.partition(*given, policy=parted, **options),
    )(*inputs).requires_grad


class WritesItsOwn(torch.autograd.Function):
    """Saves a value that it has written to since it made it."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        x = b + 1
        x.t().mul_(3)
        ctx.save_for_backward(x)
        return x * a

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0] * 2, None


def as_written(function: Function, policy: str) -> Function:
    """The graph keeps the program's writes, as ``make_fx`` traces them."""
    options = {"keep_inference_input_mutations": True, "disable_functionalization": True, "dynamic": False}
    found: Function = compiled_function(function, nop, nop, partition_fn=partitioner(policy), **options)
    return found


@pytest.mark.parametrize("policy", [*POLICIES, "undecided -> auto\noptional recompute add"])
def test_what_the_forward_writes_to_after_it_made_it_is_saved(policy: str) -> None:
    """A second run of the addition would give the value before the writing."""

    def made() -> tuple[list[Tensor], list[Tensor]]:
        leaf = torch.full((3, 3), 0.7, requires_grad=True)
        return [leaf, torch.full((3, 3), 0.9)], [leaf]

    def function(a: Tensor, b: Tensor) -> Tensor:
        found: Tensor = WritesItsOwn.apply(a, b)
        return found

    assert_same(function, as_written(function, policy), made)


def test_a_rule_that_has_it_run_again_is_an_error() -> None:
    compiled = as_written(WritesItsOwn.apply, "undecided -> auto\nrecompute add")
    with pytest.raises(PolicyMatchError, match="`add`: it reads memory that the graph changes"):
        compiled(torch.full((3, 3), 0.7, requires_grad=True), torch.full((3, 3), 0.9))
