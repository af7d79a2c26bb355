"""The time of a step: what waits for what, by hand and against the slow account."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.graph.facts import Facts, Flag, GraphKind, Ref, Schedule, StepKind
from policylang.language.devices.profile import DeviceProfile, Network, Rate
from policylang.planning.schedule import build_schedule
from policylang.simulation.node_times import NodeTimes, node_times
from policylang.simulation.streams import StepTime, step_time
from tests.planning.strategies import graphs
from tests.simulation.time_reference import slow_step
from tests.support.drawn import examples
from tests.support.textgraph import GraphBuilder, facts_of

SECOND = DeviceProfile("one byte a second", {}, Rate.constant(1.0), host_bandwidth=1.0)
GATHER, WAIT = "_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default"


def step(facts: Facts, seconds: dict[str, float], schedule: Schedule | None = None) -> StepTime:
    """With the seconds of some nodes, and 0 for the others."""
    times = NodeTimes(SECOND, [seconds.get(name, 0.0) for name in facts.names], {}, {})
    return step_time(facts, schedule or build_schedule(facts, ()), times)


SHARDED = f"""
    %w = parameter bytes=10
    %v = parameter bytes=10
    %g = {GATHER}(%w) collective group=dp:4 bytes=40
    %a = aten.sin.default(%v) bytes=40
    %gw = {WAIT}(%g) bytes=40
    %b = aten.mul.Tensor(%a, %gw) bytes=40
    %loss = aten.sum.default(%b) bytes=4
    ---
    %t = tangent bytes=4
    %db = aten.mul.Tensor(%t, %gw) bytes=40
    %s = _c10d_functional.reduce_scatter_tensor.default(%db) collective group=dp:4 bytes=10
    %sw = _c10d_functional.wait_tensor.default(%s) bytes=10
    output(%loss, %sw)
"""


def test_computation_hides_a_collective_until_it_is_awaited_and_one_that_runs_again_is_awaited_again() -> None:
    facts, seconds = facts_of(SHARDED), {"g": 5, "a": 3, "b": 1, "loss": 1, "db": 2, "s": 4}
    assert step(facts, seconds) == StepTime(forward=10, recomputed=0, step=5 + 1 + 1 + 2 + 4, exposed=2 + 4)
    found = step(facts, seconds, build_schedule(facts, [facts.index[name] for name in ("g", "gw")]))
    assert (found.recomputed, found.step, found.exposed) == (5, 13 + 5, 6 + 5)


def test_a_step_of_an_unknown_kind_is_not_taken_for_a_copy() -> None:
    facts = facts_of(SHARDED)
    with pytest.raises(ValueError, match="not a valid StepKind"):
        step(facts, {}, Schedule.of([(max(StepKind) + 1, facts.index["g"], 0)]))


def test_collectives_of_one_group_queue_and_of_two_do_not() -> None:
    text = """
        %w = parameter bytes=10
        %g = _c10d_functional.all_gather_into_tensor.default(%w) collective group=dp:4 bytes=40
        %h = _c10d_functional.all_gather_into_tensor.default(%w) collective group={} bytes=40
        %hw = _c10d_functional.wait_tensor.default(%h) bytes=40
        %gw = _c10d_functional.wait_tensor.default(%g) bytes=40
        output(%hw, %gw)
    """
    assert step(facts_of(text.format("dp:4")), {"g": 5, "h": 3}).step == 8
    assert step(facts_of(text.format("tp:2")), {"g": 5, "h": 3}).step == 5


def test_a_collective_that_nobody_awaits_is_awaited_where_its_memory_is_read() -> None:
    """Those of c10d write what they are handed: their wait is not in the graph."""
    builder = GraphBuilder()
    x = builder.add("x", "input", (), bytes=4)
    out = builder.add("out", "aten.empty.memory_format", (), bytes=16)
    flags = Flag.COLLECTIVE | Flag.WRITES | Flag.EFFECTFUL
    target, arguments = "c10d._allgather_base_.default", (Ref(out), Ref(x))
    builder.add("g", target, (out, x), flags=flags, group="dp:4", arguments=arguments)
    builder.add("again", "aten.sin.default", (x,))
    view = builder.add("view", "aten.view.default", (out,), flags=Flag.VIEW, bytes=16)
    builder.add("later", "aten.sin.default", (x,))
    reader = builder.add("reader", "aten.sin.default", (view,))
    builder.add("output", "output", (reader,))
    facts = builder.facts(GraphKind.FLAT)
    found = step(facts, {"g": 9, "again": 2, "later": 3, "reader": 1})
    assert (found.step, found.exposed) == (10, 4)


def test_pieces_of_a_coalesced_gather_are_awaited_where_they_are_waited_for_not_where_they_are_taken() -> None:
    text = """
        %w = parameter bytes=10
        %g = _c10d_functional.all_gather_into_tensor_coalesced.default(%w) collective multi_output group=dp:4 bytes=80
        %g0 = builtin.getitem(%g) bytes=40
        %a = aten.sin.default(%w) bytes=10
        %w0 = _c10d_functional.wait_tensor.default(%g0) bytes=40
        output(%a, %w0)
    """
    found = step(facts_of(text), {"g": 9, "a": 4})
    assert (found.step, found.exposed) == (9, 5)


def test_copies_to_the_host_and_back_have_a_stream_each() -> None:
    facts = facts_of(SHARDED)
    row = facts.index["a"]
    steps = [
        (StepKind.FIRST_RUN, row, 0),
        (StepKind.COPY_TO_HOST, row, 0),
        (StepKind.FIRST_RUN, facts.index["b"], 0),
        (StepKind.WAIT_TO_HOST, row, 0),
        (StepKind.COPY_FROM_HOST, row, 1),
        (StepKind.FIRST_RUN, facts.index["db"], 1),
        (StepKind.WAIT_FROM_HOST, row, 1),
    ]
    found = step(facts, {"a": 1, "b": 30, "db": 15}, Schedule.of(steps))
    # 40 bytes take 40 seconds each way
    assert (found.step, found.exposed) == (1 + 40 + 40, 10 + 25)


@pytest.mark.parametrize("kind", list(GraphKind))
def test_an_empty_graph_takes_no_time(kind: GraphKind) -> None:
    builder = GraphBuilder()
    builder.add("output", "output", ())
    facts = builder.facts(kind)
    assert step_time(facts, build_schedule(facts, ()), node_times(facts, SECOND)) == StepTime(0, 0, 0, 0)


# --- against the slow account ----------------------------------------------------------------------------------------


@st.composite
def flat(draw: st.DrawFn) -> Facts:
    builder = GraphBuilder()
    builder.add("x", "input", (), bytes=8)
    for number in range(draw(st.integers(1, 12))):
        name, last = f"n_{number}", len(builder.rows) - 1
        row = st.integers(max(0, last - 3), last)
        reads = tuple(draw(st.lists(row, min_size=1, max_size=2, unique=True)))
        kind = draw(st.sampled_from(["sin", "sin", "view", "gather", "gather", "wait", "wait", "piece"]))
        size = draw(st.integers(0, 9))
        if kind == "gather":
            group = draw(st.sampled_from(["dp:4", "tp:2"]))
            flags = Flag.COLLECTIVE | Flag.MULTI_OUTPUT * draw(st.booleans())
            builder.add(name, GATHER, reads[:1], flags=flags, group=group, bytes=size)
        elif kind == "sin":
            builder.add(name, "aten.sin.default", reads, bytes=size)
        elif kind == "view":
            builder.add(name, "aten.view.default", reads[:1], flags=Flag.VIEW, bytes=size)
        else:
            builder.add(name, WAIT if kind == "wait" else "builtin.getitem", reads[:1], bytes=size)
    return builder.facts(GraphKind.FLAT)


@st.composite
def schedules(draw: st.DrawFn, facts: Facts) -> list[tuple[int, int, int]]:
    """First runs in order, then regions in which any rows run in order, with copies between."""
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    steps = [(0, row, 0) for row in calls if draw(st.integers(0, 4))]
    for region in (1, 2):
        rows = draw(st.lists(st.sampled_from(calls), max_size=6, unique=True))
        steps += [(draw(st.integers(0, 1)), row, region) for row in sorted(rows)]
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from([2, 3, 4, 5]))
        region = draw(st.integers(0, 2))
        steps.insert(draw(st.integers(0, len(steps))), (kind, draw(st.sampled_from(calls[:3])), region))
    return steps


def compare(facts: Facts, schedule: Schedule, device: DeviceProfile) -> None:
    times = node_times(facts, device)
    found = step_time(facts, schedule, times)
    expected = slow_step(facts, [*schedule], times)
    assert (found.recomputed, found.step, found.exposed) == pytest.approx(expected)
    assert found.forward == pytest.approx(sum(times.seconds[row] for row in facts.forward))
    assert found.exposed <= found.step


NETWORKS = (Network(2, 1.0, 2.0), Network(bandwidth=0.5, latency=3.0))
DEVICE = DeviceProfile("d", {}, Rate.constant(1.0), host_bandwidth=2.0, networks=NETWORKS)


@given(st.data())
@settings(max_examples=examples(30, 500))
def test_random_orders_take_as_long_as_the_slow_account_says(data: st.DataObject) -> None:
    facts = data.draw(flat())
    compare(facts, Schedule.of(data.draw(schedules(facts))), DEVICE)


@given(graphs(), st.data())
@settings(max_examples=examples(10, 200))
def test_planned_orders_take_as_long_as_the_slow_account_says(facts: Facts, data: st.DataObject) -> None:
    again = data.draw(st.lists(st.sampled_from(facts.forward), unique=True)) if facts.forward else []
    moved = data.draw(st.lists(st.sampled_from(facts.forward), unique=True, max_size=2)) if facts.forward else []
    compare(facts, build_schedule(facts, again, [row for row in moved if row not in again]), DEVICE)
