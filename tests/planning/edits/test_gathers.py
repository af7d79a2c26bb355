"""``fuse`` and ``collapse``: which gathers and scatters become one, what is left, and why others stay."""

import operator
from collections.abc import Callable, Iterator
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives as functional
from attrs import evolve
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import policylang
from policylang.backends import path
from policylang.backends.applied_plans import plan_of
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind, Mesh
from policylang.planning.capabilities import HALF
from policylang.planning.edits.edit_planner import SAME_GRAPH
from policylang.planning.graph_edit import Edit
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.support.edited import AllAlike, assert_facts_hold
from tests.support.lines import ABLE, Line, aten, c10d, mesh_of, planned, reasons
from tests.support.sharded import ALL_GATHER, REDUCE_SCATTER, fake_ranks
from tests.support.shared_graphs import BACKWARD, JOINT, shared_facts
from tests.support.versions import needs_groups_in_any_order, needs_traced_meshes

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
    (reason,) = reasons(line.gather("tp").gather("dp").facts())
    assert reason == "ranks of groups `tp` and `dp` gather in different orders"


def test_a_line_that_finds_nothing_is_an_error_and_one_that_is_refused_a_warning() -> None:
    nothing = plan(policylang.parse("fuse all_gather chains"), Line(MESH, (2, 3)).gather("dp").facts(), ABLE)
    (error,) = nothing.diagnostics
    assert (error.code, error.details[0]) == ("APL311", "all_gather: 1 node")
    twice = Line(MESH, (2, 3)).gather("dp").gather("dp").facts()
    (warning,) = plan(policylang.parse("fuse all_gather chains"), twice, ABLE).diagnostics
    assert warning.code == "APL312"
    assert warning.details == ("all_gather_into_tensor → all_gather_into_tensor_1: groups `dp` and `dp` overlap",)
    assert plan(policylang.parse("optional fuse all_gather chains"), twice, ABLE).diagnostics == ()


FUSE = "optional fuse reduce_scatter chains"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_ranks(8):
        yield init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))


def scattered(value: Tensor, mesh: DeviceMesh, op: str = "sum") -> Tensor:
    return functional.wait_tensor(REDUCE_SCATTER(value, op, mesh.size(), mesh.get_group().group_name))


def planned_scatters(function: Callable[[Tensor], Tensor], text: str = FUSE) -> Plan:
    gm = make_fx(function)(torch.ones(16, 4))
    gm.graph.eliminate_dead_code()
    gm.recompile()
    policylang.apply(gm, policylang.parse(text))
    made = plan_of(gm)
    assert_facts_hold(gm, made)
    return made


@pytest.mark.parametrize("order", ["dp tp", "tp dp", "pp dp tp", "tp dp pp", "dp pp tp"])
@pytest.mark.parametrize("op", ["sum", "avg"])
@needs_traced_meshes
def test_the_first_scatter_is_slowest(mesh: DeviceMesh, order: str, op: str) -> None:
    def chain(value: Tensor) -> Tensor:
        for name in order.split():
            value = scattered(value, mesh[name], op)
        return value.sin()

    (edit,) = planned_scatters(chain).edits.done
    weights = {"pp": 4, "dp": 2, "tp": 1}
    ranks = [0]
    for name in order.split():
        ranks = [rank + place * weights[name] for rank in ranks for place in range(2)]
    (group,) = edit.groups
    assert list(group.ranks) == ranks
    assert edit.nodes[0].arguments[1:3] == (op, len(ranks))
    assert edit.proof.ranks == len(ranks)
    assert not edit.proof.exact


@needs_traced_meshes
def test_views_between_that_cancel_are_no_obstacle(mesh: DeviceMesh) -> None:
    made = planned_scatters(
        lambda value: scattered(scattered(value, mesh["dp"]).t().t().view(4, 8).view(8, 4), mesh["tp"]).sin()
    )
    assert list(made.facts.targets)[1:3] == [
        "_c10d_functional.reduce_scatter_tensor.default",
        "_c10d_functional.wait_tensor.default",
    ]


@needs_traced_meshes
def test_candidates_that_are_left_say_why(mesh: DeviceMesh) -> None:
    dp, tp = mesh["dp"], mesh["tp"]

    def read_twice(value: Tensor) -> Tensor:
        half = scattered(value, dp)
        return scattered(half, tp).sum() + half.sum()

    def other_dimension(value: Tensor) -> Tensor:
        half = scattered(value, dp)
        return scattered(torch.cat(half.split(2, 1)), tp).sin()

    cases: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (read_twice, "other consumer: sum_"),
        (other_dimension, "scatters several dimensions"),
        (lambda value: scattered(scattered(value, dp), tp, "avg").sin(), "reduces with sum, then with avg"),
        (lambda value: scattered(scattered(value, dp, "max"), tp, "max").sin(), "reduces with max"),
        (lambda value: scattered(scattered(value, dp).double(), tp).sin(), "dtype changes: _to_copy"),
        (lambda value: scattered(scattered(value, dp), dp).sin(), "groups "),
    ]
    for function, reason in cases:
        made = planned_scatters(function)
        assert not made.edits.done
        (refused,) = made.edits.refused
        assert refused.reason.startswith(reason), refused


@needs_traced_meshes
def test_over_names_the_dimensions(mesh: DeviceMesh) -> None:
    def chain(value: Tensor) -> Tensor:
        return scattered(scattered(value, mesh["dp"]), mesh["tp"]).sin()

    assert planned_scatters(chain, "fuse reduce_scatter chains over dp, tp").edits.done
    made = planned_scatters(chain, "optional fuse reduce_scatter chains over pp, tp")
    assert [refused.reason for refused in made.edits.refused] == ["over dp: reduce_scatter_tensor"]


@needs_traced_meshes
def test_a_torch_that_sorts_ranks_is_refused_the_order_that_it_would_lose(mesh: DeviceMesh) -> None:
    gm = make_fx(lambda value: scattered(scattered(value, mesh["tp"]), mesh["dp"]).sin())(torch.ones(16, 4))
    older = evolve(HALF, unsorted_groups=False)
    made = plan(policylang.parse(FUSE), collect(gm), older)
    assert [refused.reason for refused in made.edits.refused] == ["rank order 0, 2, 1, 3 needs `sort_ranks`"]


ROWS, COLUMNS = 4, 6


class Ranks:
    """One process that believes it is some rank of eight, on a mesh of 2 × 4."""

    def __init__(self, rank: int) -> None:
        import torch.distributed as dist

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        self.mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        self.place = {name: self.mesh.get_local_rank(name) for name in ("dp", "tp")}

    def gathered(self, value: Tensor, dim: int, name: str) -> Tensor:
        mesh: DeviceMesh = self.mesh[name]
        return functional.wait_tensor(functional.all_gather_tensor(value, dim, mesh))

    def planned(self, function: Callable[[Tensor], Tensor], *, as_traced: bool = False) -> Plan:
        gm = traced(function, as_traced)
        with mock.patch.object(path, "ranks_of", return_value=AllAlike()):
            policylang.apply(gm, policylang.parse("optional collapse round_trips"))
        made = plan_of(gm)
        assert_facts_hold(gm, made)
        return made


def traced(function: Callable[[Tensor], Tensor], as_traced: bool = False) -> fx.GraphModule:
    gm = make_fx(function)(torch.ones(ROWS, COLUMNS))
    if not as_traced:
        gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


@pytest.fixture
def at_rank():
    import torch.distributed as dist

    def start(rank: int) -> Ranks:
        if dist.is_initialized():
            dist.destroy_process_group()
        return Ranks(rank)

    yield start
    dist.destroy_process_group()


def own_piece(ranks: Ranks, dim: int, value: Tensor) -> Tensor:
    return ranks.gathered(value, dim, "tp").chunk(4, dim)[ranks.place["tp"]].sin()


def half_of(place: int, value: Tensor) -> Tensor:
    return value.chunk(2)[place].sin()


def first_rows(ranks: Ranks, value: Tensor) -> Tensor:
    return ranks.gathered(value, 0, "tp")[:ROWS].sin()


@pytest.mark.parametrize(("dim", "as_traced"), [(0, False), (1, False), (1, True)])
@needs_traced_meshes
def test_every_rank_finds_its_own_part_and_all_plans_are_one(at_rank, dim: int, as_traced: bool) -> None:
    """As traced, there are parts that nobody reads, which go with the rest."""
    digests = set()
    for rank in range(8):
        ranks = at_rank(rank)
        made = ranks.planned(partial(own_piece, ranks, dim), as_traced=as_traced)
        (edit,) = made.edits.done
        assert edit.sources == ("arg0_1",)
        assert list(made.facts.names) == ["arg0_1", "sin", "output"]
        assert (edit.proof.ranks, edit.proof.assumed) == (4, "")
        assert not made.edits.refused
        digests.add(made.digest)
    assert len(digests) == 1


def test_parts_that_are_read_by_nobody_leave_ranks_alike_where_nothing_is_rewritten(at_rank) -> None:
    digests = set()
    for rank in range(0, 8, 3):
        ranks = at_rank(rank)
        digests.add(ranks.planned(partial(half_of, ranks.place["tp"] % 2), as_traced=True).digest)
    assert len(digests) == 1


def reasons_of(made: Plan) -> list[str]:
    assert not made.edits.done
    return [refused.reason for refused in made.edits.refused]


@needs_traced_meshes
def test_a_broadcast_of_the_first_part_looks_like_a_round_trip_on_the_first_rank_alone(at_rank) -> None:
    """So nothing is done where the others cannot be asked: plans are then the same."""
    for rank in (0, 1):
        ranks = at_rank(rank)
        made = ranks.planned(partial(first_rows, ranks))
        if rank:
            assert reasons_of(made) == ["not this rank's own part of wait_tensor_1"]
        else:
            assert len(made.edits.done) == 1
        gm = traced(partial(first_rows, ranks))
        policylang.apply(gm, policylang.parse("optional collapse round_trips"))
        assert len(gm.graph.find_nodes(op="call_function", target=ALL_GATHER)) == 1
        said = "not this rank's own part of wait_tensor_1" if rank else "other ranks cannot be asked"
        assert f"left: all_gather_into_tensor: {said}" in str(policylang.report(gm))


@needs_traced_meshes
def test_what_lies_between_is_done_to_the_part(at_rank) -> None:
    ranks = at_rank(5)
    at = ranks.place["tp"]
    made = ranks.planned(lambda value: ranks.gathered(value, 0, "tp").t()[:, at * ROWS : (at + 1) * ROWS].sin())
    (edit,) = made.edits.done
    (node,) = edit.nodes
    assert (node.target, node.shape, node.stride) == ("aten.permute.default", (COLUMNS, ROWS), (1, COLUMNS))


@needs_traced_meshes
def test_a_gather_with_other_readers_stays(at_rank) -> None:
    ranks = at_rank(3)

    def both(value: Tensor) -> Tensor:
        whole = ranks.gathered(value, 0, "tp")
        return whole.sum() + whole.narrow(0, ranks.place["tp"] * ROWS, ROWS).sin()

    (edit,) = ranks.planned(both).edits.done
    assert edit.dead == ("slice_1",)
    assert edit.note == "all_gather_into_tensor has other readers"


@needs_traced_meshes
def test_back_to_a_value_on_the_way(at_rank) -> None:
    ranks = at_rank(6)
    made = ranks.planned(
        lambda value: ranks.gathered(ranks.gathered(value, 0, "dp"), 0, "tp").chunk(4)[ranks.place["tp"]].sin()
    )
    (edit,) = made.edits.done
    assert edit.collectives == ("all_gather_into_tensor_1",)
    assert edit.sources == ("wait_tensor_1",)


@pytest.mark.parametrize("rank", [0, 5])
@needs_traced_meshes
def test_round_trips_that_are_left_say_why(at_rank, rank: int) -> None:
    ranks = at_rank(rank)
    at = ranks.place["tp"]

    def whole(value: Tensor) -> Tensor:
        return ranks.gathered(value, 0, "tp")

    def several(value: Tensor) -> Tensor:
        pieces = whole(value).chunk(4)
        return pieces[at].sin() + pieces[(at + 1) % 4]

    cases: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (lambda value: whole(value)[:, :3].sin(), "cuts dimension 1 of wait_tensor_1 within a shard"),
        (lambda value: whole(value).chunk(2)[at // 2].sin(), "keeps shards of other ranks: all_gather_into_tensor"),
        (lambda value: whole(value).chunk(4)[at], "returned: "),
        (lambda value: whole(value).chunk(4)[at].add_(1).sin(), "memory is written: add_"),
        (several, "parts of other ranks are read too"),
    ]
    for function, reason in cases:
        found = reasons_of(ranks.planned(function))
        assert found
        assert all(each.startswith(reason) for each in found), found


@needs_traced_meshes
def test_what_was_computed_on_is_no_candidate(at_rank) -> None:
    ranks = at_rank(0)
    assert reasons_of(ranks.planned(lambda value: (ranks.gathered(value, 0, "tp") * 2).chunk(4)[0].sin())) == []


@needs_traced_meshes
def test_without_a_rank_nothing_is_collapsed(at_rank) -> None:
    ranks = at_rank(2)
    gm = make_fx(lambda value: ranks.gathered(value, 0, "tp").chunk(4)[2].sin())(torch.ones(ROWS, COLUMNS))
    gm.graph.eliminate_dead_code()
    facts = evolve(collect(gm), rank=None)
    made = plan(policylang.parse("optional collapse round_trips"), facts, HALF)
    assert reasons_of(made) == ["not known which rank's graph it is"]


@pytest.mark.parametrize(
    ("name", "left"),
    [
        pytest.param(JOINT, [f"all_gather_into_tensor_{number}" for number in (343, 345, 346)], marks=pytest.mark.slow),
        (BACKWARD, ["all_gather_into_tensor_345"]),
    ],
)
def test_the_recorded_step_has_no_round_trip(name: str, left: list[str]) -> None:
    """Its hidden states stay sharded along the sequence from block to block. What is gathered from all 128 ranks and
    cut by tensor-parallel rank keeps the shards of 16."""
    made = plan(policylang.parse("optional collapse round_trips"), shared_facts(name, True), HALF)
    assert reasons_of(made) == [f"keeps shards of other ranks: {gather}" for gather in left]


def test_the_recorded_step_has_no_scatters_in_a_row() -> None:
    made = plan(policylang.parse("optional fuse reduce_scatter chains"), shared_facts(BACKWARD, True), HALF)
    assert not made.edits.done
    assert not made.edits.refused
