"""Bytes as the allocator saw them are those of the tensors, also where no operator makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import policylang
from benchmarks.allocations import step_allocations
from tests.support.keeping import kept_two


def test_saved_and_peak_to_the_byte() -> None:
    kept_two(lambda step, _: step_allocations(step))


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
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
