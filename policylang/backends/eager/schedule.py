"""A plan as a list of what to do at each operator of the running block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from policylang._torch_graph import schema_of
from policylang.backends.eager.recording import Recording
from policylang.graph.facts import Facts, Flag
from policylang.graph.memory import statistics_positions
from policylang.planning.outcome import Needs
from policylang.planning.plan import Decision, Plan
from policylang.planning.replayed import kept_rows, replayed_needs

RUN = 0
"""Run it both times."""
KEEP = 1
"""Hold what it gives; the second time give that."""
HELD = 2
"""Writes to a value that is held: run it the first time only, the second time that is done."""
PASS = 3
"""Writes to memory from outside the block: run it the first time only."""
DRAW = 4
"""Draws random numbers: the second time from the state of the generator that the first time found."""
QUIET = 5
"""Updates running statistics by the way: the second time without them."""

_WRITES = int(Flag.WRITES)
_REPEATABLE = int(Flag.REPEATABLE)
_RANDOM = int(Flag.RANDOM)


@frozen(eq=False)
class Schedule:
    """By operator; ``operators`` and ``kinds`` have one entry more, the end."""

    plan: Plan
    needs: Needs
    operators: tuple[Any, ...]
    kinds: tuple[int, ...]
    rows: tuple[int, ...]
    read: dict[int, frozenset[int]]
    """Of operators with several results: which of them anyone reads."""
    written: dict[int, tuple[int, ...]]
    """Of an operator that writes to a held value: the operators that hold it."""


def schedule_of(recording: Recording, plan: Plan) -> Schedule:
    """What the plan comes to, operator by operator."""
    facts = plan.facts
    needs = replayed_needs(facts, plan.decisions, recording.reach)
    held = kept_rows(facts, needs)
    steps = list(zip(recording.operators, recording.rows, strict=True))
    kinds = [_kind(facts, plan.decisions, row, operator, held) for operator, row in steps]
    holders: dict[int, list[int]] = {}
    for at, (kind, row) in enumerate(zip(kinds, recording.rows, strict=True)):
        if kind == KEEP:
            holders.setdefault(facts.owners[row], []).append(at)
    written = {
        at: tuple(holders.get(facts.owners[row], ()))
        for at, (kind, row) in enumerate(zip(kinds, recording.rows, strict=True))
        if kind == HELD
    }
    operators = (*recording.operators, None)
    return Schedule(plan, needs, operators, (*kinds, RUN), recording.rows, recording.read, written)


def _kind(facts: Facts, decisions: Sequence[Decision | None], row: int, operator: Any, held: frozenset[int]) -> int:
    if row < 0:
        return PASS if writes(operator) else RUN
    flags = facts.flags[row]
    if flags & _WRITES and writes(operator):
        if not flags & _REPEATABLE:
            return PASS
        decision = decisions[row]
        if decision is not None and decision.action is not None and decision.action.saves:
            return HELD
    elif row in held or any(piece in held for piece in facts.followers.get(row, ()) if facts.inputs[piece] == (row,)):
        return KEEP
    elif flags & _WRITES and statistics_positions(operator):
        return QUIET
    return DRAW if flags & _RANDOM else RUN


def writes(operator: Any) -> bool:
    """Whether an operator writes to one of its arguments and says so."""
    schema = schema_of(operator)
    return bool(schema is not None and schema.is_mutable)
