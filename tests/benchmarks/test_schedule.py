"""The benchmark of orders: torch's passes run without a GPU on our times, and steps take the time that is simulated."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from benchmarks import schedule, schedule_peers
from benchmarks.schedule_graphs import process_groups, synthetic_half
from policylang.api.load import load_device
from policylang.graph.facts import Group
from policylang.simulation.node_times import CollectivePrices, node_times
from tests.support.versions import needs_overlap_scheduling_by_given_times

REFERENCE = load_device(schedule.REFERENCE)
SMALL = synthetic_half(150)
"""Two blocks."""


@needs_overlap_scheduling_by_given_times
def test_torch_schedules_by_our_times_without_a_gpu() -> None:
    with process_groups(SMALL.groups):
        before = schedule.judged(schedule.as_traced(SMALL), REFERENCE)
        alone, bucketed = (
            schedule.judged(schedule.of_torch(SMALL, REFERENCE, name), REFERENCE)
            for name in ("torch", "torch, pre-bucketing")
        )
    assert alone["exposed ms"] < before["exposed ms"]
    assert alone["collectives"] == before["collectives"] == 28
    assert bucketed["collectives"] < 28
    assert [node.name for node in SMALL.graph.nodes] == list(SMALL.facts.names)  # it got copies


def test_times_are_those_of_the_profile_and_a_size_of_nothing_is_its_latency() -> None:
    module = SMALL.fresh()
    prices = schedule_peers._Prices(SMALL, module, REFERENCE)
    times = node_times(SMALL.facts, REFERENCE)
    gather = next(row for row, target in enumerate(SMALL.facts.targets) if "all_gather" in target)
    node = list(module.graph.nodes)[gather]
    assert prices.milliseconds(node, None) == 1e3 * times.seconds[gather]
    assert prices.milliseconds(node, 0) == pytest.approx(1e3 * 30e-6)
    new = module.graph.node_copy(node)  # what a pass adds is priced when it asks
    assert prices.milliseconds(new, None) == prices.milliseconds(node, None)


@needs_overlap_scheduling_by_given_times
def test_torch_plans_by_the_names_of_blocks() -> None:
    assert schedule.blocks_of(SMALL.facts) == ["layers.1", "layers.0"]
    with process_groups(SMALL.groups):
        found = schedule.judged(schedule.of_torch(SMALL, REFERENCE, schedule.MANUAL), REFERENCE)
    assert found["collectives"] == 4  # a gather and a scatter of each block


def test_a_table_of_times_takes_the_place_of_the_networks(tmp_path: Path) -> None:
    path = tmp_path / "measured.table"
    path.write_text(
        "Group  Group Size  Collective  1MB (ms)  32MB (ms)\n"
        "0  64  all_gather_into_tensor  1.0  8.0\n"
        "1  8  all_gather_into_tensor  0.1  0.5\n"
    )
    device = schedule.with_times(REFERENCE, path)
    gather = next(row for row, target in enumerate(SMALL.facts.targets) if "all_gather" in target)
    near = evolve(SMALL.facts, groups={"0": Group("0", tuple(range(8)), 8)})
    prices = CollectivePrices(device)
    assert prices.seconds(SMALL.facts, gather) == pytest.approx((1 - 7 / 62) * 1e-3)  # 512 KiB: the line
    assert prices.seconds(near, gather) < 1.1e-4
    assert device.name == "measured"
