"""Proofs of buckets are held against a run of the full-sized tensors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import event as hypothesis_event
from hypothesis import strategies as st
from torch import fx

import policylang
from policylang.graph.facts import Facts
from policylang.operators.moves import MoveError
from policylang.planning.capabilities import HALF
from policylang.planning.edits.other_ranks import Grid
from policylang.planning.edits.proof import ChainCall, Equivalence, Prover, _groups, _labelled, new_call, old_calls, run
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.graph_edit import Edit, Node
from tests.support.bucketed import KINDS, picking, shard_of
from tests.support.every_rank import Builder, EveryRank

# --- proofs ---------------------------------------------------------------------------------------------------------


def an_edit(builder: Builder) -> Sequence[fx.Node]:
    """Members of which some have one shape, some as many elements, and some neither."""
    kind = {"all_gather": builder.gather, "reduce_scatter": builder.scatter, "all_reduce": builder.reduce}
    return [
        make(shard_of(builder, start, *shape), 0)
        for make in kind.values()
        for start, shape in ((0, (2, 6)), (1, (6, 2)), (2, (6,)), (3, (6,)), (4, (2, 2, 3)), (9, (4, 1)))
    ]


@pytest.fixture(scope="module")
def proven() -> tuple[Facts, tuple[Edit, ...]]:
    facts = EveryRank((2,), an_edit).facts(0)
    lines = "".join(f"bucket {kind} up to 1 MiB\n" for kind in KINDS)
    edits = plan_edits(policylang.parse(lines), facts, HALF, None, picking())[0].done
    assert [len(edit.collectives) for edit in edits] == [6, 6, 6]
    return facts, edits


def claim(facts: Facts, edit: Edit, new: Sequence[ChainCall], pairs: Sequence[tuple[str, str]]) -> Equivalence:
    grid = Grid((2,), (0, 1), (0,), (), ())
    sources = tuple((name, facts.shapes[facts.index[name]] or ()) for name in edit.sources)
    old = old_calls(facts, [facts.index[name] for name in edit.dead])
    return Equivalence(sources, old, new, pairs, grid, ("a0",))


def holds(claimed: Equivalence) -> bool:
    """Whether old and new calls give the same on tensors of full size, whose elements tell what they are of."""
    sources = _labelled(dict(claimed.sources), claimed.grid.ranks, lambda place, count, _: [
        1 << (place * count + at) for at in range(count)
    ])  # fmt: skip
    try:
        before, after = (run(calls, sources, _groups(claimed)) for calls in (claimed.old, claimed.new))
    except MoveError:
        return False
    return all(
        before[was][rank].shape == after[now][rank].shape
        and before[was][rank].elements() == after[now][rank].elements()
        for was, now in claimed.pairs
        for rank in claimed.grid.ranks
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_proof_says_what_a_run_of_the_whole_says(proven: tuple[Facts, tuple[Edit, ...]], data: st.DataObject) -> None:
    """Of buckets and of what is almost one: joined in another order, cut elsewhere, or read for another."""
    facts, edits = proven
    edit = data.draw(st.sampled_from(edits))
    nodes, pairs = list(edit.nodes), list(edit.replaced)
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(nodes) - 1))
        node = nodes[place]
        first, *others = node.arguments
        match node.target:
            case "aten.cat.default":
                order = data.draw(st.permutations(first))
                nodes[place] = evolve(node, arguments=(tuple(order), *others))
            case "aten.slice.Tensor":
                by = data.draw(st.integers(-6, 6))
                dim, start, end = others
                if start + by >= 0:
                    nodes[place] = evolve(node, arguments=(first, dim, start + by, end + by))
            case "aten.view.default" if isinstance(first, Node):
                sources = st.sampled_from([node.arguments[0] for node in nodes if node.target == "aten.view.default"])
                nodes[place] = evolve(node, arguments=(data.draw(sources), *others))
            case _:
                one, other = (data.draw(st.integers(0, len(pairs) - 1)) for _ in range(2))
                (old, new), (was, now) = pairs[one], pairs[other]
                pairs[one], pairs[other] = (old, now), (was, new)
    made: set[str] = {*edit.sources}
    for node in nodes:  # what reads what is not made yet is no graph
        read = node.arguments[0] if isinstance(node.arguments[0], tuple) else (node.arguments[0],)
        if not all(each.name in made for each in read):
            return
        made.add(node.name)
    claimed = claim(facts, edit, list(map(new_call, nodes)), pairs)
    found = Prover().prove(claimed)
    assert not isinstance(found, str) or not holds(claimed) or (nodes, pairs) != (list(edit.nodes), list(edit.replaced))
    assert isinstance(found, str) or holds(claimed)
    event = "proven" if not isinstance(found, str) else found.partition("`")[0] or found
    hypothesis_event(event)
