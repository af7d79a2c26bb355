"""A row of numbers to stretches of which something is added, and of stretches of which the most is asked."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST = -(1 << 62)


class RangeMaximum:
    """Both in O(log length); a binary tree over the row, whose nodes keep what is added to all below them."""

    def __init__(self, values: Sequence[int]) -> None:
        self._size = 1 << (len(values) + 1).bit_length()
        self._most = [_LEAST] * (2 * self._size)
        self._added = [0] * (2 * self._size)
        most, size = self._most, self._size
        most[size + 1 : size + 1 + len(values)] = values  # a leaf is free at either end
        for at in range(size - 1, 0, -1):
            left, right = most[2 * at], most[2 * at + 1]
            most[at] = left if left > right else right

    def add(self, start: int, end: int, amount: int) -> None:
        """To each number of ``[start, end)``."""
        if start >= end or not amount:
            return
        most, added = self._most, self._added
        low, high = start + self._size, end + self._size + 1
        while low ^ high ^ 1:
            if not low & 1:
                most[low ^ 1] += amount
                added[low ^ 1] += amount
            if high & 1:
                most[high ^ 1] += amount
                added[high ^ 1] += amount
            low >>= 1
            high >>= 1
            left, right = most[2 * low], most[2 * low + 1]
            most[low] = (left if left > right else right) + added[low]
            left, right = most[2 * high], most[2 * high + 1]
            most[high] = (left if left > right else right) + added[high]
        low >>= 1
        while low:
            left, right = most[2 * low], most[2 * low + 1]
            most[low] = (left if left > right else right) + added[low]
            low >>= 1

    def most(self, start: int, end: int) -> int:
        """The most of ``[start, end)``; far below zero where there is none."""
        if start >= end:
            return _LEAST
        most, added = self._most, self._added
        low, high = start + self._size, end + self._size + 1
        left = right = _LEAST
        while low ^ high ^ 1:
            if not low & 1 and most[low ^ 1] > left:
                left = most[low ^ 1]
            if high & 1 and most[high ^ 1] > right:
                right = most[high ^ 1]
            low >>= 1
            high >>= 1
            left += added[low]
            right += added[high]
        found = left if left > right else right
        low >>= 1
        while low:
            found += added[low]
            low >>= 1
        return found

    def leave_out(self, at: int) -> None:
        """The number at a place counts for nothing."""
        self.add(at, at + 1, _LEAST)

    def put_back(self, at: int) -> None:
        """It counts again."""
        self.add(at, at + 1, -_LEAST)
