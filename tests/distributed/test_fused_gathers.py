"""Chains of gathers become one gather: real ranks, every order of a mesh's dimensions, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import policylang
from policylang.backends.records import plan_of
from policylang.graph import marks
from policylang.planning.plan import Plan
from policylang.torch_compat import distributed
from tests.support.chains import NAMES, Chain, chains, gather, gathers, placements_of, shard_of, traced
from tests.support.edited import assert_facts_hold
from tests.support.ranks import run_ranks
from tests.support.versions import needs_groups_in_any_order

FUSE = policylang.parse("fuse all_gather chains")
IF_ANY = policylang.parse("optional fuse all_gather chains")


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[: len(shape)])


def apply(gm: fx.GraphModule, policy: policylang.Policy, mesh: DeviceMesh | None = None) -> Plan:
    policylang.apply(gm, policy, mesh)
    plan = plan_of(gm)
    assert plan is not None
    return plan


def check_fused(gm: fx.GraphModule, shard: Tensor, expected: Tensor, what: str, mesh: DeviceMesh | None = None) -> None:
    """One gather is left, its line stands on it, and it gives the same bits."""
    plan = apply(gm, FUSE, mesh)
    (gather,) = gathers(gm)
    assert gather.meta["custom"][marks.REWRITTEN].endswith(":1"), what
    found = gm(shard)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected), what
    assert_facts_hold(gm, plan, mesh)


def by_hand(rank: int, *shape: int) -> None:
    mesh = mesh_of(*shape)
    shard = shard_of(rank)
    for chain in chains(len(shape)):
        gm = traced(partial(chain, mesh), shard)
        assert len(gathers(gm)) == len(chain.dims)
        check_fused(gm, shard, chain(mesh, shard), f"{chain} of {shape}", mesh)


def by_dtensor(rank: int, *shape: int) -> None:
    mesh = mesh_of(*shape)
    shard = torch.arange(64.0).reshape(8, 8) + 1000 * rank
    for kind in ("one", "both"):

        def whole(shard: Tensor, kind: str = kind) -> Tensor:
            sharded = DTensor.from_local(shard, mesh, placements_of(mesh.ndim, kind), run_check=False)
            return sharded.redistribute(placements=[Replicate()] * mesh.ndim).to_local() + 1

        gm = traced(whole, shard)
        assert len(gathers(gm)) == mesh.ndim
        check_fused(gm, shard, whole(shard), f"{kind} of {shape}")


def on_other_orders(rank: int) -> None:
    """The order of the ranks follows from the groups, whatever mesh they belong to."""
    for ranks in ([[0, 2], [1, 3]], [[3, 1], [2, 0]]):
        mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("dp", "tp"))
        for chain in chains(2):
            gm = traced(partial(chain, mesh), shard_of(rank))
            check_fused(gm, shard_of(rank), chain(mesh, shard_of(rank)), f"{chain} of {ranks}")


def on_no_grid(rank: int) -> None:
    """torch sorts the ranks of each group: of this mesh, two ranks get another order than the other two. No one group
    can serve all four."""
    mesh = DeviceMesh("cpu", torch.tensor([[0, 3], [1, 2]]), mesh_dim_names=("dp", "tp"))
    gm = traced(partial(Chain((1, 0), "direct"), mesh), shard_of(rank))
    plan = apply(gm, FUSE)
    assert len(gathers(gm)) == 2
    (refused,) = plan.edits.refused
    assert "in different orders" in refused.reason


def on_part_of_the_world(rank: int) -> None:
    """A mesh that not every rank belongs to: the others make no group, and none waits for them."""
    mesh = DeviceMesh("cpu", torch.tensor([[1, 3], [5, 7]]), mesh_dim_names=("dp", "tp"))
    if mesh.get_coordinate() is None:
        return
    for chain in chains(2):
        gm = traced(partial(chain, mesh), shard_of(rank))
        check_fused(gm, shard_of(rank), chain(mesh, shard_of(rank)), f"{chain} of part of the world")


def with_a_group_that_is_there(rank: int) -> None:
    """A flattened mesh has a group; where its order is the right one, no other is made."""
    mesh = mesh_of(2, 2)
    mesh._flatten("all")
    before = len(list(distributed.known_groups()))
    outer_first, inner_first = Chain((1, 0), "direct"), Chain((0, 1), "direct")
    for chain, made in ((outer_first, 0), (inner_first, 1), (inner_first, 1)):
        gm = traced(partial(chain, mesh), shard_of(rank))
        check_fused(gm, shard_of(rank), chain(mesh, shard_of(rank)), str(chain))
        assert len(list(distributed.known_groups())) == before + made, chain


def left_alone(rank: int) -> dict[str, str]:
    """Chains that are not one gather. Of each what is said."""
    mesh = mesh_of(2, 2)

    def other_reader(shard: Tensor) -> Tensor:
        half = gather(shard, 0, mesh, 0)
        return gather(half, 0, mesh, 1).sum() + half.sum()

    def computed(shard: Tensor) -> Tensor:
        return gather(gather(shard, 0, mesh, 0) * 2, 0, mesh, 1)

    def cast(shard: Tensor) -> Tensor:
        return gather(gather(shard, 0, mesh, 0).double(), 0, mesh, 1)

    def cut(shard: Tensor) -> Tensor:
        return gather(gather(shard, 0, mesh, 0)[1:], 0, mesh, 1)

    def same_group(shard: Tensor) -> Tensor:
        return gather(gather(shard, 0, mesh, 0), 0, mesh, 0)

    said: dict[str, str] = {}
    cases: tuple[Callable[[Tensor], Tensor], ...] = (other_reader, computed, cast, cut, same_group)
    for case in cases:
        shard = shard_of(rank)
        gm = traced(case, shard)
        names = [node.name for node in gm.graph.nodes]
        plan = apply(gm, IF_ANY)
        assert [node.name for node in gm.graph.nodes] == names, case.__name__
        assert torch.equal(gm(shard), case(shard))
        said[case.__name__] = "; ".join(refused.reason for refused in plan.edits.refused)
    return said


def there_and_back(rank: int) -> None:
    """A rank's own part of what it has gathered is what it had."""
    mesh = mesh_of(2, 2)
    for dim in range(2):

        def own(shard: Tensor, dim: int = dim) -> Tensor:
            shard = shard * 2
            return gather(shard, 0, mesh, dim).chunk(2)[mesh.get_local_rank(dim)] + shard

        def neighbour(shard: Tensor, dim: int = dim) -> Tensor:
            return gather(shard * 2, 0, mesh, dim).chunk(2)[1 - mesh.get_local_rank(dim)] + 1

        for case, left in ((own, 0), (neighbour, 1)):
            gm = traced(case, shard_of(rank))
            gm.graph.eliminate_dead_code()  # pieces that nobody reads, as AOTAutograd removes them
            apply(gm, policylang.parse("optional collapse round_trips"), mesh)
            assert len(gathers(gm)) == left, case.__name__
            assert torch.equal(gm(shard_of(rank)), case(shard_of(rank)))


def only_over_the_named_dimensions(rank: int) -> None:
    mesh = mesh_of(2, 2, 2)
    policy = policylang.parse("optional fuse all_gather chains over dp, tp")
    for dims, left in (((0, 1), 1), ((1, 0), 1), ((1, 2), 2), ((2, 0), 2)):
        chain = Chain(dims, "direct")
        gm = traced(partial(chain, mesh), shard_of(rank))
        apply(gm, policy, mesh)
        assert len(gathers(gm)) == left, dims
        assert torch.equal(gm(shard_of(rank)), chain(mesh, shard_of(rank)))


def four(rank: int) -> dict[str, str]:
    with_a_group_that_is_there(rank)  # while there are no others
    by_hand(rank, 2, 2)
    by_dtensor(rank, 2, 2)
    on_other_orders(rank)
    on_no_grid(rank)
    there_and_back(rank)
    return left_alone(rank)


def eight(rank: int) -> None:
    on_part_of_the_world(rank)
    for shape in ((2, 4), (4, 2), (2, 2, 2)):
        by_hand(rank, *shape)
        by_dtensor(rank, *shape)
    only_over_the_named_dimensions(rank)


@needs_groups_in_any_order
def test_four_ranks() -> None:
    for said in run_ranks(four, 4):
        assert said.pop("same_group").endswith("overlap")
        assert said == {
            "other_reader": "other consumer: sum_2",
            "computed": "",  # no chain at all
            "cast": "dtype changes: _to_copy",
            "cut": "slice_1 keeps a part",
        }


@pytest.mark.slow
@needs_groups_in_any_order
def test_eight_ranks() -> None:
    run_ranks(eight, 8)
