"""The harness of the tests in several processes: what it hands back, and what it says when ranks fail, die or hang."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

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
