"""The schedule: by hand, and against the reference for any graph and any decisions."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import policylang
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag, Phase, Schedule, StepKind
from policylang.planning.capabilities import capabilities_for
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from policylang.planning.schedule import Ahead, build_schedule
from tests.planning.schedule_reference import reference_schedule
from tests.planning.strategies import graphs
from tests.support.drawn import examples
from tests.support.random_flat import random_flat
from tests.support.textgraph import CHAIN, facts_of

numbers = st.lists(st.integers(0, 63), min_size=12, max_size=90)
fates = st.lists(st.sampled_from(["keep", "again", "again", "move"]), min_size=1, max_size=40)
drawing = settings(max_examples=examples(25, 100))


def written(facts: Facts, schedule: Schedule) -> str:
    """``name`` runs, ``name*`` runs again, ``>name`` and ``name>`` start and await a copy to the host, ``<name`` and
    ``name<`` one back; a bar where the forward ends."""
    forms = ("{}", "{}*", ">{}", "{}>", "<{}", "{}<")
    words, before = [], 0
    for kind, name, region in schedule.names(facts):
        words += ["|"] * (region != before)
        words.append(forms[kind].format(name))
        before = region
    return " ".join(words)


def planned(recomputed: str = "", offloaded: str = "", text: str = CHAIN) -> str:
    facts = facts_of(text)
    rows = ([facts.index[name] for name in names.split()] for names in (recomputed, offloaded))
    return written(facts, build_schedule(facts, *rows))


def test_what_runs_again_runs_right_before_what_needs_it() -> None:
    assert planned() == "a b c loss | dc db da"
    assert planned("a b") == "a b c loss | dc a* b* db da"
    assert planned("a b c") == "a b c loss | a* b* c* dc db da"


def test_copies_are_two_apart() -> None:
    assert planned("", "a b c") == "a b >a c >b loss a> >c b> c> | <c c< <b <a dc b< db a< da"
    assert planned("c", "b") == "a b c >b loss b> | <b b< c* dc db da"


def decided(facts: Facts, drawn: list[str]) -> tuple[list[int], list[int]]:
    """One fate for an owner; what is moved is one row of a memory, made by the forward and read by the backward alone
    from then on."""
    roots = facts.storage_roots
    again, moved = [], []
    for row in facts.forward:
        fate = drawn[facts.owners[row] % len(drawn)]
        if facts.flags[row] & (Flag.SYMBOLIC | Flag.WRITES | Flag.EFFECTFUL) and not facts.flags[row] & Flag.REPEATABLE:
            continue
        if fate == "again":
            again.append(row)
        elif fate == "move" and roots[row] == row and not facts.flags[row] & Flag.MULTI_OUTPUT:
            moved.append(row)
    return again, moved


@given(graphs(), fates)
@drawing
def test_partitions_are_scheduled_as_the_sentences_say(facts: Facts, drawn: list[str]) -> None:
    again, moved = decided(facts, drawn)
    assert list(build_schedule(facts, again, moved)) == reference_schedule(facts, again, moved)


@given(numbers, fates, st.integers(2, 6))
@drawing
def test_flat_graphs_are_scheduled_as_the_sentences_say(drawn: list[int], chosen: list[str], segments: int) -> None:
    facts = collect(random_flat(drawn, segments).gm)
    again, moved = decided(facts, chosen)
    assert list(build_schedule(facts, again, moved)) == reference_schedule(facts, again, moved)


@given(numbers, fates, st.integers(2, 6), st.lists(st.integers(-1, 3), min_size=1, max_size=9), st.integers(1, 3))
@drawing
def test_copies_back_start_so_many_blocks_ahead(
    drawn: list[int], chosen: list[str], segments: int, blocks: list[int], ahead: int
) -> None:
    facts = collect(random_flat(drawn, segments).gm)
    again, moved = decided(facts, chosen)
    block_of = [blocks[row * len(blocks) // len(facts)] for row in range(len(facts))]
    found = list(build_schedule(facts, again, moved, Ahead(ahead, block_of)))
    assert found == reference_schedule(facts, again, moved, (ahead, block_of))


POLICIES = ("undecided -> recompute", "save mm\nundecided -> recompute", "recompute every 2nd everything")


@given(numbers, st.sampled_from(POLICIES), st.integers(2, 6))
@drawing
def test_what_is_counted_as_recomputed_is_what_the_schedule_runs_again(
    drawn: list[int], text: str, segments: int
) -> None:
    """A value that the rest of the forward holds is read as it is: it counts as recomputed no more than what it is
    computed from."""
    facts = collect(random_flat(drawn, segments).gm)
    made = plan(policylang.parse(text), facts, capabilities_for(facts.kind, None))
    needs = saved_and_recomputed(made)
    assert list(needs.recomputed) == sorted(set(made.schedule.rows_of(StepKind.SECOND_RUN)))
    read = {source for row, phase in enumerate(facts.phases) if phase == Phase.BACKWARD for source in facts.inputs[row]}
    read = read.union(*(facts.inputs[row] for row in needs.recomputed))
    kept = {row for row in read if facts.forward_mask[row] and not facts.flags[row] & Flag.SYMBOLIC}
    assert kept.difference(needs.recomputed).issuperset(needs.saved)


@given(numbers, fates, st.integers(2, 6))
@drawing
def test_nothing_is_read_before_it_is_there(drawn: list[int], chosen: list[str], segments: int) -> None:
    """Whatever is decided: a step of the backward reads the second value where there is one, else the first."""
    facts = collect(random_flat(drawn, segments).gm)
    again, moved = decided(facts, chosen)
    there = {(row, 0) for row, op in enumerate(facts.ops) if op != "call_function"}
    for kind, row, region in build_schedule(facts, again, moved):
        if kind <= StepKind.SECOND_RUN:
            for source in facts.inputs[row]:
                assert {(source, region), (source, 0)} & there or facts.phases[source] == facts.phases[row]
        there.add((row, region))
