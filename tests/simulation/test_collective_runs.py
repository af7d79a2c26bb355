"""How each collective fares: by hand, in sum as the step, and never less than the bound."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.graph.facts import Facts, Schedule
from policylang.planning.schedule import build_schedule
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import ExposedBy, Lanes, exposed_bounds, lanes, step_time
from tests.simulation.test_step_time import GATHER, SHARDED, WAIT, schedules
from tests.support.drawn import examples
from tests.support.orders import SECOND, every_order, in_order, sending
from tests.support.textgraph import facts_of

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
    text = LAYER.replace("%a =", f"%f = {GATHER}(%w) collective group=dp:4 bytes=40\n    %a =").replace(
        "output(%c)", f"%fw = {WAIT}(%f) bytes=40\n    output(%c, %fw)"
    )
    found = {each.row: each for each in run(text, {"f": 9, "a": 2, "g": 5, "b": 1, "c": 1}).collectives}
    first, second = found.values()
    assert (second.issued, second.start, second.end) == (2, 9, 14)
    assert second.exposed_by is ExposedBy.GROUP
    assert first.exposed_by is None, "computation waits for the second, and then the first is over"


def test_one_that_is_awaited_before_anybody_reads_it_is_exposed_by_the_order() -> None:
    text = LAYER.replace("    %a = aten.sin.default(%x) bytes=10\n", "").replace("(%a)", "(%x)")
    text = text.replace(f"    %gw = {WAIT}(%g) bytes=40\n", "").replace(
        "    %b =", f"    %gw = {WAIT}(%g) bytes=40\n    %b ="
    )
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
def test_a_limit_is_named_where_it_would_be_exceeded_one_computation_earlier(
    limits: dict[str, int], cause: ExposedBy
) -> None:
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


@given(sending(), st.data())
@settings(max_examples=examples(25, 3000))
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


@given(sending(most=6))
@settings(max_examples=examples(15, 2000))
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
