"""How ranks are written, and what is read from a store that others can write to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policylang.ranks.rank_account import (
    Absence,
    EndOfComparison,
    MeetingKey,
    RankMessage,
    RankStatus,
    pack,
    ranges,
    unpack,
)

RANKS = st.sets(st.integers(0, 300), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
KEY = MeetingKey("ab", "tp", (0, 1), 2)
ABSENCE = Absence("x.1", 1, "ab", 3, "", "says \ud800 `it`")


@given(RANKS, RANKS)
def test_other_ranks_are_written_otherwise(ranks: tuple[int, ...], others: tuple[int, ...]) -> None:
    assert (ranges(ranks) == ranges(others)) == (ranks == others)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [(range(1024), "0-1023"), (range(3, 128, 8), "3-123/8"), ((0, 1), "0,1"), ((0, 1, 2, 9, 20), "0-2,9,20")],
)
def test_regular_ranks_are_short(ranks: range, text: str) -> None:
    assert ranges(tuple(ranks)) == text


@pytest.mark.parametrize(
    "value",
    [
        RankMessage(0, "plan", "00", (KEY,), absences=(ABSENCE,)),
        RankStatus("waiting", "a graph", (ABSENCE,), (KEY,), KEY.message(0, 1)),
        EndOfComparison("APL601", "so", None, ("a", "b"), {"digest": 3}, keys=(KEY,)),
    ],
)
def test_what_is_written_is_read(value: object) -> None:
    assert unpack(type(value), pack(value)) == value


@pytest.mark.parametrize("text", ["", "gAOVCg==", "null", "[]", "[" * 100_000, '["0"]', pack(KEY), b"\xff\xfe"])
def test_what_nobody_has_written_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # whatever it says: the store names the place
        unpack(RankMessage, text)
