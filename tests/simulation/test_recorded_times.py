"""Times of recorded graphs: against a baseline that was worked out elsewhere, and the same from a snapshot."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from policylang.graph import snapshot
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag, GraphKind
from policylang.graph.recorded import recorded_facts
from policylang.language.devices.profile import DeviceProfile, Network, Rate
from policylang.language.devices.reading import read_device
from policylang.planning.schedule import build_schedule
from policylang.simulation.node_times import lacking, node_times
from policylang.simulation.streams import step_time
from tests.support.flat_graphs import flat_graph
from tests.support.joint import capture_joint
from tests.support.models import ZOO

DATA = Path(__file__).parents[1] / "data"
BASELINE = {"bfloat16": Rate.constant(600e12), "float32": Rate.constant(600e12)}
RING = Network(bandwidth=45e9, latency=30e-6)
"""The cost model of the baseline: 600 TFLOP/s, 2.6 TB/s, pointwise operators 0.35 of their bytes, and collectives
30 µs and their bytes at 45 GB/s."""


def device(*networks: Network) -> DeviceProfile:
    return DeviceProfile("baseline", BASELINE, Rate.constant(2.6e12), pointwise=0.35, networks=networks)


@cache
def forward() -> Facts:
    return recorded_facts(DATA / "llama3_8b_fsdp64_forward.json.gz")


def test_the_forward_of_64_ranks_waits_for_every_gather_as_traced() -> None:
    """The baseline says 365.6 ms: 291 gathers, and what each returns at 45 GB/s. A ring sends 63 of 64 shards, as
    a rank has its own: 360.1 ms, and that is the whole difference."""
    facts = forward()
    gathers = [row for row, flags in enumerate(facts.flags) if flags & Flag.COLLECTIVE]
    found = step_time(facts, build_schedule(facts, ()), node_times(facts, device(RING)))
    assert len(gathers) == 291
    assert found.exposed == pytest.approx(sum(30e-6 + facts.bytes[row] * 63 / 64 / 45e9 for row in gathers))
    assert round(sum(30e-6 + facts.bytes[row] / 45e9 for row in gathers) * 1e3, 1) == 365.6
    assert round(found.exposed * 1e3, 1) == 360.1
    assert found.step == pytest.approx(found.forward)  # nothing is hidden


def test_measured_tables_price_by_what_a_rank_puts_in(tmp_path: Path) -> None:
    """The recorded table of 64 ranks says 0.25 ms for a shard of 1 MiB, which is 264 GB/s of what is gathered."""
    text = (
        "[compute]\nbfloat16 = 600e12\n[memory]\nbandwidth = 2.6e12\n"
        f"[[network]]\ntimes = '{DATA / 'colls64_1.table'}'\n"
    )
    (tmp_path / "d.toml").write_text(text)
    profile = read_device("d.toml", tmp_path)
    facts = forward()
    times = node_times(facts, profile)
    assert lacking(times) is None
    first = next(row for row, flags in enumerate(facts.flags) if flags & Flag.COLLECTIVE)  # the embedding
    put = facts.bytes[first] / 64 / (1 << 20)
    assert 8 < put < 16
    assert times.seconds[first] == pytest.approx((1.5 + (2.9 - 1.5) * (put - 8) / 8) * 1e-3)


def test_a_table_of_two_networks_is_taken_apart_by_its_groups(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text(
        "[compute]\nbfloat16 = 600e12\n[memory]\nbandwidth = 2.6e12\n"
        f"[[network]]\nranks = 8\ntimes = '{DATA / 'colls8_8.table'}'\ngroup = '1'\n"
        f"[[network]]\ntimes = '{DATA / 'colls8_8.table'}'\ngroup = '0'\n"
    )
    profile = read_device("d.toml", tmp_path)
    near, far = profile.networks
    assert {each.collective for each in near.times} == {"all_reduce", "all_gather_into_tensor"}
    assert len(far.times) == 3


def test_every_bundled_device_prices_all_of_the_recorded_forward() -> None:
    found = {}
    for name in ("a100", "h100", "h200", "b200", "mi300x", "cpu"):
        profile = read_device(name)
        times = node_times(forward(), profile)
        assert lacking(times) is None
        assert times.uncounted == {}
        found[name] = step_time(forward(), build_schedule(forward(), ()), times).step
    assert found["b200"] < found["h200"] <= found["h100"] < found["a100"] < found["cpu"]


def assert_same_times(facts: Facts) -> None:
    profile = read_device("cpu")
    again = snapshot.parse(snapshot.dump(facts))
    times, same = node_times(facts, profile), node_times(again, profile)
    assert list(times.seconds) == list(same.seconds)
    assert (times.uncounted, times.unpriced) == (same.uncounted, same.unpriced)
    assert lacking(times) is None
    schedule = build_schedule(facts, facts.forward)
    assert step_time(facts, schedule, times) == step_time(again, schedule, same)
    assert any(times.seconds)


def test_a_snapshot_has_the_times_of_its_graph() -> None:
    assert_same_times(forward())


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(ZOO))
def test_a_snapshot_of_a_model_has_the_times_of_its_graph(model: str) -> None:
    """Joint and flat; and nothing of a real model is without a price but what has no formula."""
    assert_same_times(collect(capture_joint(*ZOO[model]()).gm, kind=GraphKind.JOINT))
    if model != "mixtral":  # eager's grouped product takes bfloat16 alone
        assert_same_times(collect(flat_graph(ZOO[model]()).gm, kind=GraphKind.FLAT))
