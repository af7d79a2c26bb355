"""The layout algebra against the evaluator, the evaluator against torch, and whole edits on random lines."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from attrs import evolve
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from policylang.graph.facts import Facts, GraphKind
from policylang.operators.layouts import Tensor
from policylang.planning.edits.other_ranks import Grid, grid_of
from policylang.planning.edits.proof import ChainCall, Equivalence, Prover, new_call, old_calls, run_on_ranks
from policylang.planning.graph_edit import Edit, FusedGroup, Node, Proof
from tests.support.lines import DIMS, Line, aten, groups_of, mesh_of, planned
from tests.support.versions import needs_groups_in_any_order


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """Two or three gathers over random dimensions of a random mesh, with layout operators around them."""
    shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3).filter(lambda each: prod(each) > 1))
    mesh = mesh_of(*shape)
    order = draw(st.permutations(DIMS[: len(shape)]))
    rank = draw(st.integers(0, prod(shape) - 1))
    line = Line(mesh, draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)), rank=rank)
    for dim in order[: draw(st.integers(2, len(order)))]:
        for _ in range(draw(st.integers(0, 2))):
            _move(draw, line)
        ndim = line.node.meta["val"].ndim
        line.gather_along(dim, draw(st.integers(0, max(0, ndim - 1))))
    for _ in range(draw(st.integers(0, 2))):
        _move(draw, line)
    return line


def _move(draw: st.DrawFn, line: Line) -> None:
    value = line.node.meta["val"]
    kind = draw(st.sampled_from(("permute", "clone", "squeeze", "flatten", "cut", "turn")))
    if kind == "permute":
        line.permute(*draw(st.permutations(range(value.ndim))))
    elif kind == "turn":
        line.call(aten.transpose.int, 0, value.ndim - 1)
    elif kind == "clone":
        line.contiguous()
    elif kind == "squeeze":
        line.call(aten.unsqueeze.default, draw(st.integers(-1, value.ndim - 1)))
    elif kind == "flatten" and value.ndim > 1:
        line.contiguous().view(value.shape[0] * value.shape[1], *value.shape[2:])
    elif kind == "cut":
        length = value.shape[0]
        part = draw(st.sampled_from([each for each in range(1, length + 1) if length % each == 0]))
        line.contiguous().view(part, length // part, *value.shape[1:])


def on_all_ranks(
    facts: Facts, calls: Sequence[ChainCall], grid: Grid, names: Sequence[str], result: str
) -> dict[int, list]:
    """Without the proof's shrinking: whole shards, each element with a number of its own."""
    source = next(name for row, name in enumerate(facts.names) if facts.ops[row] == "placeholder")
    shape = facts.shapes[0]
    assert shape is not None
    size = prod(shape)
    shards = {rank: Tensor.fresh(range(rank * size, rank * size + size), shape) for rank in grid.ranks}

    def groups(group: str | FusedGroup, rank: int) -> tuple[int, ...]:
        return group.ranks if isinstance(group, FusedGroup) else grid.group(names.index(group), rank)

    found = run_on_ranks(calls, {source: shards}, groups)[result]
    return {rank: [value.shape, value.elements()] for rank, value in found.items()}


@settings(max_examples=25)
@given(lines())
@needs_groups_in_any_order
def test_every_random_chain_is_one_gather_of_the_same_elements(line: Line) -> None:
    facts = line.facts(kind=GraphKind.FORWARD)
    found = planned(facts)
    count = sum(".all_gather" in target for target in facts.targets)
    allowed = ("would copy", "cuts across shards")  # a view may cut 2 gathered shards of 3 in 3
    assert [each.reason for each in found.refused if not any(phrase in each.reason for phrase in allowed)] == []
    assume(found.done and len(found.done[0].collectives) == count)
    (edit,) = found.done
    names = [facts.group_names[facts.index[gather]] for gather in edit.collectives]
    grid = grid_of(facts, names)
    assert isinstance(grid, Grid)
    until = [row for row in range(len(facts)) if facts.arguments[row] and row <= facts.index[edit.replaced[0][0]]]
    old = on_all_ranks(facts, old_calls(facts, until), grid, names, edit.replaced[0][0])
    before = [row for row in until if facts.names[row] not in edit.dead]
    calls = [*old_calls(facts, before), *map(new_call, edit.nodes)]
    assert on_all_ranks(facts, calls, grid, names, edit.replaced[0][1]) == old


@settings(max_examples=25)
@given(lines(), st.data())
def test_a_wrong_order_of_ranks_is_caught(line: Line, data: st.DataObject) -> None:
    """The proof does not take the algebra's word: swap two ranks of the group, and it says so."""
    facts = line.facts()
    done = planned(facts).done
    assume(done)
    edit: Edit = done[0]
    (group,) = edit.groups
    ranks = list(group.ranks)
    assume(len(ranks) > 1)
    one, other = data.draw(st.lists(st.integers(0, len(ranks) - 1), min_size=2, max_size=2, unique=True))
    ranks[one], ranks[other] = ranks[other], ranks[one]
    wrong = evolve(group, ranks=tuple(ranks))
    gather, *rest = edit.nodes
    nodes = [evolve(gather, arguments=(*gather.arguments[:2], wrong)), *rest]
    names = tuple(facts.group_names[facts.index[each]] for each in edit.collectives)
    grid = grid_of(facts, names)
    assert isinstance(grid, Grid)
    (source,) = edit.sources
    rows = sorted(facts.index[name] for name in edit.dead)
    shape = facts.shapes[facts.index[source]]
    assert shape is not None
    new = list(map(new_call, nodes))
    claimed = Equivalence(((source, shape),), old_calls(facts, rows), new, edit.replaced, grid, names)
    found = Prover().prove(claimed)
    assert isinstance(found, str)
    assert "would be another value on rank" in found


@settings(max_examples=25)
@given(lines())
def test_the_evaluator_does_what_torch_does(line: Line) -> None:
    """Layout operators are torch's own; of a gather, torch is handed the shards side by side."""
    gm = line.done()
    facts = line_facts(line, gm)
    shape = facts.shapes[0]
    assert shape is not None
    size = prod(shape)
    ranks = line.mesh.ranks
    groups = {rank: groups_of(line.mesh, rank) for rank in ranks}
    real = {"shard": {rank: torch.arange(rank * size, rank * size + size).reshape(shape) for rank in ranks}}
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.name.startswith(("mm", "sin")) or node.name == "t":
            continue
        of = [read.name for read in node.all_input_nodes]
        for rank in ranks:
            if "all_gather" in node.name:
                members = groups[rank][node.args[2]].ranks
                value = torch.cat([real[of[0]][member] for member in members])
            elif "wait" in node.name:
                value = real[of[0]][rank]
            else:
                value = node.target(*torch.fx.map_arg(node.args, lambda n, r=rank: real[n.name][r]), **node.kwargs)
            real.setdefault(node.name, {})[rank] = value
    rows = [facts.index[name] for name in real if name != "shard"]
    shards = {rank: Tensor.fresh(value.flatten().tolist(), shape) for rank, value in real["shard"].items()}
    found = run_on_ranks(old_calls(facts, rows), {"shard": shards}, lambda group, rank: groups[rank][str(group)].ranks)
    for name, values in real.items():
        for rank, value in values.items():
            ours = found[name][rank]
            if isinstance(value, torch.Tensor):
                assert isinstance(ours, Tensor)
                assert (ours.shape, ours.elements()) == (tuple(value.shape), value.flatten().tolist())
                assert ours.contiguous == value.is_contiguous()


def line_facts(line: Line, gm: torch.fx.GraphModule) -> Facts:
    from policylang.graph.collect import collect

    return collect(gm, kind=GraphKind.FORWARD, groups=line.groups)


def test_values_of_unlike_shapes_are_made_small_each_for_itself() -> None:
    """A proof may start from several: how one is cut says nothing of another."""
    grid = Grid(shape=(2,), ranks=(0, 1), here=(0,), everyone=((0, 1),), dims=((),))
    sources = (("one", (6,)), ("other", (4,)))

    def calls(name: str) -> list[ChainCall]:
        return [
            ChainCall(f"{source}_{name}", "aten.view.default", (Node(source), (2, shape[0] // 2)), (2, shape[0] // 2))
            for source, shape in sources
        ]

    def proof(*pairs: tuple[str, str]) -> Proof | str:
        return Prover().prove(Equivalence(sources, calls("old"), calls("new"), pairs, grid, ()))

    assert isinstance(proof(("one_old", "one_new"), ("other_old", "other_new")), Proof)
    assert proof(("one_old", "other_new")) == "`one_old` would be another value on rank 0"
