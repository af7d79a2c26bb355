"""``bucket``: what becomes one collective, where it stands, and what is said where nothing does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import fx

import policylang
from policylang.planning.capabilities import HALF
from policylang.planning.edits.edit_planner import SAME_GRAPH
from policylang.planning.edits.other_ranks import Proposal
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.planner import plan
from tests.support.bucketed import CAST, carried_out, picking, shard_of, targets
from tests.support.edited import AllAlike
from tests.support.every_rank import ATEN, Builder, EveryRank

# --- programs that a person would write -----------------------------------------------------------------------------


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


def scattered_twice(more: int) -> Callable[[Builder], Sequence[fx.Node]]:
    """Gradients over one axis and at once over the other, as of FSDP with tensor parallelism; then so many over the
    first axis alone."""

    def program(builder: Builder) -> Sequence[fx.Node]:
        found = []
        for factor in (1, 5, 9):
            once = builder.scatter(builder.call(ATEN.mul.Tensor, shard_of(builder, 0, 6, 2), factor), 1)
            twice = builder.scatter(builder.call(CAST, builder.call(ATEN.neg.default, once), torch.float64), 0)
            found.append(builder.call(ATEN.mul.Tensor, twice, 2))
        return found + [builder.scatter(shard_of(builder, start, 4, 2), 1) for start in range(more)]

    return program


@pytest.mark.parametrize(
    ("more", "sizes", "alone"),
    [(0, [3, 3], []), (1, [3, 3], ["reduce_scatter_tensor_5 is bound to another bucket"]), (2, [3, 3, 2], [])],
)
def test_what_is_scattered_again_at_once_is_one_as_well(more: int, sizes: list[int], alone: list[str]) -> None:
    """The second scatters stand between the first ones, until they are one behind all of them."""
    ranks = EveryRank((3, 2), scattered_twice(more))
    edits = carried_out(ranks, "bucket reduce_scatter up to 1 MiB")
    assert [len(each.collectives) for each in edits.done] == sizes
    assert [each.reason for each in edits.refused] == alone


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


def test_the_size_of_a_group_without_known_ranks_is_what_its_calls_say() -> None:
    """As in a graph that is read where no process group of its names exists."""

    def everything(builder: Builder) -> Sequence[fx.Node]:
        return *three_weights(builder), *gradients(builder), *losses(builder)

    facts = EveryRank((3, 2), everything).facts(0)
    nobody = evolve(facts, groups={name: evolve(each, ranks=(), size=0) for name, each in facts.groups.items()})
    policy = policylang.parse("bucket collective up to 1 MiB")
    known, found = (plan_edits(policy, each, HALF, None, picking())[0] for each in (facts, nobody))
    words = [(edit.collectives, edit.proof.ranks, edit.proof.exact) for edit in known.done]
    assert [(edit.collectives, edit.proof.ranks, edit.proof.exact) for edit in found.done] == words
    assert len(words) == 3
    # a sum over all ranks does not say how many there are, and no gather of its group does
    assert "size of group `b0` not known" in {each.reason for each in found.refused}
    unlike = [list(arguments) for arguments in facts.arguments]
    for row, target in enumerate(facts.targets):
        if "reduce_scatter" in target:
            unlike[row][-2] = 2
    said = plan_edits(policy, evolve(nobody, arguments=[tuple(each) for each in unlike]), HALF, None, picking())[0]
    assert not said.done
    assert {each.reason for each in said.refused} == {f"size of group `{name}` not known" for name in facts.groups}


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
        self.heard: list[Proposal] = []

    def unshared(self, offers: Sequence[Proposal]) -> Mapping[str, str]:
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


def one_between(builder: Builder) -> Sequence[fx.Node]:
    """Two gathers, and a sum between them."""
    one = builder.gather(shard_of(builder, 0, 2, 3), 0)
    held = builder.reduce(builder.call(ATEN.neg.default, builder.shard), 0)
    two = builder.gather(shard_of(builder, 6, 2, 3), 0)
    return builder.call(ATEN.add.Tensor, one, two), held


@pytest.mark.parametrize(
    ("kept", "unknown", "stands"),
    [
        ("", False, None),
        ("; keep order of all_reduce", False, "all_reduce"),
        ("; keep order of reduce_scatter", False, None),
        ("", True, "neg"),
    ],
)
def test_nothing_is_joined_across_what_is_held_in_order(kept: str, unknown: bool, stands: str | None) -> None:
    """What a line keeps in order, and an operator that nobody knows: here one that sends to another rank."""
    ranks = EveryRank((2,), one_between)
    facts = ranks.facts(0)
    if unknown:
        targets = ["c10d.isend.default" if target == "aten.neg.default" else target for target in facts.targets]
        facts = evolve(facts, targets=targets)
    lines = f"bucket all_gather up to 1 MiB{kept}".replace("; ", "; optional ")
    order = plan(policylang.parse(lines), facts, HALF, ranks=AllAlike()).order
    assert bool(order.edits.done) is (stands is None)
    said = set() if stands is None else {f"{stands} is in between"}
    assert {each.reason for each in order.edits.refused} == said
    assert [each.code for each in order.diagnostics] == (["APL312"] if said else [])
