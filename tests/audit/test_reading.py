"""The one reader of graphs against a slow and obvious one, on graphs that are right and on graphs that are spoiled."""

from __future__ import annotations

from functools import cache

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from policylang.audit.graphs import audit_flat, read, read_halves
from policylang.audit.outcome import Found
from policylang.backends.flat import rematerialise
from policylang.graph import marks
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag, Phase
from policylang.planning.liveness import backward_needs
from tests.audit.slow_reader import SlowReader
from tests.backends.test_partition_cases import traced
from tests.support.decided import decided
from tests.support.random_flat import random_flat
from tests.support.run_partition import Traced

numbers = st.lists(st.integers(0, 63), min_size=12, max_size=90)
choices = st.lists(st.booleans(), min_size=1, max_size=40)
spoilings = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 999), st.integers(0, 999)), max_size=4)


def spoil(graph: fx.Graph, how: int, one: int, other: int) -> None:
    """A node read elsewhere, moved, copied, or its mark taken off or put on: any of which may be harmless."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    node, place = nodes[one % len(nodes)], nodes[other % len(nodes)]
    if how == 0 and node.all_input_nodes:
        node.replace_input_with(node.all_input_nodes[0], place)
    elif how == 1:
        place.prepend(node)
    elif how == 2:
        with graph.inserting_before(place):
            graph.node_copy(node)
    elif how == 3:
        node.meta = {key: value for key, value in node.meta.items() if key != "custom"}
    elif how == 4:
        node.meta = {**node.meta, "custom": {**marks.custom(node.meta), marks.RECOMPUTED: place.name}}


def assert_same_reading(facts: Facts, graph: fx.Graph) -> None:
    found, slow = read(facts, graph), SlowReader(facts, graph)
    assert found.order == [node.name for node in slow.nodes]
    assert found.crossing == slow.crossing()
    assert found.held == slow.held()
    assert found.saved == slow.saved()
    assert found.recomputed == slow.recomputed()
    assert found.twice == slow.twice()
    assert found.redrawn == slow.redrawn()
    assert found.rewritten == slow.rewritten()
    assert set(found.swapped) == slow.swapped()
    assert sorted(found.early) == sorted(slow.early())
    assert found.unknown == slow.unknown()


@given(numbers, choices, st.integers(2, 6), spoilings)
@settings(max_examples=25, suppress_health_check=[HealthCheck.data_too_large])
def test_reads_what_the_definitions_say(
    drawn: list[int], recompute: list[bool], segments: int, spoiled: list[tuple[int, int, int]]
) -> None:
    gm = random_flat(drawn, segments).gm
    facts = collect(gm)
    plan = decided(facts, lambda owner: recompute[owner % len(recompute)])
    rematerialise(gm, plan)
    assert_same_reading(facts, gm.graph)
    assert audit_flat(plan, gm.graph).agrees
    for how, one, other in spoiled:
        spoil(gm.graph, how, one, other)
        assert_same_reading(facts, gm.graph)


@cache
def joint() -> Traced:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = nn.functional.dropout((x @ weight).sin().cos() + x, 0.5)
        return x.exp() * torch.rand_like(x)

    return traced(forward, torch.rand(4, 4), torch.rand(4, 4))


def assert_same_halves(facts: Facts, found: Found, forward: fx.Graph, backward: fx.Graph, outputs: int) -> None:
    """By names alone, but for what is drawn again, which has none."""
    names = facts.names
    kept = [value.name for value in forward.output_node().args[0][outputs:]]
    taken = {node.name for node in backward.nodes if node.op == "placeholder"}
    crossing = {name for name in kept if name in taken and name in facts.index}
    is_input = {name for name in crossing if facts.phases[facts.index[name]] == Phase.INPUT}
    assert {names[row] for row in found.crossing} == crossing
    assert {names[row] for row in found.saved} == crossing - is_input
    returned = {names[row]: place for row, (place, _) in found.places.items()}
    assert returned == {name: outputs + at for at, name in enumerate(kept) if name in crossing}
    called = [facts.index.get(node.name, -1) for node in backward.nodes if node.op == "call_function"]
    again = [row for row in called if row >= 0 and facts.phases[row] == Phase.FORWARD]
    assert [row for row in found.recomputed if not facts.has(row, Flag.RANDOM)] == [
        row for row in again if not facts.has(row, Flag.RANDOM)
    ]
    for graph in (forward, backward):
        order = {node: at for at, node in enumerate(graph.nodes)}
        early = {
            (node.name, read.name) for node in graph.nodes for read in node.all_input_nodes if order[read] > order[node]
        }
        assert early <= set(found.early)


@given(st.lists(st.sampled_from(["save", "recompute"]), min_size=6, max_size=6), spoilings)
@settings(max_examples=25)
def test_reads_two_halves_as_the_definitions_say(fates: list[str], spoiled: list[tuple[int, int, int]]) -> None:
    what = ("mm", "sin", "cos", "add", "random", "exp")
    text = "\n".join(["undecided -> save", *(f"{fate} {name}" for fate, name in zip(fates, what, strict=True))])
    graph = joint()
    partition = graph.partition(text)
    plan, forward, backward = partition.plan, partition.forward.graph, partition.backward.graph
    needs = backward_needs(plan.facts, plan.decisions)
    for how, one, other in [(5, 0, 0), *spoiled]:
        spoil(backward if one % 2 else forward, how, one // 2, other)
        found = read_halves(plan, needs, forward, backward, num_fwd_outputs=graph.num_fwd_outputs)
        assert_same_halves(plan.facts, found, forward, backward, graph.num_fwd_outputs)
