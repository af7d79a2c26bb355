"""Random flat graphs under random decisions: the same bits come out, and what crosses is what was decided."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from policylang.audit.graphs import audit_flat
from policylang.backends.flat import rematerialise
from policylang.graph import marks
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Phase
from tests.support.decided import decided
from tests.support.drawn import examples
from tests.support.flat_graphs import assert_bitwise_equal
from tests.support.random_flat import random_flat

numbers = st.lists(st.integers(0, 63), min_size=12, max_size=150)
choices = st.lists(st.booleans(), min_size=1, max_size=60)


@given(numbers, choices, st.integers(2, 6))
@settings(
    max_examples=examples(50, 150),
    suppress_health_check=[HealthCheck.data_too_large],
)
def test_same_bits_and_the_planned_live_set(drawn: list[int], recompute: list[bool], segments: int) -> None:
    before = random_flat(drawn, segments)
    after = before.fresh()
    facts = collect(after.gm)
    plan = decided(facts, lambda owner: recompute[owner % len(recompute)])
    rematerialise(after.gm, plan)
    after.gm.graph.lint()
    expected_inputs, expected = before.fresh(), None
    expected = expected_inputs.run()
    assert_bitwise_equal(expected, after.run())
    assert_bitwise_equal(expected_inputs.inputs, after.inputs)

    found = audit_flat(plan, after.gm.graph)
    assert found.differences == ()
    assert set(found.saved) <= marked(after.gm.graph, marks.SAVED).keys()
    again = set(marked(after.gm.graph, marks.RECOMPUTED).values())
    assert found.recomputed == tuple(sorted(again, key=facts.index.__getitem__))
    check_places(after.gm.graph, facts)


def marked(graph: fx.Graph, mark: str) -> dict[str, Any]:
    """By the name of each node that carries a mark, what it says."""
    found = {node.name: marks.custom(node.meta).get(mark) for node in graph.nodes}
    return {name: said for name, said in found.items() if said is not None}


def check_places(graph: fx.Graph, facts: Facts) -> None:
    """A region copies a node once, and each copy stands in the run right before the first node that needs it."""
    in_region: Counter[str] = Counter()
    run: list[fx.Node] = []
    for node in graph.nodes:
        origin = marks.custom(node.meta).get(marks.RECOMPUTED)
        if origin is not None:
            in_region[origin] += 1
            run.append(node)
            continue
        if run:
            needed = set(node.all_input_nodes)
            for copy in reversed(run):
                written = any(marks.custom(user.meta).get(marks.RECOMPUTED) for user in copy.users)
                assert copy in needed or writes_for(copy, needed) or written, f"{copy} stands before it is needed"
                needed.update(copy.all_input_nodes)
            run = []
        row = facts.index.get(node.name)
        if row is not None and facts.phases[row] == Phase.FORWARD:
            assert all(count == 1 for count in in_region.values()), in_region
            in_region.clear()


def writes_for(copy: fx.Node, needed: set[fx.Node]) -> bool:
    """An operator in place is needed by who reads what it writes."""
    return str(copy.target).partition(".")[2].partition(".")[0].endswith("_") and bool(copy.all_input_nodes)


def test_nothing_to_recompute_leaves_the_graph_alone() -> None:
    flat = random_flat(list(range(60)))
    before = [(node.name, node.target, node.args) for node in flat.gm.graph.nodes]
    rematerialise(flat.gm, decided(collect(flat.gm), lambda _owner: False))
    assert [(node.name, node.target, node.args) for node in flat.gm.graph.nodes] == before


@pytest.mark.parametrize("layers", [50, 200])
def test_copies_grow_with_the_graph_not_with_its_square(layers: int) -> None:
    """Operations are counted, not time: every forward node is copied once, whatever the depth."""
    flat = random_flat([0, 1, 0] * 4 * layers, segments=2)
    facts = collect(flat.gm)
    rematerialise(flat.gm, decided(facts, lambda _owner: True))
    assert 0 < len(marked(flat.gm.graph, marks.RECOMPUTED)) <= len(facts.forward)
