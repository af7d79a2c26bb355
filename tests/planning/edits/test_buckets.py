"""``bucket``: what becomes one collective, where it stands, and that every reader finds the value that it read before.

Random programs are run on all ranks before and after, element by element; recorded steps say how many collectives are
left; and every proof is held against a run of the full-sized tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import event as hypothesis_event
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode

import policylang
from policylang.backends.surgery.edits import carry_out
from policylang.graph.blocks import blocks_of
from policylang.graph.facts import Facts, GraphKind, Group
from policylang.graph.reading.collect import collect
from policylang.language.syntax import Selector
from policylang.operators.moves import MoveError
from policylang.planning.capabilities import HALF
from policylang.planning.edits.edit_planner import SAME_GRAPH, Pick
from policylang.planning.edits.grids import Grid
from policylang.planning.edits.offers import Offer
from policylang.planning.edits.proof.calls import ChainCall, new_call, old_calls
from policylang.planning.edits.proof.equivalence import Equivalence, Prover, _groups, _labelled
from policylang.planning.edits.proof.evaluator import run
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.graph_edit import Edit, Edits, Node
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.support.edited import AllAlike, assert_facts_hold
from tests.support.every_rank import ATEN, Builder, EveryRank
from tests.support.ranks import run_ranks
from tests.support.shared_graphs import BACKWARD, process_groups, shared_facts, shared_graph

CAST = torch.ops.prims.convert_element_type.default
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def picking(blocks: Mapping[str, int] | None = None) -> Pick:
    """The collectives that a selector names; ``blocks``: the numbers of nodes, else those of the graph."""

    def pick(facts: Facts, selector: Selector) -> tuple[Sequence[int], Sequence[int]]:
        said = selector.span.one_line
        rows = [
            row
            for row, target in enumerate(facts.targets)
            if facts.group_names[row]
            and ("collective" in said or any(kind in said and kind in target for kind in KINDS))
        ]
        if blocks is None:
            return rows, blocks_of(facts).block_of
        return rows, [blocks.get(name, -1) for name in facts.names]

    return pick


def bucketed(ranks: EveryRank, text: str, blocks: Mapping[str, int] | None = None) -> dict[int, Plan]:
    policy = policylang.parse(text)
    found = {}
    for rank in ranks.graphs:
        made = plan(policy, ranks.facts(rank), HALF, ranks=AllAlike())
        edits, facts = plan_edits(policy, made.facts, HALF, AllAlike(), picking(blocks))
        found[rank] = evolve(made, edits=edits, facts=facts)
    return found


def carried_out(ranks: EveryRank, text: str, blocks: Mapping[str, int] | None = None) -> Edits:
    """The buckets of a program, carried out on all ranks: each returns what it returned, in memory of its own."""
    before = ranks.run()
    plans = bucketed(ranks, text, blocks)
    assert len({tuple(made.edits.words()) for made in plans.values()}) == 1
    ranks.carry_out(plans)
    after = ranks.run()
    for rank, values in before.items():
        for one, other in zip(values, after[rank], strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        assert shared(values) == shared(after[rank])
    return plans[0].edits


def shared(values: Sequence[Tensor]) -> set[tuple[int, int]]:
    """Which of some values lie in the same memory."""
    memory = [value.untyped_storage().data_ptr() for value in values]
    pairs = ((one, other) for one in range(len(values)) for other in range(one))
    return {(one, other) for one, other in pairs if memory[one] == memory[other]}


def targets(ranks: EveryRank) -> Counter[str]:
    nodes = ranks.graphs[0].graph.nodes
    return Counter(str(node.target).split(".")[1] for node in nodes if str(node.target).startswith("_c10d"))


# --- programs that a person would write -----------------------------------------------------------------------------


def shard_of(builder: Builder, start: int, *shape: int, dtype: torch.dtype | None = None) -> fx.Node:
    """Some of what a rank is given, as a shard of its own, cast where it is used."""
    flat = builder.call(ATEN.view.default, builder.shard, [builder.shard.meta["val"].numel()])
    part = builder.call(ATEN.slice.Tensor, flat, 0, start, start + torch.Size(shape).numel())
    part = builder.call(ATEN.view.default, part, list(shape))
    return part if dtype is None else builder.call(CAST, part, dtype)


def three_weights(builder: Builder) -> Sequence[fx.Node]:
    """Gathered one by one, each where it is multiplied, in different shapes and for different readers."""
    one = builder.gather(shard_of(builder, 0, 2, 3, dtype=torch.float64), 0)
    x = builder.call(ATEN.mm.default, builder.call(ATEN.t.default, one), one)
    two = builder.gather(shard_of(builder, 6, 5, dtype=torch.float64), 0)
    y = builder.call(ATEN.mul.Tensor, x, builder.call(ATEN.sum.default, two))
    three = builder.gather(shard_of(builder, 3, 1, 3, 3, dtype=torch.float64), 0)
    return y, builder.call(ATEN.neg.default, three), two


def test_shards_of_different_shapes_are_one_gather_before_the_first_reader() -> None:
    ranks = EveryRank((3, 2), three_weights)
    (edit,) = carried_out(ranks, "bucket all_gather up to 1 MiB").done
    assert targets(ranks) == {"all_gather_into_tensor": 1, "wait_tensor": 1}
    assert (len(edit.collectives), edit.fewer_collectives, edit.proof.ranks, edit.proof.exact) == (3, 2, 3, True)
    names = [node.name for node in ranks.graphs[0].graph.nodes]
    # casts stand ahead of it, and no product has moved
    assert names.index("bucket_all_gather_into_tensor") < names.index("mm") == names.index(edit.before) + 1
    assert set(edit.ahead) >= {"convert_element_type_1", "convert_element_type_2"}
    assert not edit.behind


def gradients(builder: Builder) -> Sequence[fx.Node]:
    """Scattered one by one as they are made; what comes is cast and scaled at once."""
    found = []
    for start, shape in ((0, (6, 2)), (2, (3,)), (1, (3, 2, 2))):
        grad = builder.call(ATEN.mul.Tensor, shard_of(builder, start, *shape), 3)
        made = builder.scatter(grad, 0)
        found.append(made if start == 1 else builder.call(ATEN.neg.default, made))
    return found


def test_gradients_are_one_scatter_once_the_last_is_there() -> None:
    ranks = EveryRank((3, 2), gradients)
    (edit,) = carried_out(ranks, "bucket reduce_scatter up to 1 MiB").done
    assert targets(ranks) == {"reduce_scatter_tensor": 1, "wait_tensor": 1}
    assert set(edit.behind) == {"neg", "neg_1"}
    # three ranks add in an order that depends on the length; what the graph returns has memory of its own
    assert not edit.proof.exact
    assert sum(node.target == "aten.clone.default" for node in edit.nodes) >= 1


def test_a_sum_of_two_is_the_same_in_either_order() -> None:
    (edit,) = carried_out(EveryRank((2, 3), lambda b: gradients_over(b, 0)), "bucket reduce_scatter up to 1 MiB").done
    assert edit.proof.exact


def gradients_over(builder: Builder, axis: int) -> Sequence[fx.Node]:
    return [builder.scatter(shard_of(builder, start, 2, 2), axis) for start in (0, 4)]


def losses(builder: Builder) -> Sequence[fx.Node]:
    scalar = builder.call(ATEN.sum.default, builder.shard)
    return [builder.reduce(scalar, 0), builder.reduce(shard_of(builder, 0, 3, 2), 0), builder.reduce(scalar, 1)]


def test_sums_over_all_ranks_are_one_but_for_another_group() -> None:
    ranks = EveryRank((3, 2), losses)
    edits = carried_out(ranks, "bucket all_reduce up to 1 MiB")
    assert targets(ranks)["all_reduce"] == 2
    assert [(each.collectives, each.reason) for each in edits.refused] == [(("all_reduce_2",), "no other like it")]
    assert edits.refused[0].detail == "all_reduce of float32 over group `b0`"


def one_after_the_other(builder: Builder) -> Sequence[fx.Node]:
    """Two weights, and what is computed with them gathered over the same group."""
    one = builder.gather(shard_of(builder, 0, 2, 2), 0)
    x = builder.call(ATEN.mm.default, builder.call(ATEN.t.default, one), one)
    between = builder.gather(x, 0)
    two = builder.gather(shard_of(builder, 4, 3), 0)
    late = builder.gather(builder.call(ATEN.neg.default, between), 0)
    return builder.call(ATEN.sum.default, late), builder.call(ATEN.sum.default, two)


def test_what_depends_on_each_other_stays_apart() -> None:
    ranks = EveryRank((3,), one_after_the_other)
    (edit,) = carried_out(ranks, "bucket all_gather up to 1 MiB").done
    assert edit.collectives == ("all_gather_into_tensor", "all_gather_into_tensor_2")
    assert targets(ranks)["all_gather_into_tensor"] == 3


def written_between(builder: Builder) -> Sequence[fx.Node]:
    """The second shard lies in memory that is written after the first reader."""
    memory = builder.call(ATEN.clone.default, shard_of(builder, 0, 2, 2))
    one = builder.gather(shard_of(builder, 4, 2, 2), 0)
    product = builder.call(ATEN.mm.default, builder.call(ATEN.t.default, one), one)
    builder.call(ATEN.mul_.Tensor, memory, 2)
    two = builder.gather(builder.call(ATEN.neg.default, memory), 0)
    return product, two


def test_nothing_is_read_before_it_is_written() -> None:
    edits = carried_out(EveryRank((3,), written_between), "bucket all_gather up to 1 MiB")
    assert not edits.done
    assert {each.reason for each in edits.refused} == {"memory is written: mul__tensor"} or {
        each.reason.partition(":")[0] for each in edits.refused
    } == {"memory is written"}


# --- per block, per blocks, and up to a size ------------------------------------------------------------------------


def blocks_of_weights(count: int, blocks: dict[str, int]) -> Callable[[Builder], Sequence[fx.Node]]:
    """So many blocks of two weights and a scatter each, one outside."""

    def program(builder: Builder) -> Sequence[fx.Node]:
        x = builder.call(ATEN.mul.Tensor, builder.gather(shard_of(builder, 0, 4), 0), 2)
        x = builder.call(ATEN.sum.default, x)
        grads = []
        for block in range(count):
            seen = {node.name for node in builder.graph.nodes}
            for start, length in ((block, 3), (2 * block, 5)):
                weight = builder.gather(shard_of(builder, start, length), 0)
                x = builder.call(ATEN.mul.Tensor, x, builder.call(ATEN.sum.default, weight))
                grads.append(builder.scatter(builder.call(ATEN.mul.Tensor, weight, x), 0))
            blocks.update({node.name: block for node in builder.graph.nodes if node.name not in seen})
        return grads

    return program


@pytest.mark.parametrize(
    ("text", "gathers", "scatters"),
    [
        ("bucket all_gather per block", 5, 8),
        ("bucket all_gather per 2 blocks", 3, 8),
        ("bucket all_gather per 3 blocks", 3, 8),
        ("bucket reduce_scatter per block", 9, 4),
        ("bucket (all_gather or reduce_scatter) per block", 5, 4),
        ("bucket collective per 4 blocks\nbucket all_gather up to 1 MiB", 1, 1),  # a bucket is a gather as well
        ("bucket all_gather up to 100 B", 5, 8),  # a weight is 36 or 60 bytes where it is gathered
        ("bucket all_gather per 2 blocks up to 150 B", 5, 8),
    ],
)
def test_how_much_goes_into_one(text: str, gathers: int, scatters: int) -> None:
    blocks: dict[str, int] = {}
    ranks = EveryRank((3,), blocks_of_weights(4, blocks))
    carried_out(ranks, text, blocks)
    found = targets(ranks)
    assert (found["all_gather_into_tensor"], found["reduce_scatter_tensor"]) == (gathers, scatters)


def test_no_bucket_is_larger_than_the_limit() -> None:
    blocks: dict[str, int] = {}
    ranks = EveryRank((3,), blocks_of_weights(4, blocks))
    facts = ranks.facts(0)
    for limit in (50, 59, 96, 100, 132, 200):
        edits, after = plan_edits(
            policylang.parse(f"optional bucket all_gather up to {limit} B"), facts, HALF, None, picking(blocks)
        )
        assert edits.done or limit < 96
        for edit in edits.done:
            assert sum(facts.bytes[facts.index[name]] for name in edit.collectives) <= limit
        assert edits.done or {each.reason for each in edits.refused} <= {
            "larger than the limit", "no neighbour fits beside it"
        }  # fmt: skip
        assert {edit.proof.assumed for edit in edits.done} <= {SAME_GRAPH}
        assert all(row > max(after.inputs[row], default=-1) for row in range(len(after)))


class Hearing:
    """Other ranks, one of which lacks the first of what is offered."""

    def __init__(self) -> None:
        self.heard: list[Offer] = []

    def unshared(self, offers: Sequence[Offer]) -> Mapping[str, str]:
        again, self.heard = bool(self.heard), list(offers)
        return {} if again else {offers[0].name: "not on rank 2"}


def test_a_bucket_that_another_rank_lacks_is_left_everywhere() -> None:
    blocks: dict[str, int] = {}
    ranks = EveryRank((3,), blocks_of_weights(2, blocks))
    others = Hearing()
    policy = policylang.parse("bucket all_gather per block")
    edits, _ = plan_edits(policy, ranks.facts(0), HALF, others, picking(blocks))
    assert (len(edits.done), edits.refused[-1].reason) == (1, "not on every rank: not on rank 2")
    assert [offer.among for offer in others.heard] == [(0, 1, 2)]
    assert not edits.done[0].proof.assumed


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


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(((3,), (2, 2), (2, 3))),
    st.lists(STEPS, min_size=4, max_size=18),
    st.lists(st.integers(0, 60), min_size=1, max_size=4, unique=True),
    st.sampled_from(LINES),
)
def test_every_value_of_a_random_program_is_what_it_was(
    shape: tuple[int, ...], steps: list[Step], returned: list[int], text: str
) -> None:
    blocks: dict[str, int] = {}
    carried_out(EveryRank(shape, random_program(steps, returned, blocks)), text, blocks)


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(((3,), (2, 2), (2, 3))),
    st.lists(STEPS, min_size=8, max_size=26),
    st.lists(st.integers(0, 60), min_size=1, max_size=4, unique=True),
    st.sampled_from(LINES),
)
def test_every_value_of_many_longer_programs_is_what_it_was(
    shape: tuple[int, ...], steps: list[Step], returned: list[int], text: str
) -> None:
    blocks: dict[str, int] = {}
    carried_out(EveryRank(shape, random_program(steps, returned, blocks)), text, blocks)


# --- what is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "text", "code", "said"),
    [
        (three_weights, "bucket all_gather up to 20 B", "APL334", "no two of its 3 collectives that can be one fit"),
        (
            losses,
            "bucket (all_reduce where group_size == 2) up to 1 MiB",
            "APL335",
            "are of one kind, dtype and process",
        ),
        (one_after_the_other, "bucket (all_gather where ndim == 2) up to 1 MiB", "APL312", "changes nothing"),
        (three_weights, "bucket reduce_scatter up to 1 MiB", "APL301", "matches nothing"),
        (three_weights, "optional bucket all_gather up to 20 B", "", ""),
    ],
)
def test_a_line_that_puts_nothing_together_says_why(program: Any, text: str, code: str, said: str) -> None:
    made = plan(policylang.parse(text), EveryRank((3, 2), program).facts(0), HALF)
    found = [each for each in made.diagnostics if each.code.startswith("APL3")]
    assert [each.code for each in found] == ([code] if code else [])
    assert all(said in each.message for each in found)


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


# --- recorded steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "kind", "before", "after", "most"),
    [
        ("bucket all_gather per block", "all_gather", 480, 226, 2),
        ("bucket reduce_scatter per block", "reduce_scatter", 323, 101, 2),
        ("bucket all_gather up to 64 MiB", "all_gather", 480, 188, None),
    ],
)
def test_the_collectives_of_a_recorded_backward_become_fewer(
    line: str, kind: str, before: int, after: int, most: int | None
) -> None:
    """Llama-3 8B on 128 ranks: what computes a block is told by what it reads, since its nodes name no module."""
    facts = shared_facts(BACKWARD, True)
    policy = policylang.parse(line)
    edits, found = plan_edits(policy, facts, HALF, None, picking())
    count = [sum(kind in target for target in each.targets) for each in (facts, found)]
    assert count == [before, after]
    assert all(row > max(found.inputs[row], default=-1) for row in range(len(found)))
    assert all(edit.proof.ranks == len(edit.groups[0].ranks) in (8, 16, 128) for edit in edits.done)
    assert (edits, list(found.names)) == (lambda again: (again[0], list(again[1].names)))(
        plan_edits(policy, facts, HALF, None, picking())
    )
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
    made = evolve(plan(policylang.parse("undecided -> save"), facts, HALF), policy=policy, edits=edits, facts=after)
    assert len(edits.done) > 10
    assert carry_out(gm, made) == ()
    assert_facts_hold(gm, made, groups=groups)


# --- ranks that are processes ---------------------------------------------------------------------------------------

WEIGHTS = ((4, 6), (24,), (1, 8), (6, 2, 2))


def _on_a_rank(rank: int) -> tuple[int, list[bool], list[bool]]:
    """Weights gathered, gradients scattered and norms summed over all ranks; whether each is bitwise what it was, and
    whether it is close."""
    name = dist.group.WORLD.group_name
    graph, mode = fx.Graph(), FakeTensorMode()
    shards = [graph.placeholder(f"shard_{number}") for number in range(len(WEIGHTS))]
    for node, shape in zip(shards, WEIGHTS, strict=True):
        with mode:
            node.meta["val"] = torch.empty(shape)

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda read: read.meta["val"]))
        node.meta["partitioner_tag"] = "is_backward"
        return node

    ops = torch.ops._c10d_functional
    results = []
    for shard in shards:
        cast = call(CAST, shard, torch.bfloat16)
        whole = call(ops.wait_tensor.default, call(ops.all_gather_into_tensor.default, cast, 4, name))
        results.append(call(ATEN.mul.Tensor, whole, 2))
        grad = call(ATEN.exp.default, call(CAST, whole, torch.float32))
        summed = call(ops.wait_tensor.default, call(ops.reduce_scatter_tensor.default, grad, "sum", 4, name))
        results.append(call(ATEN.neg.default, summed))
        norm = call(ATEN.sum.default, call(ATEN.sin.default, shard))
        results.append(call(ops.wait_tensor.default, call(ops.all_reduce.default, norm, "sum", name)))
    graph.output(tuple(results))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    torch.manual_seed(rank)
    given = [torch.randn(shape) for shape in WEIGHTS]
    before = gm(*given)
    policy = policylang.parse("".join(f"bucket {kind} up to 1 MiB\n" for kind in KINDS))
    facts = collect(gm, kind=GraphKind.BACKWARD)
    edits, after = plan_edits(policy, facts, HALF, AllAlike(), picking())
    made = evolve(plan(policylang.parse("undecided -> save"), facts, HALF), policy=policy, edits=edits, facts=after)
    carry_out(gm, made)
    assert_facts_hold(gm, made)
    pairs = list(zip(before, gm(*given), strict=True))
    equal = [torch.equal(one, other) for one, other in pairs]
    return len(edits.done), equal, [torch.allclose(one, other, rtol=1e-5) for one, other in pairs]


@pytest.mark.slow
def test_buckets_of_four_processes_bring_the_same() -> None:
    for done, equal, close in run_ranks(_on_a_rank, 4):
        assert done == 3
        assert all(equal[::3])  # what was gathered, to the bit
        assert all(close)
