"""torch's own group of threads, in which its tests play ranks: each thread is a rank, with a world of its own."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import multi_threaded_pg

import policylang
from tests.support.eager import backward_of, differences, train
from tests.support.rank_cases import Net, Plain, batch

WORLD = 2
Rank = Callable[[int], str]
POLICIES = ("save", "recompute")
BUILT = threading.Lock()


@pytest.fixture
def world() -> Iterator[Callable[[Rank], list[str]]]:
    """Runs a function as each rank; what each of them returned."""
    multi_threaded_pg._install_threaded_pg()
    _set_thread_isolation_mode(True)

    def run(function: Rank) -> list[str]:
        store, found = dist.HashStore(), [""] * WORLD

        def rank_in_a_thread(rank: int) -> None:
            dist.init_process_group("threaded", rank=rank, world_size=WORLD, store=store)
            try:
                found[rank] = function(rank)
            except BaseException as error:
                found[rank] = f"{type(error).__name__}: {error}"
                multi_threaded_pg.ProcessLocalGroup.exception_handle(error)

        threads = [threading.Thread(target=rank_in_a_thread, args=(rank,), daemon=True) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), f"hangs after {found}"
        return found

    try:
        yield run
    finally:
        _set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
        multi_threaded_pg.ProcessLocalGroup.reset()


@functools.cache
def start() -> nn.Module:
    """Built once: all threads draw from one generator, which training seeds."""
    return Plain()


def sharded(policy: str = "") -> nn.Module:
    with BUILT:
        model = copy.deepcopy(start())
    if policy:
        policylang.checkpoint_model(model, policylang.parse(policy))
    for layer in model.layers:
        fully_shard(layer.up)
        fully_shard(layer.down)
    return fully_shard(model)


def trains(_rank: int) -> str:
    run = backward_of(lambda model, rows: model(batch(rows + 2)).square().mean())
    plain, ours = sharded(), sharded("recompute everything in block\nsave matmul in block\n")
    return "; ".join(each for each in differences(train(plain, run), train(ours, run)) if "generator" not in each)


def differs(rank: int) -> str:
    model = policylang.checkpoint_model(Net([dist.group.WORLD]), policylang.parse(f"undecided -> {POLICIES[rank]}\n"))
    with pytest.raises(policylang.PolicyError) as told:
        model(batch()).sum().backward()
    return told.value.diagnostics[0].code


@pytest.mark.parametrize(("function", "found"), [(trains, ["", ""]), (differs, ["APL601", "APL601"])])
def test_each_thread_is_a_rank(world: Callable[[Rank], list[str]], function: Rank, found: list[str]) -> None:
    torch.manual_seed(0)
    for _ in range(2):  # another world, with another store
        assert world(function) == found
