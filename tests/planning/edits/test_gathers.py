"""Which gathers in a row become one, what is left of them, and why others stay as they are."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
from attrs import evolve

import policylang
from policylang.graph.facts import Facts, GraphKind, Mesh
from policylang.planning.edits.edit_planner import SAME_GRAPH
from policylang.planning.graph_edit import Edit
from policylang.planning.planner import plan
from tests.support.edited import AllAlike
from tests.support.lines import ABLE, Line, aten, c10d, mesh_of, planned, reasons
from tests.support.versions import needs_groups_in_any_order

MESH = mesh_of(4, 2)


def only(facts: Facts, text: str = "fuse all_gather chains") -> Edit:
    found = planned(facts, text)
    assert not found.refused
    (edit,) = found.done
    return edit


def operators(edit: Edit) -> list[str]:
    return [node.target.split(".")[1] for node in edit.nodes]


BARE = ["all_gather_into_tensor", "wait_tensor"]


@needs_groups_in_any_order
def test_gathers_right_after_each_other_are_one_gather_of_the_same_shards() -> None:
    edit = only(Line(MESH, (2, 3)).gather("dp").gather("tp").facts())
    assert operators(edit) == BARE
    assert edit.nodes[-1].shape == (16, 3)
    assert edit.replaced == (("wait_tensor_1", "fused_wait_tensor"),)
    assert edit.dead == ("all_gather_into_tensor", "wait_tensor", "all_gather_into_tensor_1", "wait_tensor_1")
    assert (edit.proof.ranks, edit.proof.assumed) == (8, SAME_GRAPH)


@pytest.mark.parametrize(
    ("inner", "outer", "ranks", "sorted_"),
    [("dp", "tp", (0, 2, 4, 6, 1, 3, 5, 7), False), ("tp", "dp", (0, 1, 2, 3, 4, 5, 6, 7), True)],
)
@needs_groups_in_any_order
def test_the_outer_gather_is_the_slow_index(inner: str, outer: str, ranks: tuple[int, ...], sorted_: bool) -> None:
    (group,) = only(Line(MESH, (2, 3)).gather(inner).gather(outer).facts()).groups
    assert (group.ranks, group.sorted, group.dims) == (ranks, sorted_, (outer, inner))
    assert group.everyone == (ranks,)


@needs_groups_in_any_order
def test_three_gathers_on_a_mesh_of_which_they_span_a_part() -> None:
    mesh = mesh_of(2, 2, 2, 3)
    edit = only(Line(mesh, (2, 3), rank=4).gather("cp").gather("dp").gather("tp").facts())
    assert operators(edit) == BARE
    (group,) = edit.groups
    assert group.ranks == (1, 4, 13, 16, 7, 10, 19, 22)  # tp slow, dp, cp fast; ep stays 1
    assert len(group.everyone) == 3
    assert group.ranks in group.everyone


@needs_groups_in_any_order
def test_permutes_that_cancel_leave_nothing() -> None:
    line = Line(MESH, (2, 3)).gather("dp").permute(1, 0).permute(1, 0).gather("tp")
    assert operators(only(line.facts())) == BARE


@needs_groups_in_any_order
def test_gathers_along_different_dimensions_are_one_gather_and_a_view() -> None:
    """The form of DTensor's ``Shard(0)`` twice where the product reads the weight transposed."""
    facts = Line(MESH, (2, 3)).gather("dp").permute(1, 0).gather_along("tp", 1).facts()
    edit = only(facts)
    assert operators(edit) == [*BARE, "permute"]
    assert edit.nodes[-1].stride == (1, 3)
    assert {"clone", "split", "cat"} <= set(edit.dead)
    assert edit.restrided == (("t", (3, 1)),)


@pytest.mark.parametrize("order", [("dp", "tp", "cp"), ("cp", "dp", "tp"), ("tp", "cp", "dp")])
def test_a_weight_cut_along_both_dimensions_needs_one_copy(order: tuple[str, ...]) -> None:
    line = Line(mesh_of(2, 2, 2), (2, 3))
    for place, dim in enumerate(order):
        line.gather_along(dim, place % 2)
    edit = only(line.facts())
    assert operators(edit).count("clone") == 1


@needs_groups_in_any_order
def test_a_reader_that_needs_the_strides_it_was_traced_with_gets_a_copy() -> None:
    line = Line(MESH, (2, 3)).gather("dp").permute(1, 0).gather_along("tp", 1)
    line.call(aten.sin.default)
    edit = only(line.facts())
    assert operators(edit) == [*BARE, "permute", "clone"]
    assert edit.nodes[-1].stride == (16, 1)
    assert not edit.restrided


@needs_groups_in_any_order
def test_views_behind_a_chain_are_followed_up_to_the_product() -> None:
    line = Line(MESH, (2, 3)).gather("dp").permute(1, 0).gather_along("tp", 1)
    line.call(aten.unsqueeze.default, 0).call(aten.permute.default, [0, 2, 1]).call(aten.squeeze.dim, 0)
    edit = only(line.facts())
    assert [name for name, _ in edit.restrided] == ["unsqueeze", "permute_1", "squeeze", "t"]
    assert dict(edit.restrided)["squeeze"] == (3, 1)


@needs_groups_in_any_order
def test_other_spellings_of_split_and_cat() -> None:
    sliced = Line(MESH, (2, 3)).gather("dp").permute(1, 0).contiguous().gather("tp")
    pieces = [sliced.extra(aten.slice.Tensor, sliced.node, 0, start, start + 3) for start in (0, 3)]
    sliced.node = sliced.extra(aten.cat.default, pieces, 1)
    viewed = Line(MESH, (2, 3)).gather("dp").permute(1, 0).contiguous().gather("tp")
    viewed.view(2, 3, 8).permute(1, 0, 2).contiguous().view(3, 16)
    expected = [*BARE, "permute"]
    assert operators(only(sliced.facts())) == expected
    assert operators(only(viewed.facts())) in (expected, [*BARE, "view", "permute"])


# --- what must not be fused ---


def inside_a_forward(line: Line) -> Facts:
    view = line.gather("dp").extra(aten.view.default, line.node, [24], name="view_12")
    return line.gather("tp").facts(view)


def returned(line: Line) -> Facts:
    inner = line.gather("dp").node
    return line.gather("tp").facts(inner, kind=GraphKind.BACKWARD)


def another_dtype(line: Line) -> Facts:
    cast = torch.ops.prims.convert_element_type.default
    return line.gather("dp").call(cast, torch.float16, name="cast").gather("tp").facts()


def a_part(line: Line) -> Facts:
    return line.gather("dp").call(aten.slice.Tensor, 0, 0, 6, name="shorter").gather("tp").facts()


def pieces_in_another_order(line: Line) -> Facts:
    split = line.gather("dp").extra(aten.split.Tensor, line.node, 4)
    pieces = [line.extra(operator.getitem, split, index) for index in (1, 0)]
    line.node = line.extra(aten.cat.default, pieces, 0, name="turned")
    return line.gather("tp").facts()


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (inside_a_forward, "other consumer: view_12"),
        (returned, "other consumer: output"),
        (another_dtype, "dtype changes: cast"),
        (a_part, "shorter keeps a part"),
        (pieces_in_another_order, "turned joins pieces in another order"),
        (lambda line: line.gather("dp").gather("dp").facts(), "groups `dp` and `dp` overlap"),
    ],
)
@needs_groups_in_any_order
def test_what_keeps_two_gathers_apart(between: Callable[[Line], Facts], reason: str) -> None:
    assert reasons(between(Line(MESH, (2, 3)))) == [reason]


@needs_groups_in_any_order
def test_another_reader_in_a_backward_reads_this_ranks_part() -> None:
    line = Line(MESH, (2, 3), rank=5).gather("dp").permute(1, 0)
    other = line.extra(aten.mm.default, line.extra(aten.permute.default, line.node, [1, 0]), line.node)
    edit = only(line.gather_along("tp", 1).facts(other, kind=GraphKind.BACKWARD))
    assert operators(edit) == [*BARE, "permute", "slice", "permute"]
    cut = edit.nodes[3]
    assert (cut.arguments[1:], cut.per_rank) == ((0, 8, 16), True)  # the second of two tp ranks
    assert edit.replaced[1] == ("permute", "fused_permute_1")
    assert edit.before == "permute_1"


@needs_groups_in_any_order
def test_two_gathers_of_one_gathered_value() -> None:
    line = Line(mesh_of(2, 2, 2), (2, 3)).gather("dp")
    inner = line.node
    other = line.extra(c10d.wait_tensor.default, line.extra(c10d.all_gather_into_tensor.default, inner, 2, "cp"))
    found = planned(line.gather("tp").facts(other))
    assert [each.reason for each in found.refused] == [
        "other consumer: all_gather_into_tensor_2",
        "other consumer: all_gather_into_tensor_1",
    ]


@needs_groups_in_any_order
def test_what_fits_of_a_longer_chain_is_fused() -> None:
    found = planned(Line(MESH, (2, 3)).gather("dp").gather("tp").gather("dp").facts())
    assert [edit.collectives for edit in found.done] == [("all_gather_into_tensor", "all_gather_into_tensor_1")]
    (left,) = found.refused
    assert left.reason == "groups `dp`, `tp` and `dp` overlap"
    assert left.collectives[-1] == "all_gather_into_tensor_2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fuse all_gather chains over dp", ["over tp: all_gather_into_tensor_1"]),
        ("fuse all_gather chains over tp", ["over dp: all_gather_into_tensor"]),
    ],
)
@needs_groups_in_any_order
def test_dimensions_that_a_line_leaves_out(text: str, expected: list[str]) -> None:
    facts = Line(MESH, (2, 3)).gather("dp").gather("tp").facts()
    assert reasons(facts, text) == expected
    assert only(facts, "fuse all_gather chains over tp, dp")


def test_dimensions_that_nobody_knows() -> None:
    facts = Line(MESH, (2, 3), known=False).gather("dp").gather("tp").facts()
    assert reasons(facts, "fuse all_gather chains over dp, tp") == ["mesh dimension of group `dp` not known"]


@needs_groups_in_any_order
def test_without_a_mesh_the_groups_of_other_ranks_are_asked_for() -> None:
    facts = Line(MESH, (2, 3), known=False, rank=3).gather("dp").gather("tp").facts()
    assert reasons(facts) == ["groups of other ranks not known"]
    (edit,) = planned(facts, ranks=AllAlike()).done
    assert edit.proof.assumed == ""
    (group,) = edit.groups
    assert (group.ranks, group.everyone) == ((0, 2, 4, 6, 1, 3, 5, 7), ())


def test_an_order_that_torch_would_sort_is_refused_by_name() -> None:
    able = evolve(ABLE, unsorted_groups=False)
    inner_fast = Line(MESH, (2, 3)).gather("dp").gather("tp").facts()
    assert reasons(inner_fast, able=able) == ["rank order 0, 2, 4, 6, 1, 3, … needs `sort_ranks`"]
    of_an_older_torch = evolve(inner_fast, torch_version="2.11.0+cu128")
    assert reasons(of_an_older_torch) == reasons(inner_fast, able=able)
    found = planned(Line(MESH, (2, 3)).gather("tp").gather("dp").facts(), able=able)
    assert len(found.done) == 1


def test_ranks_that_gather_in_different_orders() -> None:
    """torch sorts the ranks of a mesh's groups; on this one, not every rank then gathers in the same order."""
    mesh = Mesh(("dp", "tp"), (2, 2), (0, 3, 1, 2))
    line = Line(mesh, (2, 3))
    line.groups = {name: evolve(group, ranks=tuple(sorted(group.ranks))) for name, group in line.groups.items()}
    assert reasons(line.gather("tp").gather("dp").facts()) == [
        "ranks of groups `tp` and `dp` gather in different orders"
    ]


def test_a_line_that_finds_nothing_is_an_error_and_one_that_is_refused_a_warning() -> None:
    nothing = plan(policylang.parse("fuse all_gather chains"), Line(MESH, (2, 3)).gather("dp").facts(), ABLE)
    (error,) = nothing.diagnostics
    assert (error.code, error.details[0]) == ("APL311", "all_gather: 1 node")
    twice = Line(MESH, (2, 3)).gather("dp").gather("dp").facts()
    (warning,) = plan(policylang.parse("fuse all_gather chains"), twice, ABLE).diagnostics
    assert warning.code == "APL312"
    assert warning.details == ("all_gather_into_tensor → all_gather_into_tensor_1: groups `dp` and `dp` overlap",)
    assert plan(policylang.parse("optional fuse all_gather chains"), twice, ABLE).diagnostics == ()
