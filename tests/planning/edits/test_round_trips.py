"""``collapse round_trips`` as it is planned: on every rank of a mesh, on graphs that must stay as they are, and on
recorded ones."""

from __future__ import annotations

from collections.abc import Callable
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
from policylang.backends.records import plan_of
from policylang.graph.collect import collect
from policylang.planning.capabilities import HALF
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.support.edited import AllAlike, assert_facts_hold
from tests.support.sharded import ALL_GATHER
from tests.support.shared_graphs import BACKWARD, JOINT, shared_facts
from tests.support.versions import needs_traced_meshes

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
        assert made is not None
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


def reasons(made: Plan) -> list[str]:
    assert not made.edits.done
    return [refused.reason for refused in made.edits.refused]


@needs_traced_meshes
def test_a_broadcast_of_the_first_part_looks_like_a_round_trip_on_the_first_rank_alone(at_rank) -> None:
    """So nothing is done where the others cannot be asked: plans are then the same."""
    for rank in (0, 1):
        ranks = at_rank(rank)
        made = ranks.planned(partial(first_rows, ranks))
        if rank:
            assert reasons(made) == ["not this rank's own part of wait_tensor_1"]
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
    assert [(node.target, node.shape, node.stride) for node in edit.nodes] == [
        ("aten.permute.default", (COLUMNS, ROWS), (1, COLUMNS))
    ]


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
def test_candidates_that_are_left_say_why(at_rank, rank: int) -> None:
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
        found = reasons(ranks.planned(function))
        assert found
        assert all(each.startswith(reason) for each in found), found


@needs_traced_meshes
def test_what_was_computed_on_is_no_candidate(at_rank) -> None:
    ranks = at_rank(0)
    assert reasons(ranks.planned(lambda value: (ranks.gathered(value, 0, "tp") * 2).chunk(4)[0].sin())) == []


@needs_traced_meshes
def test_without_a_rank_nothing_is_collapsed(at_rank) -> None:
    ranks = at_rank(2)
    gm = make_fx(lambda value: ranks.gathered(value, 0, "tp").chunk(4)[2].sin())(torch.ones(ROWS, COLUMNS))
    gm.graph.eliminate_dead_code()
    facts = evolve(collect(gm), rank=None)
    made = plan(policylang.parse("optional collapse round_trips"), facts, HALF)
    assert reasons(made) == ["not known which rank's graph it is"]


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
    assert reasons(made) == [f"keeps shards of other ranks: {gather}" for gather in left]


def test_the_recorded_step_has_no_scatters_in_a_row() -> None:
    made = plan(policylang.parse("optional fuse reduce_scatter chains"), shared_facts(BACKWARD, True), HALF)
    assert not made.edits.done
    assert not made.edits.refused
