"""A step whose memory can be told by hand."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from policylang.commands.small_llama import StepMemory

KIB = 1024


class KeepsTwo(torch.autograd.Function):
    """Keeps two results of 4 KiB for its backward, and needs 8 KiB more for a moment."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = x + 1, x + 2
        ctx.save_for_backward(*kept)
        torch.cat(kept)
        return kept[0].sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        one, two = ctx.saved_tensors
        return gradient * (one + two)


def kept_two(measure: Callable[[Callable[[], Tensor], Tensor], StepMemory]) -> None:
    """Holds what a measurement finds of a step against what is there."""
    x = torch.ones(KIB, requires_grad=True)
    memory = measure(lambda: KeepsTwo.apply(x), x)  # type: ignore[no-untyped-call]
    assert memory.saved == 2 * 4 * KIB
    # in the backward: both kept values, the loss and its gradient, the sum of the two, and the product
    assert memory.peak == 2 * 4 * KIB + 4 + 4 + 4 * KIB + 4 * KIB
