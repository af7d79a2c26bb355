"""The harness of the tests in several processes, and of threads that play ranks: what it hands back and says."""

import copy
import functools
import os
import signal
import threading
import time
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
from tests.support.ranks import RanksFailed, run_ranks


def total(rank: int, more: int) -> float:
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    return value.item() + more


def all_kinds(rank: int) -> None:
    match rank:
        case 0:
            dist.all_reduce(torch.ones(1))  # waits for ranks that never come
        case 1:
            raise ValueError("rank one is not well")
        case 2:
            os.kill(os.getpid(), signal.SIGKILL)


def sleeper(rank: int) -> None:
    if rank == 1:
        time.sleep(60)


def aborts(rank: int) -> None:
    os.abort()


def leaves(rank: int) -> int:
    if rank == 1:
        os._exit(0)
    return rank


def test_what_the_ranks_return_comes_back_in_order() -> None:
    assert run_ranks(total, 4, 10) == [16.0] * 4


def test_every_rank_says_what_became_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.ranks.GRACE", 1.0)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(all_kinds, 3)
    message = str(caught.value)
    assert "rank 1 failed" in message
    assert "ValueError: rank one is not well" in message
    assert "rank 2 ended without a word: signal SIGKILL" in message
    assert "rank 0 hung" in message or "rank 0 failed" in message  # gloo may notice that its peer is gone


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_with_its_stack() -> None:
    run_ranks(total, 2, 0)  # the server has imported torch
    with pytest.raises(RanksFailed, match=r"rank 1 hung(?s:.*)in sleeper") as caught:
        run_ranks(sleeper, 2, timeout=3)
    assert "rank 0" not in str(caught.value)


def test_a_rank_that_aborts_leaves_its_stack() -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 ended without a word: signal SIGABRT(?s:.*)in aborts"):
        run_ranks(aborts, 1)


def test_a_rank_may_be_meant_to_go() -> None:
    assert run_ranks(leaves, 2, gone=[1]) == [0, None]
    with pytest.raises(RanksFailed, match="rank 0 was to end without a word, and returned"):
        run_ranks(leaves, 2, gone=[0, 1])


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
