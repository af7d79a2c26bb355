"""The time of a step and of its collectives: what waits for what, by hand and against the slow account."""

from itertools import pairwise
from math import log, prod

import pytest
from hypothesis import strategies as st

from policylang.graph.facts import Facts, Flag, GraphKind, Group, Ref, Schedule, StepKind
from policylang.language.devices.profile import CollectiveKind as Kind
from policylang.language.devices.profile import CollectiveTimes, DeviceProfile, Network, Rate, collective_kind
from policylang.planning.schedule import build_schedule
from policylang.simulation.node_times import CollectivePrices, NodeTimes, node_times
from policylang.simulation.streams import ExposedBy, Lanes, StepTime, exposed_bounds, lanes, step_time
from tests.planning.strategies import graphs
from tests.support.drawn import drawn
from tests.support.orders import SECOND, every_order, in_order, sending
from tests.support.textgraph import GraphBuilder, facts_of

WAIT, PIECE = "_c10d_functional.wait_tensor.default", "builtin.getitem"
POINTWISE = (
    *("aten.add.Tensor", "aten.mul.Tensor", "aten.add_.Tensor", "aten.sum.dim"),
    "prims.convert_element_type.default",
)
VIEWS = ("aten.view.default", "aten.expand.default")


def slow_rate(rate: Rate, size: float) -> float:
    points = rate.points
    if size <= points[0][0]:
        return points[0][1]
    for (low, slow), (high, fast) in pairwise(points):
        if low <= size < high:
            return slow + (fast - slow) * (log(size) - log(low)) / (log(high) - log(low))
    return points[-1][1]


def slow_seconds(facts: Facts, row: int, device: DeviceProfile) -> float:
    """Of one node; of a collective as a ring of its group's ranks."""
    target = facts.targets[row]
    if facts.ops[row] != "call_function" or target in (WAIT, PIECE, *VIEWS) or facts.flags[row] & Flag.SYMBOLIC:
        return 0.0
    if facts.flags[row] & Flag.COLLECTIVE:
        return _ring(facts, row, device)
    moved = facts.bytes[row]
    for number, read in enumerate(facts.inputs[row]):
        size = _distinct(facts, read)
        if number == 0 and target.startswith("aten.embedding."):
            size = min(size, facts.bytes[row])
        if number == 0 and target.startswith("aten.copy_."):
            size = 0
        moved += size
    moving = moved / slow_rate(device.bandwidth, moved) + device.overhead
    if target in POINTWISE or target.startswith("aten.copy_."):
        moving *= device.pointwise
    if not facts.flops[row]:
        return moving
    rate = device.compute.get(_operand(facts, row))
    if rate is None:
        return moving
    reached = slow_rate(rate, facts.flops[row]) * (device.attention if "attention" in target else 1)
    return max(moving, facts.flops[row] / reached + device.overhead)


def _distinct(facts: Facts, row: int) -> int:
    """The bytes that a tensor's elements lie in: each place in memory counts once."""
    shape, strides = facts.shapes[row], facts.strides[row]
    if shape is None or strides is None or not facts.numel[row]:
        return facts.bytes[row]
    places = {0}
    for length, stride in zip(shape, strides, strict=True):
        places = {place + step * stride for place in places for step in range(length)}
    return len(places) * facts.bytes[row] // prod(shape)


def _operand(facts: Facts, row: int) -> str:
    """Matrices before vectors before anything; whole numbers last."""
    for least, integers in ((2, False), (1, False), (0, True)):
        operands = [
            each
            for each in facts.inputs[row]
            if len(facts.shapes[each] or ()) >= least and (integers or facts.dtypes[each] != "int64")
        ]
        if operands:
            widest = sorted(operands[:2], key=lambda each: -(facts.bytes[each] // facts.numel[each]))
            return facts.dtypes[widest[0]]
    return facts.dtypes[row]


def _ring(facts: Facts, row: int, device: DeviceProfile) -> float:
    ranks = facts.groups[facts.group_names[row]].ranks
    put, made = facts.bytes[facts.inputs[row][0]], facts.bytes[row]
    count = len(ranks)
    if count == 1:
        return 0.0
    for network in device.networks:
        if network.ranks is None or len({rank // network.ranks for rank in ranks}) == 1:
            sent = {
                "all_gather_into_tensor": max(put * count, made) / count * (count - 1),
                "reduce_scatter_tensor": put / count * (count - 1),
                "all_reduce": 2 * put / count * (count - 1),
                "all_to_all_single": put / count * (count - 1),
                "broadcast": put,
            }[facts.targets[row].split(".")[1]]
            return network.latency + sent / network.bandwidth
    return 0.0


def slow_step(facts: Facts, steps: list[tuple[int, int, int]], times: NodeTimes) -> tuple[float, float, float]:
    """Seconds of second runs, of the step, and of waiting. Kinds: 0 and 1 are runs, 2 to 5 copies and their ends."""
    host = times.device.host_bandwidth
    began: list[tuple[str, int, int, float]] = []  # stream, row, which copy, when it is over
    awaited: list[tuple[str, int, int, float]] = []
    clock = waiting = again = 0.0
    for kind, row, region in steps:
        copy = 0 if kind == 0 else region
        wanted: list[float] = []
        if kind <= 1:
            again += times.seconds[row] if kind == 1 else 0
            for needed in _collectives_read(facts, row):
                runs = [(which, over) for stream, ran, which, over in began if ran == needed and stream[0] == "g"]
                here = [over for which, over in runs if which == region]
                first = [over for which, over in runs if which == 0]
                wanted += (here or first)[-1:]
        elif kind in (3, 5):
            stream = "down" if kind == 3 else "up"
            pending = [each for each in began if each[:2] == (stream, row) and each not in awaited]
            wanted += [over for _, _, _, over in pending[:1]]
            awaited += pending[:1]
        until = max([clock, *wanted])
        waiting += until - clock
        clock = until
        if kind in (2, 4):
            stream = "down" if kind == 2 else "up"
            busy = max([clock, *(over for at, _, _, over in began if at == stream)])
            began.append((stream, row, region, busy + (facts.bytes[row] / host if host else 0)))
        elif kind <= 1 and _is_beside(facts, row):
            stream = f"g{facts.group_names[row]}"
            busy = max([clock, *(over for at, _, _, over in began if at == stream)])
            began.append((stream, row, copy, busy + times.seconds[row]))
        elif kind <= 1:
            clock += times.seconds[row]
    end = max([clock, *(over for *_, over in began)])
    return again, end, waiting + end - clock


def _collectives_read(facts: Facts, row: int) -> list[int]:
    """Those whose results a node computes with, or waits for: through views, pieces and waits."""
    target = facts.targets[row]
    if facts.ops[row] != "call_function" or target == PIECE or (facts.flags[row] & Flag.VIEW and target != WAIT):
        return []
    found = []
    for read in facts.inputs[row]:
        at = read
        while not _is_beside(facts, at) and facts.inputs[at] and _passes_on(facts, at):
            at = facts.inputs[at][0]
        if _is_beside(facts, at):
            found.append(at)
    return found


def _passes_on(facts: Facts, row: int) -> bool:
    return facts.targets[row] in (WAIT, PIECE) or bool(facts.flags[row] & Flag.VIEW)


def _is_beside(facts: Facts, row: int) -> bool:
    """A collective that multiplies as well runs among the computation."""
    return bool(facts.flags[row] & Flag.COLLECTIVE) and not facts.flops[row]


GATHER = "_c10d_functional.all_gather_into_tensor.default"


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
        (StepKind.FIRST_RUN, row, 0), (StepKind.COPY_TO_HOST, row, 0), (StepKind.FIRST_RUN, facts.index["b"], 0),
        (StepKind.WAIT_TO_HOST, row, 0), (StepKind.COPY_FROM_HOST, row, 1), (StepKind.FIRST_RUN, facts.index["db"], 1),
        (StepKind.WAIT_FROM_HOST, row, 1),
    ]  # fmt: skip
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


@drawn(30, 500, st.data())
def test_random_orders_take_as_long_as_the_slow_account_says(data: st.DataObject) -> None:
    facts = data.draw(flat())
    compare(facts, Schedule.of(data.draw(schedules(facts))), DEVICE)


@drawn(10, 200, graphs(), st.data())
def test_planned_orders_take_as_long_as_the_slow_account_says(facts: Facts, data: st.DataObject) -> None:
    again = data.draw(st.lists(st.sampled_from(facts.forward), unique=True)) if facts.forward else []
    moved = data.draw(st.lists(st.sampled_from(facts.forward), unique=True, max_size=2)) if facts.forward else []
    compare(facts, build_schedule(facts, again, [row for row in moved if row not in again]), DEVICE)


LAYER = f"""
    %w = parameter bytes=10
    %x = input bytes=10
    %a = aten.sin.default(%x) bytes=10
    %g = {GATHER}(%w) collective group=dp:4 bytes=40
    %b = aten.sin.default(%a) bytes=10
    %gw = {WAIT}(%g) bytes=40
    %c = aten.mul.Tensor(%b, %gw) bytes=40
    output(%c)
"""


def run(text: str, seconds: dict[str, float], **limits: int) -> Lanes:
    facts = facts_of(text)
    times = NodeTimes(SECOND, [seconds.get(name, 0.0) for name in facts.names], {}, {})
    return lanes(facts, build_schedule(facts, ()), times, **limits)


def test_a_collective_is_issued_runs_is_awaited_and_exposed() -> None:
    found = run(LAYER, {"a": 2, "g": 5, "b": 1, "c": 1})
    (gather,) = found.collectives
    assert (gather.stream, gather.issued, gather.start, gather.end) == ("group dp:4", 2, 2, 7)
    assert (gather.awaited, gather.exposed, gather.exposed_by) == (3, 4, ExposedBy.ORDER)
    assert [(each.start, each.end) for each in found.compute] == [(0, 2), (2, 3), (7, 8)]
    assert (found.step, found.exposed) == (8, 4)


def test_one_that_ends_before_it_is_awaited_is_hidden() -> None:
    (gather,) = run(LAYER, {"a": 2, "g": 5, "b": 6, "c": 1}).collectives
    assert (gather.exposed, gather.exposed_by) == (0, None)


def test_one_that_starts_with_the_step_and_is_read_at_once_waits_for_its_data() -> None:
    text = f"""
        %w = parameter bytes=10
        %s = prims.convert_element_type.default(%w) bytes=5
        %g = {GATHER}(%s) collective group=dp:4 bytes=40
        %gw = {WAIT}(%g) bytes=40
        %c = aten.sin.default(%gw) bytes=40
        %h = {GATHER}(%c) collective group=tp:4 bytes=40
        %hw = {WAIT}(%h) bytes=40
        %d = aten.sin.default(%hw) bytes=40
        output(%d)
    """
    found = run(text, {"s": 1, "g": 5, "c": 2, "h": 3, "d": 1}).collectives
    assert [each.exposed for each in found] == [5, 3]
    assert [each.exposed_by for each in found] == [ExposedBy.DATA, ExposedBy.DATA]


def test_the_second_of_a_group_waits_for_the_first() -> None:
    text = LAYER.replace("%a =", f"%f = {GATHER}(%w) collective group=dp:4 bytes=40\n    %a =")
    text = text.replace("output(%c)", f"%fw = {WAIT}(%f) bytes=40\n    output(%c, %fw)")
    found = {each.row: each for each in run(text, {"f": 9, "a": 2, "g": 5, "b": 1, "c": 1}).collectives}
    first, second = found.values()
    assert (second.issued, second.start, second.end) == (2, 9, 14)
    assert second.exposed_by is ExposedBy.GROUP
    assert first.exposed_by is None, "computation waits for the second, and then the first is over"


def test_one_that_is_awaited_before_anybody_reads_it_is_exposed_by_the_order() -> None:
    text = LAYER.replace("    %a = aten.sin.default(%x) bytes=10\n", "").replace("(%a)", "(%x)")
    wait = f"    %gw = {WAIT}(%g) bytes=40\n"
    text = text.replace(wait, "").replace("    %b =", f"{wait}    %b =")
    (gather,) = run(text, {"g": 5, "b": 6, "c": 1}).collectives
    assert (gather.issued, gather.exposed, gather.exposed_by) == (0, 5, ExposedBy.ORDER)


@pytest.mark.parametrize(
    ("limits", "cause"),
    [
        ({"in_flight": 39}, ExposedBy.LIMIT),
        ({"in_flight": 40}, ExposedBy.ORDER),
        ({"peak": 69}, ExposedBy.LIMIT),
        ({"peak": 70}, ExposedBy.ORDER),
    ],
)
def test_a_limit_is_named_where_it_would_be_exceeded_one_computation_earlier(limits, cause) -> None:
    """While ``a`` runs, 20 bytes of inputs and 10 of its own are alive."""
    (gather,) = run(LAYER, {"a": 2, "g": 5, "b": 1, "c": 1}, **limits).collectives
    assert gather.exposed_by is cause


def test_what_is_under_way_at_the_end_is_exposed_there_and_shared_out() -> None:
    text = f"""
        %w = parameter bytes=10
        %g = {GATHER}(%w) collective group=dp:4 bytes=10
        %h = {GATHER}(%w) collective group=tp:4 bytes=10
        %a = aten.sin.default(%w) bytes=10
        output(%g, %h, %a)
    """
    found = run(text, {"g": 9, "h": 6, "a": 4})
    assert [each.exposed for each in found.collectives] == [3, 2]
    assert [each.awaited for each in found.collectives] == [4, 4]
    assert found.step == 9


def test_one_that_runs_again_is_there_twice() -> None:
    facts = facts_of(SHARDED)
    seconds = {"g": 5.0, "b": 1.0, "db": 1.0}
    times = NodeTimes(SECOND, [seconds.get(name, 0.0) for name in facts.names], {}, {})
    again = build_schedule(facts, [facts.index["g"], facts.index["gw"]])
    found = [each for each in lanes(facts, again, times).collectives if facts.names[each.row] == "g"]
    assert [(each.issued, each.end, each.exposed) for each in found] == [(0, 5, 5), (6, 11, 5)]


@drawn(25, 3000, sending(), st.data())
def test_what_is_exposed_of_each_is_what_the_step_exposes(drawn: tuple[Facts, NodeTimes], data: st.DataObject) -> None:
    """Copies to the host aside, which are none of them."""
    facts, times = drawn
    steps = [step for step in data.draw(schedules(facts)) if step[0] <= 1]
    schedule = Schedule.of(steps)
    found, step = lanes(facts, schedule, times, in_flight=9, peak=30), step_time(facts, schedule, times)
    assert (found.step, found.exposed) == (step.step, step.exposed)
    assert sum(each.exposed for each in found.collectives) == pytest.approx(step.exposed)
    assert all(each.issued <= each.start <= each.end for each in found.collectives)
    assert all((each.exposed_by is None) == (each.exposed < 1e-9) for each in found.collectives)


@drawn(15, 2000, sending(most=6))
def test_no_order_exposes_less_than_the_bound(drawn: tuple[Facts, NodeTimes]) -> None:
    facts, times = drawn
    bound = exposed_bounds(facts, times)
    assert bound.seconds >= max((bound.path, *bound.streams.values()))
    for at, order in enumerate(every_order(facts)):
        assert step_time(facts, in_order(facts, order), times).exposed >= bound.seconds - 1e-9
        if at == 500:
            break


@pytest.mark.parametrize(
    ("seconds", "bound"),
    [
        ({"g": 5, "c": 3}, 5.0),  # what precedes the first computation that depends on a collective
        ({"g": 5, "c": 3, "b": 2}, 3.0),  # other computation hides some of it
        ({"g": 20, "c": 3, "a": 2, "b": 2}, 16.0),  # a group has more to send than there is to compute
        ({"g": 5, "a": 2, "b": 3, "c": 1}, 0.0),
    ],
)
def test_the_bound_of_a_layer(seconds: dict[str, float], bound: float) -> None:
    facts = facts_of(LAYER)
    times = NodeTimes(SECOND, [float(seconds.get(name, 0)) for name in facts.names], {}, {})
    assert exposed_bounds(facts, times).seconds == pytest.approx(bound)


@pytest.mark.parametrize(("started", "bound"), [("forward", 5.0), ("backward", 12.0)])
def test_the_bound_counts_forward_and_backward_apart(started: str, bound: float) -> None:
    """What the backward computes hides nothing that the forward awaits. What the backward alone awaits may be sent
    beside either."""
    sent = {started: f"%h = {GATHER}(%v) collective group=tp:4 bytes=10"}
    text = f"""
        %w = parameter bytes=10
        %v = parameter bytes=10
        %g = {GATHER}(%w) collective group=dp:4 bytes=10
        %gw = {WAIT}(%g) bytes=10
        %y = aten.sin.default(%gw) bytes=10
        {sent.get("forward", "")}
        ---
        %t = tangent bytes=10
        {sent.get("backward", "")}
        %hw = {WAIT}(%h) bytes=10
        %b = aten.mul.Tensor(%t, %hw) bytes=10
        output(%y, %b)
    """
    facts = facts_of(text)
    seconds = {"g": 5.0, "h": 7.0, "y": 1.0, "b": 20.0}
    times = NodeTimes(SECOND, [seconds.get(name, 0.0) for name in facts.names], {}, {})
    assert exposed_bounds(facts, times).seconds == bound


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
        ("all_gather_into_tensor", 100, 400, 300), ("reduce_scatter_tensor", 400, 100, 300),
        ("all_reduce", 400, 400, 600), ("all_reduce_", 400, 400, 600), ("all_to_all_single", 400, 400, 300),
        ("broadcast", 400, 400, 400), ("isend", 400, 400, 400), ("permute_tensor", 400, 400, 400),
        ("dispatch_of_some_library", 100, 400, 300),
    ],
)  # fmt: skip
def test_a_rank_of_a_ring_sends_what_its_collective_takes(name: str, put: int, made: int, sent: int) -> None:
    assert seconds(collective(name, put, made), 1, *RING) == 1 + sent / 10


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_allgather_base_", Kind.ALL_GATHER), ("allgather_into_tensor_coalesced_", Kind.ALL_GATHER),
        ("_reduce_scatter_base_", Kind.REDUCE_SCATTER), ("reduce_scatter_tensor_coalesced", Kind.REDUCE_SCATTER),
        ("allreduce_coalesced_", Kind.ALL_REDUCE), ("shard_dim_alltoall", Kind.ALL_TO_ALL), ("reduce_", Kind.BROADCAST),
        ("gather_", Kind.SCATTER), ("recv_any_source_", Kind.POINT_TO_POINT), ("monitored_barrier_", Kind.BARRIER),
        ("ncclSomething", None),
    ],
)  # fmt: skip
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
def test_coalesced_tensors_travel_together_and_what_is_handed_in_for_the_result_is_not_sent(target, arguments, sent):
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
