"""Blocks that differentiate a part of themselves, alone and inside one another: what runs again then is nobody else's.

Forces are the gradient of an energy that the block has just computed. With a checkpoint inside a checkpoint, the
backward that runs in the inner one may need what the outer one, which is still running, has computed.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import policylang

Function = Callable[[Tensor], Tensor]
Around = Callable[[Function], Function]

POLICIES = {
    "recompute": "recompute everything",
    "save": "save everything",
    "some": "recompute everything\noptional save sin, exp\noptional save every 2nd mul",
}


class Block(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def plain(function: Function) -> Function:
    return lambda x: checkpoint(function, x, use_reentrant=False)


def under(policy: str) -> Around:
    loaded = policylang.parse(f"policy p\n{policy}\n")

    def around(function: Function) -> Function:
        block = Block(function)
        contexts = policylang.context_fn(loaded, block, strict=True)
        return lambda x: checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    return around


def gradient(function: Function) -> Function:
    def differentiated(x: Tensor) -> Tensor:
        (found,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return found

    return differentiated


def scaled_by_its_slope(x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(x.sin().exp().sum(), x)
    return (x.sin() * slope).exp().sin()


def alone(around: Around) -> Function:
    return around(scaled_by_its_slope)


def inside_one_another(around: Around) -> Function:
    return gradient(around(gradient(around(scaled_by_its_slope))))


def differentiated_twice(around: Around) -> Function:
    return around(gradient(gradient(around(scaled_by_its_slope))))


def of_the_outer_block(around: Around) -> Function:
    def outer(x: Tensor) -> Tensor:
        energy = x.exp().sin()

        def inner(z: Tensor) -> Tensor:
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return z.sin() * force

        return around(inner)(x.cos())

    return around(outer)


def of_the_outer_block_and_again(around: Around) -> Function:
    def outer(x: Tensor) -> Tensor:
        energy = x.exp().sin()

        def inner(z: Tensor) -> Tensor:
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return z.sin() * force

        return gradient(lambda y: around(inner)(y.cos()))(x)

    return around(outer)


def of_a_block_before(around: Around) -> Function:
    first = around(lambda x: x.exp().sin())

    def both(x: Tensor) -> Tensor:
        energy = first(x)

        def second(z: Tensor) -> Tensor:
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return z.sin() * force

        return around(second)(x.cos())

    return both


SHAPES = [
    alone,
    inside_one_another,
    differentiated_twice,
    of_the_outer_block,
    of_the_outer_block_and_again,
    of_a_block_before,
]


READ_TWICE = {of_the_outer_block, of_the_outer_block_and_again}
"""One backward runs the outer block again twice, and what it saves is gone after the first time unless it is kept."""


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_that_differentiate_inside_one_another(
    shape: Callable[[Around], Function], policy: str, early_stop: bool
) -> None:
    """The first call is observed, the others follow a plan."""

    def gradients(function: Function) -> list[Tensor]:
        found = []
        for number in range(3):
            x = torch.linspace(0.1, 1 + number, 5).requires_grad_()
            function(x).sum().backward(retain_graph=shape in READ_TWICE)
            assert x.grad is not None
            found.append(x.grad)
        return found

    with set_checkpoint_early_stop(early_stop):
        expected = gradients(shape(plain))
        assert all(map(torch.equal, gradients(shape(under(POLICIES[policy]))), expected))


def test_what_stands_in_for_an_unread_result_is_no_operator_of_the_block_around() -> None:
    def picks(x: Tensor) -> Tensor:
        _, places = torch.topk(x, 2)
        return x.gather(-1, places).sin()

    def gradients(around: Around) -> list[Tensor]:
        inner = around(picks)
        function, found = around(lambda x: inner(x).cos()), []
        for number in range(3):
            x = torch.linspace(0.1, 1 + number, 5).requires_grad_()
            function(x).sum().backward()
            assert x.grad is not None
            found.append(x.grad)
        return found

    assert all(map(torch.equal, gradients(under("save topk\noptional recompute sin")), gradients(plain)))
