"""Which values share memory: views are followed to the value that allocated it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from policylang.graph.facts import Facts, Flag
from policylang.operators.names import GETITEM, VIEWS_UNSAID

_known: WeakKeyDictionary[Facts, Sequence[int]] = WeakKeyDictionary()


def storage_roots(facts: Facts) -> Sequence[int]:
    """By row, the row whose memory it lives in: itself unless it is a view, a piece of one, or a ``wait_tensor``.

    Each output of a multi-output operator has memory of its own, unless the operator returns views, as ``split`` does.
    What a flat graph writes in place shares a decision with all that runs again with it, and memory with what it
    writes to alone. Worked out once for each facts.
    """
    known = _known.get(facts)
    if known is None:
        known = _known[facts] = _storage_roots(facts)
    return known


def _storage_roots(facts: Facts) -> Sequence[int]:
    roots = array("i", range(len(facts)))
    flags, inputs, owners, targets = facts.flags, facts.inputs, facts.owners, facts.targets
    for row in range(len(facts)):
        if owners[row] != row and targets[row] == GETITEM:
            source = inputs[row][0] if inputs[row] else owners[row]
            if returns_memory_of_input(facts, source):
                roots[row] = roots[source]
        elif owners[row] != row and flags[row] & Flag.REPEATABLE:
            if (flags[row] & Flag.WRITES or returns_memory_of_input(facts, row)) and inputs[row]:
                roots[row] = roots[inputs[row][0]]
        elif owners[row] != row:
            roots[row] = roots[owners[row]]
        elif returns_memory_of_input(facts, row) and inputs[row]:
            roots[row] = roots[inputs[row][0]]
    return roots


def returns_memory_of_input(facts: Facts, row: int) -> bool:
    """Whether what an operator returns, one tensor or several, are views of its first argument."""
    return bool(facts.flags[row] & Flag.VIEW) or facts.targets[row] in VIEWS_UNSAID
