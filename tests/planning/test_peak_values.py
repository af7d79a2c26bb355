"""What is alive at the peak: against a slow account of lifetimes, against the simulator, and by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.api.load import parse
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind
from policylang.planning.capabilities import FLAT, JOINT, Capabilities
from policylang.planning.inspection.breakdown import Breakdown, PeakValues, breakdown, values_at_peak
from policylang.planning.planner import plan
from policylang.planning.schedule import build_schedule
from policylang.simulation.memory import Lifetimes, Origin, simulate
from tests.graph.captured import facts_of_model
from tests.planning.lifetime_reference import Piece, slow_lifetimes
from tests.planning.strategies import graphs
from tests.planning.test_schedule import decided, fates, numbers
from tests.support.drawn import examples
from tests.support.lines import ABLE, Line, mesh_of
from tests.support.random_flat import random_flat
from tests.support.shared_graphs import JOINT as RECORDED
from tests.support.shared_graphs import shared_facts
from tests.support.textgraph import CHAIN, facts_of
from tests.support.versions import needs_groups_in_any_order

few = settings(max_examples=examples(15, 40))
_WORDS = {
    Origin.FIRST_RUN: "run",
    Origin.SECOND_RUN: "run",
    Origin.COPY_FROM_HOST: "fetched",
    Origin.INPUT: "input",
    Origin.TANGENT: "input",
    Origin.GENERATOR_STATE: "state",
}


def fast_lifetimes(found: Lifetimes) -> Counter[tuple[Piece, int, int]]:
    again = (Origin.SECOND_RUN, Origin.COPY_FROM_HOST)
    return Counter(
        ((_WORDS[Origin(origin)], row, region if origin in again else 0, size), made, last)
        for origin, row, region, size, made, last in found
        if size
    )


def held_against_the_reference(facts: Facts, drawn: list[str]) -> None:
    again, moved = decided(facts, drawn)
    schedule = build_schedule(facts, again, moved)
    timeline = simulate(facts, schedule)
    assert fast_lifetimes(timeline.lifetimes) == Counter(
        (piece, first, last) for piece, first, last in slow_lifetimes(facts, schedule) if piece[-1]
    )
    for live, step in zip(timeline.live, timeline.steps, strict=True):
        assert live == sum(timeline.lifetimes.bytes[at] for at in timeline.lifetimes.alive_at(step))


@given(graphs(), fates)
@few
def test_lifetimes_of_a_partition_are_those_of_the_slow_account(facts: Facts, drawn: list[str]) -> None:
    held_against_the_reference(facts, drawn)


@given(numbers, fates, st.integers(2, 4))
@settings(few, max_examples=examples(8, 15))
def test_lifetimes_of_a_flat_graph_are_those_of_the_slow_account(
    drawn: list[int], chosen: list[str], segments: int
) -> None:
    held_against_the_reference(collect(random_flat(drawn, segments).gm), chosen)


def found_on(facts: Facts, policy: str, path: Capabilities = JOINT, most: int = 20) -> tuple[Breakdown, PeakValues]:
    found = breakdown(plan(parse(policy), facts, path))
    values = values_at_peak(found, most)
    assert sum(value.bytes for value in values.values) + values.rest_bytes == values.bytes
    assert sum(share.bytes for share in values.shares) == values.bytes
    assert sum(share.count for share in values.shares) == len(values.values) + values.rest
    assert values.bytes == found.under.peak.bytes == max(found.under.timeline.live, default=values.bytes)
    assert (values.at.node if values.at else "") == found.under.peak.at
    sizes = [value.bytes for value in values.values]
    assert sizes == sorted(sizes, reverse=True)
    return found, values


def test_by_hand() -> None:
    _, values = found_on(facts_of(CHAIN), "recompute aten.sin.default\nsave aten.cos.default")
    # dc runs beside the tangent, what is saved, and the input and the loss; the others come again after it
    assert values.at is not None
    lines = {value.name: (value.bytes, value.what, value.source) for value in values.values}
    assert lines["x"] == (10, "input", None)
    recomputed = [value for value in values.values if value.what == "recomputed"]
    assert all(value.source == "<policy>:1" and value.made and value.made.again for value in recomputed)
    assert values.rest == 0


def test_memory_that_is_kept_for_a_view_stands_under_the_line_that_saves_the_view() -> None:
    text = """
        %x = input bytes=10
        %a = aten.sin.default(%x) bytes=100
        %v = aten.view.default(%a) view bytes=100
        %b = aten.mm.default(%v) bytes=30
        ---
        %t = tangent bytes=1
        %g = aten.mul.Tensor(%t, %v) bytes=5
        output(%b, %g)
    """
    _, values = found_on(facts_of(text), "recompute everything\nsave aten.view.default")
    (held,) = [value for value in values.values if value.name == "a"]
    assert (held.what, held.source, held.rule, held.saved_as) == ("saved", "<policy>:2", "save aten.view.default", "v")
    assert (held.made.step, held.made.half) == (1, "forward")
    assert (held.last.node, held.last.half) == ("g", "backward")
    (output,) = [value for value in values.values if value.name == "b"]
    assert (output.what, output.last) == ("returned", None)


def test_only_the_largest_are_named_and_the_rest_is_counted() -> None:
    _, values = found_on(facts_of(CHAIN), "save everything", most=2)
    assert len(values.values) == 2
    assert values.rest > 0
    assert values.rest_bytes > 0


@pytest.mark.parametrize("text", ["output()", "%x = input bytes=10\noutput(%x)", "%x = parameter\noutput(%x)"])
def test_a_graph_in_which_nothing_runs(text: str) -> None:
    _, values = found_on(facts_of(text), "undecided -> save")
    assert (values.at, values.steps) == (None, 0)
    assert values.bytes == sum(value.bytes for value in values.values)


@pytest.mark.parametrize("policy", ["include <llama3_sac>", "undecided -> save", "undecided -> recompute"])
@pytest.mark.parametrize("model", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_real_models(model: str, policy: str) -> None:
    found, values = found_on(facts_of_model(model), policy)
    step = -1 if values.at is None else values.at.step - 1
    slow = slow_lifetimes(found.plan.facts, found.under.schedule)
    assert sum(size for (_, _, _, size), first, last in slow if first <= step <= last) == values.bytes
    kinds = Counter(value.what for value in found_on(facts_of_model(model), policy, most=10**6)[1].values)
    parameters = sum(kind == 1 for kind in found.plan.facts.input_kinds)
    assert kinds["parameter"] == parameters


def test_what_is_offloaded_is_there_until_it_is_copied_and_from_when_it_comes_back() -> None:
    text = """
        %x = input bytes=10
        %a = aten.mm.default(%x) bytes=100 shape=5x5 dtype=float32 device=cuda:0
        %b = aten.sin.default(%a) bytes=400
        %c = aten.sin.default(%b) bytes=20
        %d = aten.sin.default(%c) bytes=20
        %e = aten.sin.default(%d) bytes=20
        %loss = aten.sum.default(%e) bytes=1
        ---
        %t = tangent bytes=1
        %g = aten.mul.Tensor(%t) bytes=20
        %h = aten.mul.Tensor(%g) bytes=20
        %i = aten.mul.Tensor(%h, %a) bytes=500
        output(%loss, %i)
    """
    flat = facts_of(text.replace("%t = tangent bytes=1", "%t = aten.ones.default() bytes=1"), GraphKind.FLAT)
    for facts, path in ((facts_of(text), JOINT), (flat, FLAT)):
        _, values = found_on(facts, "undecided -> recompute\noffload mm" if path is JOINT else "offload mm", path)
        (moved,) = [value for value in values.values if value.name == "a"]
        assert (moved.what, moved.source) == ("copied back", values.values[1].source)
        assert moved.made.again
    _, values = found_on(facts_of(text.replace("bytes=500", "bytes=5")), "undecided -> recompute\noffload mm")
    (moved,) = [value for value in values.values if value.name == "a"]
    assert moved.what == "offloaded"  # while `b`, which reads it, runs in the forward


@needs_groups_in_any_order
def test_what_an_edit_made_is_among_them_and_what_it_took_is_not() -> None:
    facts = Line(mesh_of(4, 2), (2, 3)).gather("dp").gather("tp").facts()
    _, as_is = found_on(facts, "undecided -> save", ABLE)
    found, values = found_on(facts, "undecided -> save; fuse all_gather chains", ABLE)
    assert found.plan.edits
    (fused,) = {value.name for value in values.values} - {value.name for value in as_is.values}
    assert fused.startswith("fused_all_gather")


@pytest.mark.slow
def test_a_recorded_graph() -> None:
    _, values = found_on(shared_facts(RECORDED), "include <llama3_sac>")
    assert len(values.values) == 20
    assert values.rest > 0
