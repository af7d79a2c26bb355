"""How ranks are written, and whom the end of a comparison concerns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policylang.language.diagnostics import Diagnostic
from policylang.ranks.messages import EndOfComparison, RankKey, ranges

RANKS = st.sets(st.integers(0, 300), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


@given(RANKS, RANKS)
def test_other_ranks_are_written_otherwise(ranks: tuple[int, ...], others: tuple[int, ...]) -> None:
    assert (ranges(ranks) == ranges(others)) == (ranks == others)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [(range(1024), "0-1023"), (range(3, 128, 8), "3-123/8"), ((0, 1), "0,1"), ((0, 1, 2, 9, 20), "0-2,9,20")],
)
def test_regular_ranks_are_short(ranks: range, text: str) -> None:
    assert ranges(tuple(ranks)) == text


def test_an_end_concerns_those_who_have_not_come_further() -> None:
    end, key = EndOfComparison(Diagnostic("APL605", "stopped"), occasion=2, steps=1), RankKey((0, 1), "ab", 2)
    assert [end.ends(key, step) for step in (1, 2, 3)] == [False, True, True]
    assert end.ends(RankKey((0, 1), "ab", 1), 1)
    assert not end.ends(RankKey((0, 1), "ab", 3), 1)
