"""The time of a collective: rings by hand, measured tables, and which network a group is on."""

from __future__ import annotations

import pytest

from policylang.graph.facts import Facts, Flag, GraphKind, Group, Ref
from policylang.language.devices.profile import (
    CollectiveKind,
    CollectiveTimes,
    DeviceProfile,
    Network,
    Rate,
    collective_kind,
)
from policylang.simulation.collective_times import collective_seconds
from tests.support.textgraph import GraphBuilder

C10D, FUNCTIONAL = "c10d", "_c10d_functional"


def device(*networks: Network) -> DeviceProfile:
    return DeviceProfile("d", {}, Rate.constant(1.0), networks=networks)


RING = device(Network(bandwidth=10.0, latency=1.0))


def collective(target: str, put: int, made: int, ranks: tuple[int, ...] = (0, 1, 2, 3), **more) -> Facts:
    """A graph whose last row is a collective of one tensor; 0 ranks where they are not known."""
    builder = GraphBuilder()
    x = builder.add("x", "input", (), bytes=put)
    builder.groups["g"] = Group("g", ranks, len(ranks))
    builder.add("c", target, (x,), flags=Flag.COLLECTIVE, group="g", bytes=made, **{"arguments": (Ref(x),), **more})
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
    facts = collective(f"{FUNCTIONAL}.{name}.default", put, made)
    assert collective_seconds(facts, 1, RING) == 1 + sent / 10


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_allgather_base_", CollectiveKind.ALL_GATHER),
        ("allgather_into_tensor_coalesced_", CollectiveKind.ALL_GATHER),
        ("_reduce_scatter_base_", CollectiveKind.REDUCE_SCATTER),
        ("reduce_scatter_tensor_coalesced", CollectiveKind.REDUCE_SCATTER),
        ("allreduce_coalesced_", CollectiveKind.ALL_REDUCE),
        ("shard_dim_alltoall", CollectiveKind.ALL_TO_ALL),
        ("reduce_", CollectiveKind.BROADCAST),
        ("gather_", CollectiveKind.SCATTER),
        ("recv_any_source_", CollectiveKind.POINT_TO_POINT),
        ("monitored_barrier_", CollectiveKind.BARRIER),
        ("ncclSomething", None),
    ],
)
def test_a_collective_is_known_by_any_of_its_names(name: str, kind: CollectiveKind | None) -> None:
    assert collective_kind(name) is kind


def test_coalesced_tensors_travel_together() -> None:
    builder = GraphBuilder()
    rows = tuple(builder.add(name, "input", (), bytes=40) for name in "ab")
    arguments = (tuple(map(Ref, rows)), 4, "dp:4")
    builder.add(
        "c",
        f"{FUNCTIONAL}.all_gather_into_tensor_coalesced.default",
        rows,
        flags=Flag.COLLECTIVE | Flag.MULTI_OUTPUT,
        group="dp:4",
        bytes=320,
        arguments=arguments,
    )
    assert collective_seconds(builder.facts(GraphKind.FLAT), 2, RING) == 1 + 240 / 10


def test_what_is_handed_in_for_the_result_is_not_sent() -> None:
    for target, arguments in (
        (f"{C10D}._allgather_base_.default", (Ref(0), Ref(1))),
        (f"{FUNCTIONAL}.all_gather_into_tensor_out.default", (Ref(1), 4, "dp:4", Ref(0))),
        (f"{C10D}.allgather_.default", (((Ref(0),),), (Ref(1),))),
    ):
        builder = GraphBuilder()
        rows = (builder.add("out", "input", (), bytes=400), builder.add("x", "input", (), bytes=100))
        flags = Flag.COLLECTIVE | Flag.WRITES
        builder.add("c", target, rows, flags=flags, group="dp:4", bytes=400, arguments=arguments)
        assert collective_seconds(builder.facts(GraphKind.FLAT), 2, RING) == 1 + 300 / 10, target


def test_a_group_of_one_sends_nothing() -> None:
    assert collective_seconds(collective(f"{FUNCTIONAL}.all_reduce.default", 400, 400, (3,)), 1, RING) == 0


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
    servers = device(Network(4, 1e9), Network(bandwidth=1.0))
    facts = collective(f"{FUNCTIONAL}.broadcast.default", 400, 400, ranks)
    assert collective_seconds(facts, 1, servers) == (400 / 1e9 if fast else 400)


def test_a_group_of_unknown_ranks_goes_by_its_size_and_one_of_unknown_size_by_its_bytes() -> None:
    servers = device(Network(4, 1e9), Network(bandwidth=1.0))
    builder = GraphBuilder()
    builder.add("x", "input", (), bytes=100)
    for size in (4, 8, 0):
        builder.groups[f"g{size}"] = Group(f"g{size}", (), size)
    target, flags = f"{FUNCTIONAL}.all_gather_into_tensor.default", Flag.COLLECTIVE
    builder.add("four", target, (0,), flags=flags, group="g4", bytes=400)
    builder.add("eight", target, (0,), flags=flags, group="g8", bytes=800)
    builder.add("unknown", target, (0,), flags=flags, group="g0", bytes=800)
    builder.add("nothing known", f"{FUNCTIONAL}.all_reduce.default", (0,), flags=flags, group="g0", bytes=100)
    facts = builder.facts(GraphKind.FLAT)
    assert [collective_seconds(facts, row, servers) for row in range(1, 5)] == [300 / 1e9, 700, 700, 200]


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
    table = Network(
        times=(
            measured("all_gather_into_tensor_out", 4, (1, 5.0)),
            measured("all_gather_into_tensor", 4, (1, 6.0)),
            measured("AllReduce", 4, (1, 7.0)),
        )
    )
    both = device(table, Network(bandwidth=1.0))

    def seconds(name: str, ranks: int = 4) -> float | None:
        return collective_seconds(collective(f"{FUNCTIONAL}.{name}.default", 1, ranks, tuple(range(ranks))), 1, both)

    assert seconds("all_gather_into_tensor") == 6
    assert seconds("all_gather_into_tensor_out") == 5
    assert seconds("all_gather_into_tensor_coalesced") == 6
    assert seconds("all_reduce_") == 7
    assert seconds("all_gather_into_tensor", ranks=8) == 7  # not measured: the ring of the next
    assert seconds("broadcast") == 1
    assert collective_seconds(collective(f"{FUNCTIONAL}.broadcast.default", 1, 1), 1, device(table)) is None


def test_a_network_with_a_table_and_a_bandwidth_has_both() -> None:
    network = Network(bandwidth=1.0, latency=0.5, times=(measured("all_reduce", 4, (1, 7.0)),))
    for name, expected in (("all_reduce", 7.0), ("broadcast", 1.5)):
        assert collective_seconds(collective(f"{FUNCTIONAL}.{name}.default", 1, 1), 1, device(network)) == expected
