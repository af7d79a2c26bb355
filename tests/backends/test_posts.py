"""What ranks post about a graph survives the store, whatever the ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policylang.backends.posts import Entry, Key, spell, unspell

RANKS = st.sets(st.integers(0, 300), min_size=1).map(lambda ranks: tuple(sorted(ranks)))


@given(RANKS)
def test_ranks_are_read_back_as_they_were_written(ranks: tuple[int, ...]) -> None:
    assert unspell(spell(ranks)) == ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [(range(1024), "0-1023"), (range(3, 128, 8), "3-123/8"), ((0, 1), "0,1"), ((0, 1, 2, 9, 20), "0-2,9,20")],
)
def test_regular_ranks_are_short(ranks: range, text: str) -> None:
    assert spell(tuple(ranks)) == text


@given(st.lists(st.tuples(RANKS, st.integers(0, 9)), max_size=3), st.text())
def test_an_entry_is_read_back_as_it_was_posted(keys: list[tuple[tuple[int, ...], int]], error: str) -> None:
    entry = Entry(3, "ab", tuple(Key(*key) for key in keys), "a joint graph of 8 nodes", error)
    assert Entry.from_json(entry.to_json()) == entry
