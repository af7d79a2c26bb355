"""What of a graph computes, what communicates, and what is done for a collective's sake alone."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate
from weakref import WeakKeyDictionary

from policylang.graph.facts import Facts, Flag, returns_memory_of_input
from policylang.operators.names import GETITEM, WAITS
from policylang.planning.order.reading.shared_memory import awaited


class Role(IntEnum):
    NONE = 0
    """Inputs, constants, sizes, views and pieces."""
    COLLECTIVE = 1
    """It starts one, or awaits it."""
    AROUND = 2
    """It makes what a collective is given and nobody else reads (the cast of a shard), or works on what a collective
    has brought and on nothing else (a slice of gathered weights)."""
    COMPUTES = 3
    """What blocks are there for: all else, and whatever multiplies."""


_known: WeakKeyDictionary[Facts, Sequence[int]] = WeakKeyDictionary()


def roles_of(facts: Facts) -> Sequence[int]:
    """The :class:`Role` of each row. Linear in nodes and edges, once for each facts."""
    known = _known.get(facts)
    if known is None:
        known = _known[facts] = _roles(facts)
    return known


def _roles(facts: Facts) -> Sequence[int]:
    found = bytearray(len(facts))
    flags, flops, targets, ops = facts.flags, facts.flops, facts.targets, facts.ops
    for row, op in enumerate(ops):
        if op == "call_function":
            if flags[row] & Flag.COLLECTIVE or targets[row] in WAITS:
                found[row] = Role.COMPUTES if flops[row] else Role.COLLECTIVE
            elif targets[row] != GETITEM and not flags[row] & Flag.SYMBOLIC and not returns_memory_of_input(facts, row):
                found[row] = Role.COMPUTES
    around = _after(facts, found)
    for row in _before(facts, found):
        around[row] = 1
    for row in range(len(facts)):
        if around[row] and found[row] == Role.COMPUTES:
            found[row] = Role.AROUND
    return found


def _after(facts: Facts, roles: Sequence[int]) -> bytearray:
    """Rows that read nothing but what a collective has brought."""
    found = bytearray(len(facts))
    flags = facts.flags
    for row, reads in enumerate(facts.inputs):
        if facts.ops[row] != "call_function" or facts.flops[row] or roles[row] == Role.COLLECTIVE:
            continue
        read = [each for each in reads if not flags[each] & Flag.SYMBOLIC]
        found[row] = bool(read) and all(found[each] or roles[each] == Role.COLLECTIVE for each in read)
    return found


def _before(facts: Facts, roles: Sequence[int]) -> list[int]:
    """Rows that nothing but collectives reads in the end."""
    found = bytearray(len(facts))
    for row in range(len(facts) - 1, -1, -1):
        if facts.ops[row] != "call_function" or facts.flops[row] or roles[row] == Role.COLLECTIVE:
            continue
        users = facts.users[row]
        found[row] = bool(users) and all(found[each] or _starts(facts, each) for each in users)
    return [row for row in range(len(facts)) if found[row]]


def _starts(facts: Facts, row: int) -> bool:
    return bool(facts.flags[row] & Flag.COLLECTIVE)


class Progress:
    """How much has been computed where each collective starts and is awaited, in one order."""

    def __init__(self, facts: Facts, order: Sequence[int]) -> None:
        roles = roles_of(facts)
        counts = accumulate((roles[row] == Role.COMPUTES for row in order), initial=0)
        self._computed = dict(zip(order, counts, strict=False))
        self._waits: dict[int, list[int]] = {}
        for row in order:
            if (collective := awaited(facts, row)) is not None:
                self._waits.setdefault(collective, []).append(row)

    def shifted(self, row: int, other: Progress) -> bool:
        """Whether a collective starts earlier, or is awaited later, than in another order of the same calls."""
        waits = self._waits.get(row, ())
        return self._computed[row] < other._computed[row] or any(
            self._computed[each] > other._computed[each] for each in waits
        )
