"""The memory of the device with and without `offload`, as PyTorch's ``MemTracker`` sees it, beside the plan's figures.

The graphs run node by node on fake values of an accelerator that is not there; what lies on the host is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import fx

from policylang.api.load import parse
from policylang.backends.flat import FlatPath
from policylang.backends.joint import JointPartitioner
from policylang.planning.plan import Plan
from policylang.planning.schedule import IN_FLIGHT
from policylang.simulation.memory import estimate_peak
from tests.support.elsewhere import AWAY, on_accelerator, with_memory
from tests.support.flat_graphs import copy_graph, flat_graph
from tests.support.joint import Joint, capture_joint
from tests.support.measured import measured, measured_flat
from tests.support.models import MLP, Example, llama, square_loss

LAYERS, ROWS, WIDTH = 6, 256, 16
GELU = ROWS * 2 * WIDTH * 4
"""Bytes of what one layer's activation function returns."""
POLICY = "undecided -> save\n{} gelu"


class Seen(NamedTuple):
    peak: int
    saved: int
    offloaded: int
    plan: Plan

    @property
    def foretold(self) -> int:
        return estimate_peak(self.plan.facts, self.plan.schedule).bytes


def wide() -> Example:
    """What its layers keep is many times its parameters."""
    torch.manual_seed(0)
    return Example(MLP(LAYERS, WIDTH), (torch.randn(ROWS, WIDTH),), square_loss)


def small_llama() -> Example:
    return llama(layers=1)


@cache
def joint(make: Callable[[], Example] = wide) -> Joint:
    captured = capture_joint(*make())
    return captured._replace(gm=on_accelerator(captured.gm))


@cache
def flat() -> fx.GraphModule:
    return on_accelerator(flat_graph(wide()).gm)


def partitioned(text: str, make: Callable[[], Example] = wide) -> Seen:
    graph = joint(make)
    partition = JointPartitioner(parse(text)).partition(
        copy_graph(graph.gm),
        num_fwd_outputs=graph.num_fwd_outputs,
        static_lifetime_input_indices=graph.static_lifetime_input_indices,
    )
    for half in (partition.forward, partition.backward):
        with_memory(half)
    seen = measured(partition, graph.num_fwd_outputs, str(AWAY))
    audit = partition.audit
    assert seen.saved == audit.saved_bytes
    return Seen(max(seen.forward, seen.backward), seen.saved, audit.offloaded_bytes, partition.plan)


def in_place(text: str) -> Seen:
    gm = copy_graph(flat())
    outcome = FlatPath().apply(gm, parse(text))
    audit = outcome.audit
    return Seen(measured_flat(with_memory(gm), str(AWAY)), audit.saved_bytes, audit.offloaded_bytes, outcome.plan)


@pytest.mark.parametrize("road", [partitioned, in_place])
def test_the_peak_falls_by_what_is_offloaded(road: Callable[[str], Seen]) -> None:
    """But for what is in use and on its way when the memory is highest, where the backward begins."""
    saving, moving = road(POLICY.format("save")), road(POLICY.format("offload"))
    assert moving.offloaded == LAYERS * GELU
    assert saving.saved - moving.saved == moving.offloaded
    assert moving.offloaded - (1 + IN_FLIGHT) * GELU <= saving.peak - moving.peak <= moving.offloaded
    assert saving.peak - moving.peak == saving.foretold - moving.foretold
    assert moving.peak == pytest.approx(moving.foretold, rel=0.03)


@pytest.mark.parametrize("road", [partitioned, in_place])
def test_a_budget_frees_what_it_allows(road: Callable[[str], Seen]) -> None:
    saving = road(POLICY.format("save"))
    moving = road(POLICY.format("offload") + f" up to {5 * GELU} B per rank")
    assert moving.offloaded == saving.saved - moving.saved == 5 * GELU
    assert saving.peak - moving.peak >= 2 * GELU


@pytest.mark.slow
def test_what_is_kept_of_a_llama_falls_by_what_is_offloaded() -> None:
    saving, moving = (partitioned(f"undecided -> save\n{verb} mm", small_llama) for verb in ("save", "offload"))
    assert saving.saved - moving.saved == moving.offloaded > 0
    assert moving.peak <= saving.peak


def test_both_roads_need_the_same() -> None:
    for verb in ("save", "offload"):
        assert partitioned(POLICY.format(verb)).peak == pytest.approx(in_place(POLICY.format(verb)).peak, rel=0.03)
