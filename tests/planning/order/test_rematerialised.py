"""The graph as it runs under decisions is what comes out of carrying them out, and takes the same memory and time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx

import policylang
from policylang.backends import flat
from policylang.graph.collect import collect
from policylang.graph.facts import COLUMNS, Facts, Flag, GraphKind, StepKind
from policylang.language.diagnostics import Severity
from policylang.planning import capabilities
from policylang.planning.order.rematerialised import rematerialised
from policylang.planning.planner import plan
from policylang.planning.schedule import build_schedule
from policylang.simulation.memory import simulate
from policylang.simulation.node_times import node_times
from policylang.simulation.streams import step_time
from tests.planning.strategies import QUICK, graphs
from tests.planning.test_schedule import decided
from tests.support.flat_graphs import flat_graph
from tests.support.models import Example, dropout, flex, gpt2, llama, resnet
from tests.support.random_flat import random_flat

drawing = settings(max_examples=12)
numbers = st.lists(st.integers(0, 63), min_size=12, max_size=60)
fates = st.lists(st.sampled_from(["keep", "again", "again", "move"]), min_size=1, max_size=40)
READ = sorted(COLUMNS.keys() - {"flags", "phases", "owners", "annotations"})
"""All but those that are compared on their own, and annotations: a recomputation is annotated with its phase."""
BITS = int(
    Flag.VIEW | Flag.RANDOM | Flag.WRITES | Flag.MULTI_OUTPUT | Flag.EFFECTFUL | Flag.COLLECTIVE | Flag.SEED
    | Flag.SYMBOLIC | Flag.FORWARD_OUTPUT
)  # fmt: skip


def assert_alike(found: Facts, real: Facts) -> None:
    for column in READ:
        assert list(getattr(found, column)) == list(getattr(real, column)), column
    assert [flag & BITS for flag in found.flags] == [flag & BITS for flag in real.flags]
    assert list(found.phases) == list(real.phases)
    for row, flag in enumerate(found.flags):  # who else runs again with it: nothing runs again any more
        assert flag & Flag.REPEATABLE or found.owners[row] == real.owners[row]


def check_flat(gm: fx.GraphModule, policy: str) -> None:
    facts = collect(gm)
    planned = plan(policylang.parse(policy), facts, capabilities.FLAT)
    if any(each.severity is Severity.ERROR and each.code != "APL101" for each in planned.diagnostics):
        return  # an effect that must not happen twice
    found = rematerialised(facts, planned.schedule)
    flat.rematerialise(gm, planned)
    assert_alike(found.facts, collect(gm, kind=GraphKind.FLAT))


SOME = "recompute (sin, mul, t, add, bernoulli*, div*, empty_like, native_dropout, rand*, clone, copy*)"


@given(numbers, st.integers(2, 5), st.sampled_from(["recompute everything", SOME]))
@drawing
def test_of_a_flat_graph_it_is_what_comes_out(drawn: list[int], segments: int, policy: str) -> None:
    check_flat(random_flat(drawn, segments).gm, policy)


@pytest.mark.slow
@pytest.mark.parametrize("example", [gpt2, llama, resnet, dropout, flex], ids=lambda each: each.__name__)
@pytest.mark.parametrize("policy", ["recompute everything", "recompute everything\noptional save matmul"])
def test_of_a_traced_step_it_is_what_comes_out(example: Callable[[], Example], policy: str) -> None:
    check_flat(flat_graph(example()).gm, policy)


@given(graphs(), fates)
@drawing
def test_memory_and_time_are_the_same(facts: Facts, drawn: list[str]) -> None:
    assume(all(len(set(reads)) == len(reads) for reads in facts.inputs))  # as facts say of their inputs
    again, moved = decided(facts, drawn)
    schedule = build_schedule(facts, again, moved)
    found = rematerialised(facts, schedule)
    assert len(found.schedule) == len(schedule)
    if not any(facts.flags[row] & Flag.RANDOM for row in schedule.rows_of(StepKind.SECOND_RUN)):
        before, after = simulate(facts, schedule), simulate(found.facts, found.schedule)
        assert list(after.live) == list(before.live)
        assert after.backward == before.backward
    one = step_time(facts, schedule, node_times(facts, QUICK))
    other = step_time(found.facts, found.schedule, node_times(found.facts, QUICK))
    assert (other.step, other.exposed) == pytest.approx((one.step, one.exposed))


def test_a_half_gives_itself() -> None:
    for facts in halves():
        assert rematerialised(facts, build_schedule(facts, ())).facts is facts


def halves() -> Iterator[Facts]:
    for kind in (GraphKind.FORWARD, GraphKind.BACKWARD):
        graph = fx.Graph()
        graph.output(graph.placeholder("x"))
        yield collect(graph, kind=kind)
