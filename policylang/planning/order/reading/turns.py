"""The forward and the backward of a graph that runs them in turn: nothing is moved from one into the other."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from policylang.graph.facts import Facts, Flag, GraphKind, Phase

_FORWARD, _BACKWARD = int(Phase.FORWARD), int(Phase.BACKWARD)


def turns(facts: Facts) -> Sequence[int]:
    """By row the number of the turn it runs in: 0 the first forward, then each backward and each further forward.

    A half has one turn. Forward rows between those of a backward, as traces leave them, are a turn of their own only
    where they multiply or communicate. Inputs and constants have turn 0, the output the last.
    """
    found = array("i", bytes(4 * len(facts)))
    if facts.kind not in (GraphKind.JOINT, GraphKind.FLAT):
        return found
    phases, ops, starts = facts.phases, facts.ops, _starts(facts)
    turn, now = 0, _FORWARD
    for row, phase in enumerate(phases):
        if ops[row] == "call_function" and phase != now and (phase == _BACKWARD or starts[row]):
            turn, now = turn + 1, phase
        if ops[row] in ("call_function", "output"):
            found[row] = turn
    return found


def _starts(facts: Facts) -> bytearray:
    """Rows of a forward between two backwards from which on it does something to speak of."""
    found, speaks = bytearray(len(facts)), False
    for row in range(len(facts) - 1, -1, -1):
        if facts.phases[row] == _BACKWARD:
            speaks = False
        elif facts.phases[row] == _FORWARD and facts.ops[row] == "call_function":
            speaks = speaks or bool(facts.flops[row] or facts.flags[row] & Flag.COLLECTIVE)
            found[row] = speaks
    return found
