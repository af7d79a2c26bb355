"""What is fitted to measured collectives, and the table that holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from policylang.language.devices.profile import CollectiveTimes, Network
from policylang.language.devices.reading import read_table
from policylang.profiling.collectives import MIB, MeasuredGroup, in_a_table, ring
from policylang.profiling.profiler import table_text

BANDWIDTH, LATENCY = 10e9, 30e-6


def on_a_ring(collective: str, ranks: int, sent: float) -> CollectiveTimes:
    """``sent``: how many times its bytes a rank sends."""
    sizes = [MIB, 4 * MIB, 16 * MIB]
    return CollectiveTimes(collective, ranks, tuple((size, LATENCY + size * sent / BANDWIDTH) for size in sizes))


def test_bandwidth_and_latency_of_a_ring_are_found() -> None:
    ranks = 4
    times = [
        on_a_ring("all_gather_into_tensor", ranks, ranks - 1),
        on_a_ring("reduce_scatter_tensor", ranks, (ranks - 1) / ranks),
        on_a_ring("all_reduce", ranks, 2 * (ranks - 1) / ranks),
        on_a_ring("all_to_all_single", ranks, (ranks - 1) / ranks),
    ]
    assert ring(times) == (pytest.approx(BANDWIDTH, rel=0.01), pytest.approx(LATENCY, rel=0.01))


@pytest.mark.parametrize("seconds", [(1e-3,), (1e-3, 0.9e-3), (1e-3, 1e-3)])
def test_a_fit_to_noise_is_still_a_bandwidth(seconds: tuple[float, ...]) -> None:
    points = tuple((float(MIB * 2**at), each) for at, each in enumerate(seconds))
    bandwidth, latency = ring([CollectiveTimes("all_reduce", 2, points)])
    assert bandwidth is not None
    assert 0 < bandwidth < 1e12
    assert latency >= 0


def test_a_table_is_read_back_as_it_was_measured(tmp_path: Path) -> None:
    several = {
        "all_reduce": [(1.0 * MIB, 1.23456e-4), (2.0 * MIB, 3e-4), (4.0 * MIB, 5e-4)],
        "all_gather_into_tensor": [(1.0 * MIB, 2e-9), (2.0 * MIB, 1.5)],
        "all_to_all_single": [],
    }
    inside, across = in_a_table(several, 2), in_a_table(several, 8)
    groups = [MeasuredGroup("1", Network(2, 1e9, 0.0, inside)), MeasuredGroup("0", Network(None, 1e9, 0.0, across))]
    path = tmp_path / "measured.table"
    path.write_text(table_text(groups), encoding="utf-8")
    assert read_table(path, path.name) == tuple(
        (name, each) for name, times in (("1", inside), ("0", across)) for each in times
    )
    assert [len(each.points) for each in inside] == [2, 2]
