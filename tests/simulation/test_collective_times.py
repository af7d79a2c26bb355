"""The time of a collective: rings by hand, measured tables, and which network a group is on."""

from __future__ import annotations

import pytest

from policylang.graph.facts import Facts, Flag, GraphKind, Group, Ref
from policylang.language.devices.profile import CollectiveKind as Kind
from policylang.language.devices.profile import CollectiveTimes, DeviceProfile, Network, Rate, collective_kind
from policylang.simulation.node_times import CollectivePrices
from tests.support.textgraph import GraphBuilder

RING = (Network(bandwidth=10.0, latency=1.0),)
SERVERS = (Network(4, 1e9), Network(bandwidth=1.0))


def seconds(facts: Facts, row: int, *networks: Network) -> float | None:
    return CollectivePrices(DeviceProfile("d", {}, Rate.constant(1.0), networks=networks)).seconds(facts, row)


def collective(name: str, put: int, made: int, ranks: tuple[int, ...] = (0, 1, 2, 3)) -> Facts:
    """A graph whose last row is a collective of one tensor."""
    builder = GraphBuilder()
    x, target = builder.add("x", "input", (), bytes=put), f"_c10d_functional.{name}.default"
    builder.groups["g"] = Group("g", ranks, len(ranks))
    builder.add("c", target, (x,), flags=Flag.COLLECTIVE, group="g", bytes=made, arguments=(Ref(x),))
    return builder.facts(GraphKind.FLAT)


@pytest.mark.parametrize(
    ("name", "put", "made", "sent"),
    [
        ("all_gather_into_tensor", 100, 400, 300),
        ("reduce_scatter_tensor", 400, 100, 300),
        ("all_reduce", 400, 400, 600),
        ("all_reduce_", 400, 400, 600),
        ("all_to_all_single", 400, 400, 300),
        ("broadcast", 400, 400, 400),
        ("isend", 400, 400, 400),
        ("permute_tensor", 400, 400, 400),
        ("dispatch_of_some_library", 100, 400, 300),
    ],
)
def test_a_rank_of_a_ring_sends_what_its_collective_takes(name: str, put: int, made: int, sent: int) -> None:
    assert seconds(collective(name, put, made), 1, *RING) == 1 + sent / 10


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_allgather_base_", Kind.ALL_GATHER),
        ("allgather_into_tensor_coalesced_", Kind.ALL_GATHER),
        ("_reduce_scatter_base_", Kind.REDUCE_SCATTER),
        ("reduce_scatter_tensor_coalesced", Kind.REDUCE_SCATTER),
        ("allreduce_coalesced_", Kind.ALL_REDUCE),
        ("shard_dim_alltoall", Kind.ALL_TO_ALL),
        ("reduce_", Kind.BROADCAST),
        ("gather_", Kind.SCATTER),
        ("recv_any_source_", Kind.POINT_TO_POINT),
        ("monitored_barrier_", Kind.BARRIER),
        ("ncclSomething", None),
    ],
)
def test_a_collective_is_known_by_any_of_its_names(name: str, kind: Kind | None) -> None:
    assert collective_kind(name) is kind


@pytest.mark.parametrize(
    ("target", "arguments", "sent"),
    [
        ("_c10d_functional.all_gather_into_tensor_coalesced", ((Ref(0), Ref(1)), 4, "dp:4"), 1500),
        ("c10d._allgather_base_", (Ref(0), Ref(1)), 300),
        ("_c10d_functional.all_gather_into_tensor_out", (Ref(1), 4, "dp:4", Ref(0)), 300),
        ("c10d.allgather_", (((Ref(0),),), (Ref(1),)), 300),
    ],
)
def test_coalesced_tensors_travel_together_and_what_is_handed_in_for_the_result_is_not_sent(
    target: str, arguments: tuple, sent: int
) -> None:
    builder = GraphBuilder()
    rows = (builder.add("out", "input", (), bytes=400), builder.add("x", "input", (), bytes=100))
    more = {"flags": Flag.COLLECTIVE, "group": "dp:4", "bytes": 400, "arguments": arguments}
    builder.add("c", f"{target}.default", rows, **more)
    assert seconds(builder.facts(GraphKind.FLAT), 2, *RING) == 1 + sent / 10


def test_a_group_of_one_sends_nothing() -> None:
    assert seconds(collective("all_reduce", 400, 400, (3,)), 1, *RING) == 0


@pytest.mark.parametrize(
    ("ranks", "fast"),
    [
        ((0, 1, 2, 3), True),
        ((4, 7), True),
        ((3, 4), False),  # two neighbours on two servers
        ((0, 4), False),
        ((4, 5, 8), False),
    ],
)
def test_a_network_fits_groups_inside_so_many_neighbouring_ranks(ranks: tuple[int, ...], fast: bool) -> None:
    assert seconds(collective("broadcast", 400, 400, ranks), 1, *SERVERS) == (400 / 1e9 if fast else 400)


def test_a_group_of_unknown_ranks_goes_by_its_size_and_one_of_unknown_size_by_its_bytes() -> None:
    builder = GraphBuilder()
    builder.add("x", "input", (), bytes=100)
    for size in (4, 8, 0):
        builder.groups[f"g{size}"] = Group(f"g{size}", (), size)
    gather = "all_gather_into_tensor"
    for name, group, size in ((gather, 4, 400), (gather, 8, 800), (gather, 0, 800), ("all_reduce", 0, 100)):
        more = {"flags": Flag.COLLECTIVE, "group": f"g{group}", "bytes": size}
        builder.add(f"{name} {group}", f"_c10d_functional.{name}.default", (0,), **more)
    facts = builder.facts(GraphKind.FLAT)
    assert [seconds(facts, row, *SERVERS) for row in range(1, 5)] == [300 / 1e9, 700, 700, 200]


def measured(collective: str, ranks: int, *points: tuple[float, float]) -> CollectiveTimes:
    return CollectiveTimes(collective, ranks, points)


def test_measured_times_go_straight_between_sizes_and_on_beyond_them() -> None:
    times = measured("all_reduce", 4, (100, 3.0), (200, 4.0), (400, 8.0))
    assert [times.at(size) for size in (100, 150, 200, 300, 400)] == [3, 3.5, 4, 6, 8]
    assert times.at(600) == 12  # along the last two
    assert times.at(50) == 2.5  # along the first two
    assert times.at(0) == 2
    assert measured("all_reduce", 4, (100, 1.0), (200, 4.0)).at(50) == 0.5  # never less than the share of the first
    assert measured("all_reduce", 4, (100, 2.0), (200, 1.0)).at(400) == 2  # a table that falls at its end is noise
    assert [measured("all_reduce", 4, (100, 2.0)).at(size) for size in (50, 100, 300)] == [2, 2, 6]


def test_a_table_is_asked_by_the_operator_s_name_then_by_its_kind_then_the_next_network() -> None:
    gather = "all_gather_into_tensor"
    names = ((f"{gather}_out", 5.0), (gather, 6.0), ("AllReduce", 7.0))
    table = Network(times=tuple(measured(name, 4, (1, time)) for name, time in names))

    def found(name: str, ranks: int = 4) -> float | None:
        return seconds(collective(name, 1, ranks, tuple(range(ranks))), 1, table, Network(bandwidth=1.0))

    assert [found(f"{gather}{end}") for end in ("", "_out", "_coalesced")] == [6, 5, 6]
    assert found("all_reduce_") == 7
    assert found(gather, ranks=8) == 7  # not measured: the ring of the next
    assert found("broadcast") == 1
    assert seconds(collective("broadcast", 1, 1), 1, table) is None


def test_a_network_with_a_table_and_a_bandwidth_has_both() -> None:
    network = Network(bandwidth=1.0, latency=0.5, times=(measured("all_reduce", 4, (1, 7.0)),))
    for name, expected in (("all_reduce", 7.0), ("broadcast", 1.5)):
        assert seconds(collective(name, 1, 1), 1, network) == expected
