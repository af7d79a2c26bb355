"""Buckets compared with runs of the full tensors: their proofs, the strides that readers see, and random programs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import event as hypothesis_event
from hypothesis import strategies as st
from torch import fx

import policylang
from policylang.graph.facts import Facts
from policylang.operators.moves import MoveError
from policylang.planning.capabilities import HALF
from policylang.planning.edits.other_ranks import Grid
from policylang.planning.edits.proof import ChainCall, Equivalence, Prover, _labelled, new_call, old_calls, run_on_ranks
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.graph_edit import Edit, Node
from tests.support.bucketed import CAST, KINDS, bucketed, carried_out, picking, shard_of
from tests.support.drawn import examples
from tests.support.every_rank import ATEN, Builder, EveryRank, Program

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
    sources = _labelled(dict(claimed.sources), claimed.grid.ranks, alike=False, sums=True)
    try:
        before, after = (run_on_ranks(calls, sources, lambda *_: (0, 1)) for calls in (claimed.old, claimed.new))
    except MoveError:
        return False
    return all(
        before[was][rank].shape == after[now][rank].shape
        and before[was][rank].elements() == after[now][rank].elements()
        for was, now in claimed.pairs
        for rank in claimed.grid.ranks
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


lengths = st.lists(st.sampled_from((1, 1, 2, 3, 4)), min_size=1, max_size=3).map(tuple)
steps = st.lists(
    st.tuples(
        st.sampled_from(("view", "flat", "unsqueeze", "squeeze", "turn", "slice", "select", "expand", "split")),
        st.integers(0, 7),
    ),
    max_size=3,
)
members = st.lists(st.tuples(lengths, steps), min_size=2, max_size=3)


def read(builder: Builder, value: fx.Node, chain: Sequence[tuple[str, int]]) -> fx.Node:
    """A member's value behind some layout operators, as a product reads it: it is not returned, and may be a view."""
    for what, number in chain:
        shape = tuple(value.meta["val"].shape)
        dim = number % max(len(shape), 1)
        match what:
            case "view" if value.meta["val"].is_contiguous():
                half = [2, prod(shape) // 2] if prod(shape) % 2 == 0 else [1, prod(shape)]
                value = builder.call(ATEN.view.default, value, [half, [1, *shape], [*shape, 1]][number % 3])
            case "flat" if value.meta["val"].is_contiguous():
                value = builder.call(ATEN.view.default, value, [prod(shape)])
            case "unsqueeze":
                value = builder.call(ATEN.unsqueeze.default, value, dim)
            case "squeeze" if 1 in shape:
                value = builder.call(ATEN.squeeze.dim, value, shape.index(1))
            case "turn":
                value = builder.call(ATEN.permute.default, value, list(reversed(range(len(shape)))))
            case "slice" if shape:
                value = builder.call(ATEN.slice.Tensor, value, dim, 0, max(1, shape[dim] - number % 2))
            case "select" if shape:
                value = builder.call(ATEN.select.int, value, dim, 0)
            case "expand" if 1 in shape:
                value = builder.call(ATEN.expand.default, value, [2 if length == 1 else length for length in shape])
            case "split" if shape:
                value = builder.cut(value, dim, 0, 1, piece=True)
    while (rank := value.meta["val"].ndim) != 2:
        value = (
            builder.call(ATEN.select.int, value, 0, 0) if rank > 2 else builder.call(ATEN.unsqueeze.default, value, 0)
        )
    return builder.call(ATEN.mm.default, builder.call(ATEN.t.default, value), value)


def program(kind: str, drawn: Sequence[tuple[tuple[int, ...], Sequence[tuple[str, int]]]], ranks: int) -> Program:
    def built(builder: Builder) -> list[fx.Node]:
        given = [
            shard_of(builder, 0, *((shape[0] * ranks, *shape[1:]) if kind == "scatter" else shape))
            for shape, _ in drawn
        ]
        brought = [getattr(builder, kind)(each, 0) for each in given]
        return [read(builder, each, chain) for each, (_, chain) in zip(brought, drawn, strict=True)]

    return built


def check(kind: str, drawn: Sequence[tuple[tuple[int, ...], Sequence[tuple[str, int]]]], ranks: int) -> None:
    found = EveryRank((ranks,), program(kind, drawn, ranks), shard=(16, 16))
    plans = bucketed(found, "bucket collective up to 1 MiB")
    assert plans[0].edits.done
    found.carry_out(plans)  # which holds every stride against that of the operator on fake tensors


def test_a_length_of_one_in_front_of_a_part_of_a_bucket() -> None:
    """ATen gives a leading length of 1 another stride than fake tensors do, where it lies in memory with gaps."""
    check("scatter", [((1, 4, 4), []), ((1, 4, 2), [])], ranks=2)


@pytest.mark.parametrize("kind", ["gather", "scatter", "reduce"])
@settings(max_examples=examples(10, 300))
@given(members, st.sampled_from((1, 2, 3)))
def test_strides_are_those_of_torchs_operators(
    kind: str, drawn: list[tuple[tuple[int, ...], list[tuple[str, int]]]], ranks: int
) -> None:
    check(kind, drawn, ranks)


# --- random programs ------------------------------------------------------------------------------------------------


@frozen
class Step:
    what: str
    numbers: tuple[int, ...]
    block: int


SHAPES = ((4,), (2, 2), (6,), (1, 3), (3, 1, 2), (1,), (6, 2))
STEPS = st.builds(
    Step,
    st.sampled_from(
        ("shard", "shard", "shard", "gather", "gather", "gather", "scatter", "scatter", "reduce", "reduce", "gathered",
         "neg", "add", "view", "turn", "clone", "square", "write", "cast")
    ),
    st.tuples(*[st.integers(0, 40)] * 3),
    st.integers(-1, 2),
)  # fmt: skip


def random_program(steps: Sequence[Step], returned: Sequence[int], blocks: dict[str, int]) -> Any:
    def program(builder: Builder) -> Sequence[fx.Node]:
        values = [shard_of(builder, 0, 6)]
        for step in steps:
            seen = set(builder.graph.nodes)
            if (made := _taken(builder, step, values)) is not None:
                values.append(made)
            blocks.update({node.name: step.block for node in builder.graph.nodes if node not in seen})
        return [values[place % len(values)] for place in returned]

    return program


def _taken(builder: Builder, step: Step, values: Sequence[fx.Node]) -> fx.Node | None:
    one, two, three = step.numbers
    source = values[-1 - one % min(len(values), 6)]
    value = source.meta["val"]
    axis = two % len(builder.place.shape)
    size = builder.place.shape[axis]
    fits = value.is_contiguous() and value.numel() <= 60
    match step.what:
        case "shard":
            return shard_of(builder, three % 5, *SHAPES[one % len(SHAPES)])
        case "gathered":
            dtype = torch.float64 if three % 4 == 0 else None
            return builder.gather(shard_of(builder, three % 5, *SHAPES[one % len(SHAPES)], dtype=dtype), axis)
        case "gather" if fits and value.ndim:
            return builder.gather(source, axis)
        case "scatter" if value.is_contiguous() and value.ndim and value.shape[0] % size == 0:
            return builder.scatter(source, axis)
        case "reduce" if value.is_contiguous():
            return builder.reduce(source, axis)
        case "neg":
            return builder.call(ATEN.neg.default, source)
        case "add":
            return builder.call(ATEN.add.Tensor, source, source)
        case "view" if value.is_contiguous():
            return builder.call(ATEN.view.default, source, [value.numel()])
        case "turn":
            return builder.call(ATEN.permute.default, source, list(reversed(range(value.ndim))))
        case "clone":
            return builder.call(ATEN.clone.default, source, memory_format=torch.contiguous_format)
        case "square" if value.ndim == 2 and value.numel() <= 60:
            turned = builder.call(ATEN.t.default, source)
            # whole numbers that stay whole
            return builder.call(ATEN.remainder.Scalar, builder.call(ATEN.mm.default, source, turned), 64)
        case "cast":
            return builder.call(CAST, source, torch.float64)
        case "write" if three % 3 == 0:
            builder.call(ATEN.add_.Tensor, source, 1)
    return None


LINES = (
    "bucket collective up to 1 MiB",
    "bucket all_gather per block",
    "bucket collective per block",
    "bucket collective per 2 blocks up to 300 B",
    "bucket all_gather up to 200 B\nbucket (reduce_scatter or all_reduce) up to 1 MiB",
)


@settings(max_examples=examples(12, 600))
@given(
    st.sampled_from(((3,), (2, 2), (2, 3))),
    st.lists(STEPS, min_size=4, max_size=examples(18, 26)),
    st.lists(st.integers(0, 60), min_size=1, max_size=4, unique=True),
    st.sampled_from(LINES),
)
def test_every_value_of_a_random_program_is_what_it_was(
    shape: tuple[int, ...], steps: list[Step], returned: list[int], text: str
) -> None:
    blocks: dict[str, int] = {}
    carried_out(EveryRank(shape, random_program(steps, returned, blocks)), text, blocks)
