"""What ranks say about a graph survives the store, whatever the ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policylang.language.diagnostics import Diagnostic
from policylang.ranks.messages import EndOfComparison, RankKey, from_ranges, ranges

RANKS = st.sets(st.integers(0, 300), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


@given(RANKS)
def test_ranks_are_read_back_as_they_were_written(ranks: tuple[int, ...]) -> None:
    assert from_ranges(ranges(ranks)) == ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [(range(1024), "0-1023"), (range(3, 128, 8), "3-123/8"), ((0, 1), "0,1"), ((0, 1, 2, 9, 20), "0-2,9,20")],
)
def test_regular_ranks_are_short(ranks: range, text: str) -> None:
    assert ranges(tuple(ranks)) == text


KEYS = st.builds(RankKey, RANKS, st.sampled_from(["ab", "cd"]), st.integers(0, 9))


def test_an_end_concerns_those_who_have_not_come_further() -> None:
    end, key = EndOfComparison(Diagnostic("APL605", "stopped"), occasion=2, steps=1), RankKey((0, 1), "ab", 2)
    assert [end.ends(key, step) for step in (1, 2, 3)] == [False, True, True]
    assert end.ends(RankKey((0, 1), "ab", 1), 1)
    assert not end.ends(RankKey((0, 1), "ab", 3), 1)


@given(KEYS, st.integers(0, 300), st.integers(1, 9))
def test_a_key_is_read_off_its_messages(key: RankKey, rank: int, step: int) -> None:
    assert RankKey.of_message(key.message(rank, step)) == key
