"""What time costs in memory, and memory in time; and when two times are the same."""

from __future__ import annotations

from math import isclose

GIB = 2**30

_SAME = 1e-12
"""Of two sums of thousands of times, the share that is rounding."""


def same_time(one: float, other: float) -> bool:
    """Whether two sums of times, in seconds, are the same but for their rounding."""
    return isclose(one, other, rel_tol=_SAME)


def time_difference(one: float, other: float) -> float:
    """Seconds, exactly 0 where the two are the same but for their rounding."""
    return 0.0 if same_time(one, other) else one - other


def a_gib(amount: float, size: int) -> float:
    """Of an amount for so many bytes, what a GiB is."""
    return abs(amount) / (abs(size) / GIB)
