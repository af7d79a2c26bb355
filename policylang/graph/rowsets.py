"""Sets of nodes as sorted lists of rows, and the few operations on them.

A list shares the ``int`` objects of the facts, so a set costs eight bytes a member; membership is tested on a mask of
one byte a row, which keeps every operation linear and free of hash order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain


def mask_of(rows: Iterable[int], length: int) -> bytearray:
    """One byte a row of the graph, 1 for the members."""
    mask = bytearray(length)
    for row in rows:
        mask[row] = 1
    return mask


def members(mask: bytearray, universe: Sequence[int]) -> list[int]:
    """The rows of ``universe`` that the mask holds, in its order."""
    return [row for row in universe if mask[row]]


def union(parts: Sequence[list[int]], universe: Sequence[int], length: int) -> list[int]:
    nonempty = [part for part in parts if part]
    if len(nonempty) <= 1:
        return nonempty[0] if nonempty else []
    return members(mask_of(chain.from_iterable(nonempty), length), universe)


def intersection(left: list[int], right: list[int], length: int) -> list[int]:
    mask = mask_of(right, length)
    return [row for row in left if mask[row]]


def difference(left: list[int], right: list[int], length: int) -> list[int]:
    mask = mask_of(right, length)
    return [row for row in left if not mask[row]]
