"""Process groups in a given rank order: made once, found again, called the same by every member."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from policylang.backends import runtime
from policylang.backends.runtime import RankOrder
from policylang.torch_compat import distributed
from policylang.torch_compat.graphs import group_ranks
from tests.support.ranks import run_ranks
from tests.support.sharded import fake_ranks

c10d = torch.ops._c10d_functional


def gathered(order: RankOrder, value: int) -> list[int]:
    shard = torch.full((1,), value)
    whole: Tensor = c10d.wait_tensor(c10d.all_gather_into_tensor(shard, len(order.ranks), order.name))
    return whole.tolist()


def own(rank: int, orders: list[tuple[int, ...]]) -> list[RankOrder]:
    return [RankOrder(ranks, "gloo") for ranks in orders if rank in ranks]


def check_groups(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    flat = mesh._flatten("all")
    flat_name = flat.get_group().group_name
    if rank < 3:
        dist.new_group([0, 1, 2], use_local_synchronization=True)  # ranks need not be in equally many groups
    column_major = (0, 4, 1, 5, 2, 6, 3, 7)
    pairs = [(4, 0), (5, 1), (6, 2), (7, 3)]
    overlapping = [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 5), (7, 6)]
    made = own(rank, [column_major, *pairs, *overlapping])
    before = len(list(distributed.known_groups()))
    runtime.ensure_groups(made if rank % 2 else reversed(made))
    assert len(list(distributed.known_groups())) == before + len(made)
    runtime.ensure_groups(made)
    assert len(list(distributed.known_groups())) == before + len(made), "each is made once"
    for order in made:
        assert gathered(order, rank) == list(order.ranks), "the rank order is the order of the gathered values"
    row_major = RankOrder(tuple(range(8)), "gloo")
    runtime.ensure_groups([row_major])
    assert len(list(distributed.known_groups())) == before + len(made), "the flattened mesh's group serves"
    assert group_ranks(row_major.name) == group_ranks(flat_name)
    assert gathered(row_major, rank) == list(range(8))
    dist.destroy_process_group(dist.distributed_c10d._resolve_process_group(made[0].name))
    dist.barrier()
    return [order.name for order in made]


def test_every_member_finds_or_makes_the_same_groups() -> None:
    names = run_ranks(check_groups, 8)
    assert len({name[0] for name in names}) == 1
    assert names[0][1] == names[4][1] != names[1][1]


@pytest.mark.parametrize("world", [128, 16])
def test_groups_of_pretended_ranks_end_with_the_default_group(world: int) -> None:
    order = RankOrder(tuple(range(0, world, 8)) + tuple(range(1, world, 8)), "fake")
    for _ in range(2):
        with fake_ranks(world):
            assert group_ranks(order.name) == ()
            runtime.ensure_groups([order])
            assert group_ranks(order.name) == order.ranks
            assert dist.get_rank() == 0
    assert group_ranks(order.name) == ()


def test_a_group_that_was_destroyed_is_made_again() -> None:
    order = RankOrder((3, 0, 1, 2), "fake")
    with fake_ranks(4):
        runtime.ensure_groups([order])
        dist.destroy_process_group(dist.distributed_c10d._resolve_process_group(order.name))
        runtime.ensure_groups([order])
        assert group_ranks(order.name) == order.ranks


def test_a_group_of_another_backend_does_not_serve() -> None:
    """A gloo group of the same ranks carries no CUDA tensors."""
    with fake_ranks(4):
        (whole,) = distributed.known_groups()
        other = RankOrder(whole.ranks, "gloo")
        assert other.name != RankOrder(whole.ranks, "fake").name
        assert distributed.group_backend(whole.name) == "fake"


def test_orders_survive_a_record() -> None:
    orders = (RankOrder((0, 4, 1, 5), "nccl"), RankOrder((0, 1), "cpu:gloo,cuda:nccl"))
    assert runtime.groups_from_json(runtime.groups_to_json(orders)) == tuple(sorted(orders))
    with fake_ranks(4):
        assert runtime.are_joined([RankOrder((1, 0), "fake")])
        assert not runtime.are_joined([RankOrder((1, 2), "fake")])
    assert not runtime.are_joined(orders)
    assert runtime.are_joined([])
