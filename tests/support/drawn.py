"""How many examples hypothesis draws: few where a change waits for the verdict, many in a search for new ones."""

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def slow(*values: Any) -> Any:
    """The values of a parametrized test that only the nightly run takes."""
    return pytest.param(*values, marks=pytest.mark.slow)


def crossed(first: Iterable[Any], second: Iterable[Any], *, each: int = 1) -> list[Any]:
    """Every one of the first with every one of the second, for two parameters; in the fast suite with ``each`` of them,
    in turns, so that all of either come."""
    rows, columns = list(first), list(second)
    return [
        (one, other) if (at - place) % len(columns) < each else slow(one, other)
        for at, one in enumerate(rows)
        for place, other in enumerate(columns)
    ]


SEARCHES = os.environ.get("HYPOTHESIS_PROFILE", "same") != "same"
"""Whether this run draws new examples."""


def drawn(quick: int, searched: int, *strategies: st.SearchStrategy[Any], **named: st.SearchStrategy[Any]) -> Any:
    """Has a test run on ``examples(quick, searched)`` that hypothesis draws, each of one value a strategy."""
    return lambda test: settings(max_examples=examples(quick, searched))(given(*strategies, **named)(test))


def examples(quick: int, searched: int) -> int:
    """``quick`` in the suite that decides whether a change goes in, where the examples are the same each time."""
    return searched if SEARCHES else quick
