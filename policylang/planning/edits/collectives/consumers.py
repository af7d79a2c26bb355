"""Consumers of a value whose strides an edit changes: which of them may read the new layout, and which may not.

The operators after a chain were traced with the strides that its result had. A permuted view in its place holds the
same elements elsewhere. Layout operators hand the new strides on, which is followed; matrix products take any strides
and return fresh memory, so that nothing behind them can tell. Everyone else (pointwise operators, whose results would
follow the strides of what they read, collectives, writers, the graph's outputs) gets the strides it was traced with.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise

from policylang.graph.facts import Facts, Flag
from policylang.operators.layouts import Lengths, is_contiguous
from policylang.operators.names import GETITEM, PRODUCTS
from policylang.planning.edits.collectives.element_moves import move_in


def relaid(facts: Facts, row: int, stride: Lengths, *, dense_for_gaps: bool = False) -> list[tuple[int, Lengths]] | int:
    """The rows behind a value whose strides change with it, in graph order, and their strides then.

    Or a row that needs the value as it was. With ``dense_for_gaps``, an operator that makes a value of its own may read
    a dense value in place of one with gaps between its rows: its result is laid out in the same way.
    """
    found: list[tuple[int, Lengths]] = []
    pending = [] if stride == facts.strides[row] else [(row, stride)]
    while pending:
        at, now = heappop(pending)
        for user in facts.users[at]:
            if facts.targets[user] in PRODUCTS:
                continue
            after = _after(facts, user, at, now)
            if after is None:
                if dense_for_gaps and _only_gaps(facts, at, now) and _makes_its_own(facts, user):
                    continue
                return user
            if after != facts.strides[user]:
                found.append((user, after))
                heappush(pending, (user, after))
    return sorted(found)


def _only_gaps(facts: Facts, row: int, stride: Lengths) -> bool:
    """Whether a value is dense with these strides and had gaps between its rows, in the same order, before."""
    shape, before = facts.shapes[row], facts.strides[row]
    if shape is None or before is None or not is_contiguous(shape, stride):
        return False
    lengths = [(step, length) for step, length in zip(before, shape, strict=True) if length != 1]
    return all(outer >= inner * length for (outer, _), (inner, length) in pairwise(lengths))


def _makes_its_own(facts: Facts, row: int) -> bool:
    ours = Flag.VIEW | Flag.WRITES | Flag.EFFECTFUL | Flag.COLLECTIVE | Flag.RANDOM
    return facts.ops[row] == "call_function" and not facts.flags[row] & ours and facts.targets[row] != GETITEM


def _after(facts: Facts, row: int, source: int, stride: Lengths) -> Lengths | None:
    """The strides of what a layout operator makes of a value that has these; None where it cannot read it so."""
    shape = facts.shapes[source]
    if facts.flags[row] & (Flag.WRITES | Flag.EFFECTFUL) or facts.inputs[row] != (source,):
        return None
    if shape is None or facts.strides[row] is None or facts.ops[row] != "call_function":
        return None
    return move_in(facts, row).strides(shape, stride)
