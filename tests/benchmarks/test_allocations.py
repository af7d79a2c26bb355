"""Bytes as the allocator saw them are those of the tensors, also where no operator makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policylang
from benchmarks.allocations import step_allocations

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


def test_saved_and_peak_to_the_byte() -> None:
    x = torch.ones(KIB, requires_grad=True)
    memory = step_allocations(lambda: KeepsTwo.apply(x))  # type: ignore[no-untyped-call]
    assert memory.saved == 2 * 4 * KIB
    # in the backward: both kept values, the loss and its gradient, the sum of the two, and the product
    assert memory.peak == 2 * 4 * KIB + 4 + 4 + 4 * KIB + 4 * KIB


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_what_a_compiled_step_keeps_is_what_the_plan_says(inner: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 64))
    batch = torch.rand(32, 64)
    backend = policylang.backend(policylang.parse("recompute everything; save addmm"), inner=inner)
    compiled = torch.compile(model, backend=backend)
    compiled(batch).sum().backward()
    memory = step_allocations(lambda: compiled(batch).sum())
    assert memory.saved == policylang.report(backend).saved.bytes > 0
    assert memory.peak > memory.saved
