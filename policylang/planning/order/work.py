"""What of a graph computes, what communicates, and what is done for a collective's sake alone."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from policylang.graph.facts import Facts, Flag
from policylang.graph.storage import returns_memory_of_input
from policylang.operators.names import GETITEM, WAITS


class Work(IntEnum):
    NONE = 0
    """Inputs, constants, sizes, views and pieces."""
    COLLECTIVE = 1
    """It starts one, or awaits it."""
    AROUND = 2
    """It makes what a collective is given and nobody else reads (the cast of a shard), or works on what a collective
    has brought and on nothing else (a slice of gathered weights)."""
    COMPUTES = 3
    """What blocks are there for: all else, and whatever multiplies."""


def work_of(facts: Facts) -> Sequence[int]:
    """The :class:`Work` of each row. Linear in nodes and edges."""
    found = bytearray(len(facts))
    flags, flops, targets, ops = facts.flags, facts.flops, facts.targets, facts.ops
    for row, op in enumerate(ops):
        if op == "call_function":
            if flags[row] & Flag.COLLECTIVE or targets[row] in WAITS:
                found[row] = Work.COMPUTES if flops[row] else Work.COLLECTIVE
            elif targets[row] != GETITEM and not flags[row] & Flag.SYMBOLIC and not returns_memory_of_input(facts, row):
                found[row] = Work.COMPUTES
    around = _after(facts, found)
    for row in _before(facts, found):
        around[row] = 1
    for row in range(len(facts)):
        if around[row] and found[row] == Work.COMPUTES:
            found[row] = Work.AROUND
    return found


def _after(facts: Facts, work: Sequence[int]) -> bytearray:
    """Rows that read nothing but what a collective has brought."""
    found = bytearray(len(facts))
    flags = facts.flags
    for row, reads in enumerate(facts.inputs):
        if facts.ops[row] != "call_function" or facts.flops[row] or work[row] == Work.COLLECTIVE:
            continue
        read = [each for each in reads if not flags[each] & Flag.SYMBOLIC]
        found[row] = bool(read) and all(found[each] or work[each] == Work.COLLECTIVE for each in read)
    return found


def _before(facts: Facts, work: Sequence[int]) -> list[int]:
    """Rows that nothing but collectives reads in the end."""
    found = bytearray(len(facts))
    for row in range(len(facts) - 1, -1, -1):
        if facts.ops[row] != "call_function" or facts.flops[row] or work[row] == Work.COLLECTIVE:
            continue
        users = facts.users[row]
        found[row] = bool(users) and all(found[each] or _starts(facts, each) for each in users)
    return [row for row in range(len(facts)) if found[row]]


def _starts(facts: Facts, row: int) -> bool:
    return bool(facts.flags[row] & Flag.COLLECTIVE)
