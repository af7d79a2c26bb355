"""Turns a plan into what to do at each operator of the running block.

There is no order to carry out: the block's own code runs again, in its own order. A stream of operators also has those
that no row of the plan stands for, so each operator gets an instruction of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from attrs import field, frozen

from policylang.backends.eager.observation.block_trace import BlockTrace
from policylang.backends.eager.observation.first_call import Observation
from policylang.backends.eager.observation.stream import changes_only_geometry, gives_what_it_writes, writes
from policylang.backends.surgery import tags
from policylang.graph.facts import Facts, Flag
from policylang.operators.calls import statistics_positions
from policylang.planning.checkpoints import kept_rows
from policylang.planning.liveness import Needs, saved_and_recomputed
from policylang.planning.plan import Plan
from policylang.planning.value_decision import Decision

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
"""BatchNorm: the second run leaves the running statistics alone."""

_WRITES = int(Flag.WRITES)
_REPEATABLE = int(Flag.REPEATABLE)
_RANDOM = int(Flag.RANDOM)


@frozen(eq=False)
class Instructions:
    """By operator; ``operators`` and ``kinds`` have one entry more, the end. The rest is as in the observed stream."""

    operators: tuple[Any, ...]
    kinds: tuple[int, ...]
    reach: int
    read: dict[int, frozenset[int]] = field(factory=dict)
    """Of operators with several results: which of them anyone reads."""
    written: dict[int, tuple[int, ...]] = field(factory=dict)
    """Of an operator that writes to a held value: the operators that hold it."""
    outside: dict[int, tuple[int, ...]] = field(factory=dict)
    """As ``from_outside`` of the stream, of operators that run again."""
    kept: dict[int, tuple[int, ...]] = field(factory=dict)
    """As in the stream, and so is the next."""
    state: dict[int, tuple[int, ...]] = field(factory=dict)
    noted: dict[int, tuple[int, ...]] = field(init=False)
    """Either of the first two."""
    differentiable: Collection[int] = ()
    numbered: Collection[int] = ()

    @noted.default
    def _either(self) -> dict[int, tuple[int, ...]]:
        both = dict.fromkeys((*self.outside, *self.kept))
        return {at: tuple(dict.fromkeys((*self.outside.get(at, ()), *self.kept.get(at, ())))) for at in both}

    def decided_by(self, at: int) -> str:
        """The line that has an operator run again, or what else does; empty where nothing is known of it."""
        return ""

    def after_what_is_made_once(self, at: int, operator: Any) -> int | None:
        """Where an operator (None: the end) comes next, behind others at a position that no gradient flows through:
        they may have made something that is kept, a table in an attribute or in a cache, and need not run again."""
        for position in range(at, len(self.operators)):
            if self.operators[position] is operator:
                return position
            if position in self.differentiable:
                break
        return None


@frozen(eq=False, kw_only=True)
class PlannedInstructions(Instructions):
    """What a plan says, and the plan."""

    plan: Plan
    needs: Needs
    rows: tuple[int, ...]

    def is_planned(self, at: int) -> bool:
        """Whether what is held of an operator is for the plan to say, and not a number that Python has read, or what
        an operator makes that writes to memory from outside."""
        row = self.rows[at]
        return row >= 0 and self.plan.facts.flags[row] & (_WRITES | _REPEATABLE) != _WRITES

    def decided_by(self, at: int) -> str:
        row = self.rows[at] if at < len(self.rows) else -1
        decision = self.plan.decisions[row] if row >= 0 else None
        return "" if decision is None else tags.provenance(self.plan, decision)


def instructions_so_far(observation: Observation) -> Instructions:
    """Of a call that has no plan yet: whatever it has made is held, and what it has written is written."""
    operators, held = observation.stream.operators, observation.entries
    kinds = [_write(each) if writes(each) else KEEP if at in held else RUN for at, each in enumerate(operators)]
    return Instructions((*operators, None), (*kinds, RUN), len(operators))


def instructions_of(trace: BlockTrace, plan: Plan) -> PlannedInstructions:
    """What the plan says, operator by operator."""
    facts, stream = plan.facts, trace.stream
    needs = saved_and_recomputed(plan)
    held = kept_rows(facts, needs.saved)
    steps = zip(stream.operators, trace.rows, strict=True)
    kinds = [
        KEEP if at in stream.numbers else _kind(facts, plan.decisions, row, operator, held)
        for at, (operator, row) in enumerate(steps)
    ]
    owners = [facts.owners[row] for row in trace.rows]
    holders: dict[int, list[int]] = {}
    for at, kind in enumerate(kinds):
        if kind == KEEP:
            holders.setdefault(owners[at], []).append(at)
    outside = {at: found for at, found in stream.from_outside.items() if at < stream.reach and kinds[at] in (RUN, DRAW)}
    kept = {at: found for at, found in stream.kept.items() if at <= stream.reach and found}
    return PlannedInstructions(
        operators=(*stream.operators, None),
        kinds=(*map(_second, kinds, stream.operators), RUN),
        reach=stream.reach,
        read=trace.read,
        written={at: tuple(holders.get(owners[at], ())) for at, kind in enumerate(kinds) if kind == HELD},
        outside={at: found for at, found in outside.items() if found},
        kept=kept,
        state=stream.state,
        differentiable=stream.differentiable,
        numbered=stream.numbered,
        plan=plan,
        needs=needs,
        rows=trace.rows,
    )


def _second(kind: int, operator: Any) -> int:
    """What is held is held in the shape in which it was made."""
    return RUN if kind == HELD and changes_only_geometry(operator) else kind


def _write(operator: Any) -> int:
    """Of an operator that writes to memory from outside: what it makes beside that is held."""
    return PASS if gives_what_it_writes(operator) else KEEP


def _kind(facts: Facts, decisions: Sequence[Decision | None], row: int, operator: Any, held: frozenset[int]) -> int:
    if row < 0:
        return _write(operator) if writes(operator) else RUN
    flags = facts.flags[row]
    if flags & _WRITES and writes(operator):
        if not flags & _REPEATABLE:
            return _write(operator)
        decision = decisions[row]
        if decision is not None and decision.action is not None and decision.action.saves:
            return HELD
    elif row in held or any(piece in held for piece in facts.followers.get(row, ()) if facts.inputs[piece] == (row,)):
        return KEEP
    elif flags & _WRITES and statistics_positions(operator):
        return QUIET
    return DRAW if flags & _RANDOM else RUN
