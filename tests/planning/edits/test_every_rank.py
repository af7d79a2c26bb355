"""Rewrites on all ranks of a mesh at once, and of a recorded Llama-3 8B on 128 ranks: the numbers stay."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Literal

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import policylang
from policylang.backends.rewriting import apply_edits
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Group, Mesh
from policylang.language.syntax import Policy
from policylang.planning.capabilities import HALF, Capabilities
from policylang.planning.edits.edit_planner import SAME_GRAPH
from policylang.planning.edits.other_ranks import UNASKED
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from tests.support.drawn import SEARCHES, drawn, slow
from tests.support.edited import assert_facts_hold
from tests.support.lines import ATEN, Builder, EveryRank, lies_as, picking
from tests.support.shared_graphs import BACKWARD, JOINT, process_groups, recorded, shared_facts, shared_graph
from tests.support.versions import needs_groups_in_any_order

FUSE, SCATTERS, COLLAPSE = (
    "optional fuse all_gather chains", "optional fuse reduce_scatter chains", "optional collapse round_trips"
)  # fmt: skip
STATEMENTS = (FUSE, SCATTERS, COLLAPSE)
SHAPES = ((2, 2), (4, 4), (2, 2, 2), (2, 4), (4, 2), (3, 3))
SQUARE = ((2, 2), (4, 4), (2, 2, 2))


def done(plans: dict[int, Plan]) -> int:
    """How many edits every rank makes: all the same number."""
    (count,) = {len(plan.edits.done) for plan in plans.values()}
    return count


def check(ranks: EveryRank, policy: Policy) -> dict[int, Plan]:
    """Plan, rewrite and run: one plan for all, and the same numbers, bit for bit."""
    expected = ranks.run()
    plans = ranks.together(policy)
    assert len({plan.digest for plan in plans.values()}) == 1
    ranks.carry_out(plans)
    found = ranks.run()
    for rank in expected:
        assert len(found[rank]) == len(expected[rank])
        for one, other in zip(found[rank], expected[rank], strict=True):
            assert torch.equal(one, other), rank
            assert lies_as(one, other)
    return plans


# --- by hand --------------------------------------------------------------------------------------------------------
@frozen
class GatheredAndCut:
    """``Shard`` along one axis, to ``Shard`` along another: gathered over the one, cut at the place in the other."""

    gathered: int
    place_in: int
    dim: int = 0
    piece: bool = False

    def __call__(self, builder: Builder) -> Sequence[fx.Node]:
        place = builder.place
        whole = builder.gather(builder.shard, self.gathered, self.dim)
        part = place.at[self.place_in]
        return [
            builder.call(ATEN.sin.default, builder.cut(whole, self.dim, part, place.shape[self.gathered], self.piece))
        ]


@pytest.mark.parametrize(
    ("shape", "piece", "dim"),
    [((2, 2), False, 1), ((2, 2), True, 0), *(slow(*each) for each in product(SQUARE[1:], (False, True), (0, 1)))],
)
def test_a_cut_at_the_place_in_another_dimension_is_left_on_every_rank(shape, piece, dim) -> None:
    """On a square mesh the two places are equal on some ranks, which would take their gather out alone."""
    for gathered, place_in in product(range(len(shape)), repeat=2):
        ranks = EveryRank(shape, GatheredAndCut(gathered, place_in, dim, piece))
        plans = check(ranks, policylang.parse(COLLAPSE))
        assert done(plans) == (gathered == place_in)
        if gathered != place_in:
            reasons = {rank: plan.edits.refused[0].reason for rank, plan in plans.items()}
            whole = "cat" if dim else "wait_tensor"
            equal = [rank for rank, reason in reasons.items() if reason != f"not this rank's own part of {whole}"]
            assert 0 in equal
            assert len(equal) < len(plans)
            for rank in equal:
                assert reasons[rank].startswith("not every rank's own part (not on ranks ")
                assert reasons[rank].endswith(f") of {whole}")


@pytest.mark.parametrize("shape", SQUARE[::2])
def test_ranks_that_cannot_be_asked_collapse_nothing(shape: tuple[int, ...]) -> None:
    for place_in in range(2):
        plans = EveryRank(shape, GatheredAndCut(0, place_in)).alone(policylang.parse(COLLAPSE))
        for rank, plan in plans.items():
            assert not plan.edits.done
            (refused,) = plan.edits.refused
            assert refused.reason in (UNASKED, "not this rank's own part of wait_tensor"), rank
        if place_in == 0:
            assert {plan.edits.refused[0].reason for plan in plans.values()} == {UNASKED}


def first_part(builder: Builder) -> Sequence[fx.Node]:
    """A broadcast: everyone takes what the first rank has."""
    return [builder.call(ATEN.sin.default, builder.cut(builder.gather(builder.shard, 0), 0, 0, 2))]


def own_on_the_way_to_another(builder: Builder) -> Sequence[fx.Node]:
    """Own in the first cut where two places are equal; the second one can be reached only past the first."""
    other = builder.place.at[1]
    whole = builder.gather(builder.call(ATEN.sin.default, builder.gather(builder.shard, 0)), 1, 1)
    half = builder.cut(builder.gather(whole, 0), 0, other, 2)
    return [builder.call(ATEN.sin.default, builder.cut(half, 1, other, 2)), builder.call(ATEN.cos.default, whole)]


def turned_on_some(builder: Builder) -> Sequence[fx.Node]:
    """Gathered twice; along the second dimension the pieces are joined from this rank's own on."""
    whole = builder.gather(builder.shard, 0, 1, turned=builder.place.at[0])
    return [builder.call(ATEN.sin.default, builder.gather(whole, 1))]


@pytest.mark.parametrize("program", [first_part, own_on_the_way_to_another, turned_on_some])
@pytest.mark.parametrize("text", [COLLAPSE, FUSE, f"{FUSE}\n{COLLAPSE}"])
def test_what_holds_on_some_ranks_only_is_left_on_all(program: object, text: str) -> None:
    for shape in ((2, 2), (2, 2, 2)):
        assert done(check(EveryRank(shape, program), policylang.parse(text))) == 0  # type: ignore[arg-type]


def gathered_twice(builder: Builder) -> Sequence[fx.Node]:
    return [builder.call(ATEN.sin.default, builder.gather(builder.gather(builder.shard, 1, 1), 0))]


def test_groups_that_no_mesh_tells_are_asked_for_and_never_guessed() -> None:
    policy = policylang.parse(FUSE)
    ranks = EveryRank((2, 2, 2), gathered_twice, known=False)
    for plan in ranks.alone(policy).values():
        assert [refused.reason for refused in plan.edits.refused] == ["groups of other ranks not known"]
    assert done(check(ranks, policy)) == 1


def test_a_chain_over_groups_that_lie_otherwise_elsewhere_is_left_on_all() -> None:
    """The second gather's pairs are crossed on half of the ranks, which the others' own pairs do not tell."""
    ranks = EveryRank((2, 2, 2), gathered_twice, known=False)
    for rank, pair in {4: (4, 7), 7: (4, 7), 5: (5, 6), 6: (5, 6)}.items():
        (along_b,) = (name for name in ranks.groups[rank] if name.startswith("b"))
        ranks.groups[rank][along_b] = pair
    assert done(check(ranks, policylang.parse(FUSE))) == 0


def something_for_every_statement(builder: Builder) -> Sequence[fx.Node]:
    """A chain with a reader in its middle, cut back to where it began and to the middle, and two scatters in a row."""
    place = builder.place
    half = builder.gather(builder.shard, 1)
    read = builder.call(ATEN.mul.Tensor, half, 2.0)
    whole = builder.gather(half, 0)
    middle = builder.cut(whole, 0, place.at[0], place.shape[0])
    own = builder.cut(middle, 0, place.at[1], place.shape[1])
    sums = builder.scatter(builder.scatter(builder.call(ATEN.mul.Tensor, whole, 3.0), 0), 1)
    return [read, builder.call(ATEN.mul.Tensor, middle, 5.0), builder.call(ATEN.mul.Tensor, own, 7.0), sums]


@pytest.mark.parametrize("dims", [(0, 0), (1, 0)])
@pytest.mark.parametrize("piece", [False, True], ids=["slice", "piece"])
def test_round_trips_inside_each_other_both_go(dims: tuple[int, int], piece: bool) -> None:
    """What the inner one comes back to goes with the outer one."""

    def nested(builder: Builder) -> Sequence[fx.Node]:
        value, place = builder.shard, builder.place
        for axis in (0, 1):
            value = builder.gather(value, axis, dims[axis])
        for axis in (1, 0):
            value = builder.cut(value, dims[axis], place.at[axis], place.shape[axis], piece)
        return [builder.call(ATEN.mul.Tensor, value, 3.0)]

    ranks = EveryRank((2, 2), nested)
    assert done(check(ranks, policylang.parse(COLLAPSE))) == 2
    assert [node.target for node in ranks.graphs[3].graph.nodes] == ["shard", ATEN.mul.Tensor, "output"]


@pytest.mark.parametrize("count", [1, 2, slow(3)])
def test_every_order_of_the_statements_with_repetitions(count: int) -> None:
    made: dict[str, int] = {}
    for statements in product(STATEMENTS, repeat=count):
        ranks = EveryRank((2, 2), something_for_every_statement)
        made["\n".join(statements)] = done(check(ranks, policylang.parse("\n".join(statements))))
    assert all(made.values())
    if count == 3:
        assert made[f"{FUSE}\n{COLLAPSE}\n{SCATTERS}"] == 3


# --- at random ------------------------------------------------------------------------------------------------------
Part = Literal["own", "other", "first", "last", "next"]


@frozen
class Gather:
    axis: int
    dim: int
    turned: bool = False


@frozen
class Cut:
    axis: int
    """As many parts as it has ranks."""
    dim: int
    part: Part
    """``other``: the place along the next axis, if it is one of as many ranks; else the own one."""
    piece: bool


@frozen
class Scatter:
    axis: int


Step = Gather | Cut | Scatter | Literal["permute", "clone", "read", "compute", "view"]


@frozen
class Chain:
    """A random program: what it does to one value, step by step. What does not fit is left out."""

    steps: tuple[Step, ...]

    def __call__(self, builder: Builder) -> Sequence[fx.Node]:
        value, returned = builder.call(ATEN.mul.Tensor, builder.shard, 2.0), []
        for step in self.steps:
            if step == "read":
                returned.append(builder.call(ATEN.mul.Tensor, value, 5.0))
            else:
                value = self._after(builder, value, step)
        return [builder.call(ATEN.mul.Tensor, value, 3.0), *returned]

    def _after(self, builder: Builder, value: fx.Node, step: Step) -> fx.Node:
        place = builder.place
        shape = value.meta["val"].shape
        if isinstance(step, (Gather, Scatter)):
            axis = step.axis % len(place.shape)
            if not value.meta["val"].is_contiguous():
                value = builder.call(ATEN.clone.default, value, memory_format=torch.contiguous_format)
            if isinstance(step, Scatter):
                return value if shape[0] % place.shape[axis] else builder.scatter(value, axis)
            if prod(shape) * place.shape[axis] > 4096:
                return value
            return builder.gather(value, axis, step.dim, place.at[axis] if step.turned and step.dim else 0)
        if isinstance(step, Cut):
            axis = step.axis % len(place.shape)
            count = place.shape[axis]
            if shape[step.dim] % count:
                return value
            return builder.cut(value, step.dim, self._part(builder, step, axis), count, step.piece)
        if step == "permute":
            return builder.call(ATEN.permute.default, value, [1, 0])
        if step == "clone":
            return builder.call(ATEN.clone.default, value, memory_format=torch.contiguous_format)
        if step == "view" and value.meta["val"].is_contiguous() and shape[0] % 2 == 0:
            return builder.call(ATEN.view.default, value, [shape[0] // 2, shape[1] * 2])
        return builder.call(ATEN.mul.Tensor, value, 7.0) if step == "compute" else value

    def _part(self, builder: Builder, step: Cut, axis: int) -> int:
        place = builder.place
        count, own = place.shape[axis], place.at[axis]
        next_axis = (axis + 1) % len(place.shape)
        other = place.at[next_axis] if place.shape[next_axis] == count else own
        return {"own": own, "other": other, "first": 0, "last": count - 1, "next": (own + 1) % count}[step.part]


axes = st.integers(0, 2)
dims = st.integers(0, 1)
gathers = st.builds(Gather, axes, dims, st.sampled_from([False, False, False, True]))
cuts = st.builds(
    Cut, axes, dims, st.sampled_from(["own", "own", "own", "other", "first", "last", "next"]), st.booleans()
)
others: st.SearchStrategy[Step] = st.sampled_from(["permute", "clone", "read", "compute", "view"])
steps = st.one_of(gathers, gathers, cuts, st.builds(Scatter, axes), others)
lists = st.lists(steps, max_size=5)
in_a_row = st.tuples(
    lists, st.builds(Gather, axes, dims), lists.map(lambda found: found[:2]), st.builds(Gather, axes, dims)
)
programs = st.one_of(
    st.lists(steps, min_size=2, max_size=9).map(lambda found: Chain(tuple(found))),
    st.builds(lambda row, rest: Chain((*row[0], row[1], *row[2], row[3], *rest)), in_a_row, lists),
)
policies = st.lists(st.sampled_from(STATEMENTS), min_size=1, max_size=4).map("\n".join)


@drawn(12, 400, programs, policies, st.sampled_from(SHAPES if SEARCHES else SHAPES[:1] + SHAPES[3:]), st.booleans())
def test_any_statements_in_any_order_on_random_chains(program, text, shape, known) -> None:
    check(EveryRank(shape, program, known=known), policylang.parse(text))


@pytest.mark.slow
@given(programs, policies, st.sampled_from(SQUARE))
@settings(max_examples=8)
def test_alone_no_rank_collapses_anything(program: Chain, text: str, shape: tuple[int, ...]) -> None:
    for plan in EveryRank(shape, program).alone(policylang.parse(text)).values():
        assert all(edit.kind != "round_trip" for edit in plan.edits.done)
        assert all(edit.proof.assumed for edit in plan.edits.done)


GOLDEN = Path(__file__).parent / "refused.json"
MESH = Mesh(("dp", "tp"), (16, 8), tuple(range(128)))
GATHER = "_c10d_functional.all_gather_into_tensor.default"
FUSE_RECORDED = "optional fuse all_gather chains"
NO_SORTED = evolve(HALF, unsorted_groups=False)


def facts_of(name: str) -> Facts:
    assert (recorded(name)["mesh"]["dims"], recorded(name)["mesh"]["shape"]) == (list(MESH.dims), list(MESH.shape))
    return evolve(shared_facts(name, True), meshes=(MESH,))


@cache
def planned(name: str, text: str = FUSE_RECORDED, able: Capabilities = HALF) -> Plan:
    return make_plan(policylang.parse(text), facts_of(name), able)


@pytest.mark.slow
@needs_groups_in_any_order
def test_every_chain_of_the_backward_is_one_gather() -> None:
    made = planned(BACKWARD)
    assert len(made.edits.done) == 93
    assert not made.edits.refused
    assert (made.before.targets.count(GATHER), made.facts.targets.count(GATHER)) == (480, 387)
    for edit in made.edits.done:
        assert (edit.proof.ranks, edit.proof.assumed) == (128, SAME_GRAPH)
        (group,) = edit.groups
        assert group.dims == ("tp", "dp")  # tp gathers last, so it is the slow index
        assert group.ranks[:3] == (0, 8, 16)
    views = Counter(tuple(node.target.split(".")[1] for node in edit.nodes[2:]) for edit in made.edits.done)
    assert views == {("permute",): 60, ("permute", "slice", "permute"): 30, (): 2, ("slice", "permute"): 1}
    gone = {
        target: made.before.targets.count(target) - made.facts.targets.count(target)
        for target in ("aten.clone.default", "aten.split.Tensor", "aten.cat.default", "builtin.getitem")
    }
    assert gone == {"aten.clone.default": 90, "aten.split.Tensor": 90, "aten.cat.default": 90, "builtin.getitem": 720}
    assert len(made.before) - len(made.facts) == 1120


@pytest.mark.slow
def test_what_reads_a_fused_value_has_the_shape_that_it_had() -> None:
    made = planned(BACKWARD)
    before, after = made.before, made.facts
    for row, name in enumerate(after.names):
        if name in before.index:
            was = before.index[name]
            assert (after.shapes[row], after.dtypes[row], after.bytes[row]) == (
                before.shapes[was],
                before.dtypes[was],
                before.bytes[was],
            )
    assert all(row > max(after.inputs[row], default=-1) for row in range(len(after)))


@pytest.mark.parametrize(
    ("key", "name", "text", "able"),
    [
        slow("joint", JOINT, FUSE_RECORDED, HALF),
        ("backward", BACKWARD, FUSE_RECORDED, HALF),
        ("backward over dp", BACKWARD, f"{FUSE_RECORDED} over dp", HALF),
        ("backward over dp and tp", BACKWARD, f"{FUSE_RECORDED} over dp, tp", HALF),
        ("backward where torch sorts ranks", BACKWARD, FUSE_RECORDED, NO_SORTED),
    ],
)
@needs_groups_in_any_order
def test_the_reason_of_every_refusal(key: str, name: str, text: str, able: Capabilities) -> None:
    made = planned(name, text, able).edits
    found = {" → ".join(each.collectives): each.reason for each in made.refused}
    assert len(found) == len(made.refused)
    assert len(made.done) + len(found) == 93  # every gather that reads a gather has an account
    golden = json.loads(GOLDEN.read_text())
    assert found == golden[key]


# --- recorded steps -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "kind", "before", "after", "most"),
    [
        ("bucket all_gather per block", "all_gather", 480, 226, 2),
        ("bucket reduce_scatter per block", "reduce_scatter", 323, 101, 2),
        slow("bucket all_gather up to 64 MiB", "all_gather", 480, 188, None),
    ],
)
def test_the_collectives_of_a_recorded_backward_become_fewer(line, kind, before, after, most) -> None:
    """Llama-3 8B on 128 ranks: what computes a block is told by what it reads, since its nodes name no module."""
    facts = shared_facts(BACKWARD, True)
    policy = policylang.parse(line)
    edits, found = plan_edits(policy, facts, HALF, None, picking())
    count = [sum(kind in target for target in each.targets) for each in (facts, found)]
    assert count == [before, after]
    assert all(row > max(found.inputs[row], default=-1) for row in range(len(found)))
    assert all(edit.proof.ranks == len(edit.groups[0].ranks) in (8, 16, 128) for edit in edits.done)
    again, other = plan_edits(policy, facts, HALF, None, picking())
    assert (edits, list(found.names)) == (again, list(other.names))
    if most is not None:
        groups = Counter(edit.groups[0].name for edit in edits.done)
        assert max(groups.values()) <= 32


@pytest.mark.slow
@pytest.mark.parametrize("line", ["bucket all_gather per block", "bucket reduce_scatter up to 256 MiB"])
def test_a_recorded_graph_comes_out_as_planned(line: str) -> None:
    groups = {name: Group(name, ranks, len(ranks)) for name, ranks in process_groups(BACKWARD).items()}
    gm = shared_graph(BACKWARD)
    facts = collect(gm, groups=groups)
    policy = policylang.parse(line)
    edits, after = plan_edits(policy, facts, HALF, None, picking())
    made = make_plan(policylang.parse("undecided -> save"), facts, HALF)
    made = evolve(made, policy=policy, edits=edits, facts=after)
    assert len(edits.done) > 10
    assert apply_edits(gm, made) == ()
    assert_facts_hold(gm, made, groups=groups)
