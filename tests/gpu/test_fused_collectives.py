"""Chains of gathers on a GPU: over NCCL where there are four GPUs, over gloo where several ranks share one."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import policylang
from tests.support.lines import NAMES, Chain, chains, gathers, shard_of, traced
from tests.support.ranks import run_ranks

FUSE = policylang.parse("fuse all_gather chains")


def can_fuse(chain: Chain) -> bool:
    """Before torch 2.12 the ranks of a group are sorted: only the outer dimension may come last."""
    return "sort_ranks" in inspect.signature(dist.new_group).parameters or list(chain.dims) == sorted(
        chain.dims, reverse=True
    )


def check_chains(rank: int, *shape: int) -> None:
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=NAMES[: len(shape)])
    shard = shard_of(rank).cuda()
    for chain in chains(len(shape)):
        gathered = partial(chain, mesh)
        expected = gathered(shard)
        gm = traced(gathered, shard)
        policylang.apply(gm, FUSE)
        assert len(gathers(gm)) == (1 if can_fuse(chain) else len(chain.dims)), chain
        assert torch.equal(gm(shard), expected), chain


def over_nccl(rank: int, bound: bool, *shape: int) -> None:
    """``bound``: torch was told the device, and would split new groups off the default one."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device if bound else None)
    check_chains(rank, *shape)
    torch.cuda.synchronize()
    dist.barrier()


def over_gloo(rank: int, *shape: int) -> str:
    """Why gloo cannot carry CUDA tensors here; empty where it did."""
    torch.cuda.set_device(0)
    try:
        dist.all_gather_into_tensor(torch.empty(4, device="cuda"), torch.ones(1, device="cuda"))
    except RuntimeError as error:
        return str(error).splitlines()[0]
    check_chains(rank, *shape)
    return ""


@pytest.mark.parametrize("bound", [False, True])
def test_every_order_over_nccl(bound: bool) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("needs four GPUs")
    run_ranks(over_nccl, 4, bound, 2, 2, group=False)


def test_several_ranks_on_one_gpu() -> None:
    reasons = run_ranks(over_gloo, 4, 2, 2)
    if any(reasons):
        pytest.skip(f"gloo: {reasons[0]}")
