"""The values that are alive at the peak, and the lines that keep them.

The moment is :func:`policylang.simulation.memory.highest_moment`, and the values come from the same lifetimes as the
curve: they sum up to the simulated peak exactly. A forward value kept by a saved view of it is listed under the line
that saves the view.
"""

from __future__ import annotations

from heapq import nsmallest
from typing import Literal, assert_never

from attrs import frozen

from policylang.graph.facts import Facts, InputKind, Phase
from policylang.graph.schedule import Schedule
from policylang.planning.inspection.breakdown import Breakdown, operator_of
from policylang.planning.order.rematerialised import rematerialised
from policylang.planning.value_outcome import RECOMPUTED, Decision, Held, Outcome
from policylang.simulation.memory import Origin, highest_moment

MOST_VALUES = 20

_INPUTS: dict[int, str] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.USER: "input",
    InputKind.TANGENT: "tangent",
}


@frozen
class Moment:
    """A step of the schedule."""

    step: int
    """Counted from 1."""
    node: str
    half: Literal["forward", "backward"]
    again: bool
    """True if it computes or fetches a forward value for the backward."""


@frozen
class AliveValue:
    """One piece of memory."""

    name: str
    """The node that allocated it."""
    bytes: int
    operator: str
    """Empty for an input of the graph."""
    module: str
    """The dotted name of a parameter or buffer."""
    block: str
    what: str
    """Why it is there: ``parameter``, ``saved``, ``recomputed``, ``in use``, …"""
    source: str | None
    """``file:line`` of the rule that decided it, None where none did."""
    rule: str
    """The rule's text; else what decided instead of one, empty where there was nothing to decide."""
    saved_as: str
    """The view for which the memory is kept."""
    made: Moment | None
    """None for what is there before the first step."""
    last: Moment | None
    """The step after which it is given back; None for what stays."""


@frozen
class AliveShare:
    """All that is alive for one reason, by one line."""

    what: str
    source: str | None
    rule: str
    count: int
    bytes: int


@frozen
class PeakValues:
    """``values`` and ``rest_bytes`` sum up to ``bytes``, and so do ``shares``."""

    bytes: int
    """The simulated peak."""
    at: Moment | None
    """None where no step needs more than what is there before the first."""
    steps: int
    """The number of steps in the schedule."""
    values: tuple[AliveValue, ...]
    """The largest, largest first."""
    rest: int
    """The number of values alive beside these."""
    rest_bytes: int
    shares: tuple[AliveShare, ...]
    """By reason and line, the largest first."""


def values_at_peak(found: Breakdown, most: int = MOST_VALUES) -> PeakValues:
    """The ``most`` largest values alive at the highest moment of the step under the policy, and all of them by line.

    What takes no memory does not count as a value.
    """
    facts, schedule, timeline = found.under.facts, found.under.schedule, found.under.timeline
    sizes = timeline.lifetimes.bytes
    entry = highest_moment(timeline)
    step = -1 if entry is None else timeline.steps[entry]
    alive = [at for at in timeline.lifetimes.alive_at(step) if sizes[at]]
    named = _Named(found)
    shares: dict[tuple[str, str | None, str], list[int]] = {}
    for at in alive:
        what, source, rule, _ = named.reason(at)
        shares.setdefault((what, source, rule), []).append(sizes[at])
    largest = nsmallest(most, alive, key=lambda at: (-sizes[at], at))
    total = timeline.resident if entry is None else timeline.live[entry]
    by_line = (AliveShare(*reason, len(each), sum(each)) for reason, each in shares.items())
    return PeakValues(
        bytes=total,
        at=moment_of(schedule, facts, step),
        steps=len(schedule),
        values=tuple(named.value(at) for at in largest),
        rest=len(alive) - len(largest),
        rest_bytes=sum(sizes[at] for at in alive) - sum(sizes[at] for at in largest),
        shares=tuple(sorted(by_line, key=lambda share: -share.bytes)),
    )


def moment_of(schedule: Schedule, facts: Facts, step: int) -> Moment | None:
    """None before the first step and after the last."""
    if not 0 <= step < len(schedule):
        return None
    row, backward = schedule.rows[step], schedule.regions[step] > 0
    again = backward and facts.phases[row] == Phase.FORWARD
    return Moment(step + 1, facts.names[row], "backward" if backward else "forward", again)


class _Named:
    """Memory in the words of a policy.

    Rows are nodes of the graph that the step runs; if scheduling lines rewrote it, the plan's values are found by name,
    and what a bucket adds has none.
    """

    def __init__(self, found: Breakdown) -> None:
        self.plan, self.outcomes, self.facts = found.plan, found.outcomes, found.under.facts
        order = self.plan.order if self.facts is not self.plan.facts else None
        self.block_of, self.block_names = (order or self.plan).block_of, (order or self.plan).block_names
        ran = None if order is None else rematerialised(self.plan.facts, self.plan.schedule)
        names, rows = (self.facts.names, range(len(self.facts))) if ran is None else (ran.facts.names, ran.origin)
        self.planned = dict(zip(names, rows, strict=True))
        """Node to the node of the plan's facts with the same value, first run or recomputed."""
        self.schedule, self.lifetimes = found.under.schedule, found.under.timeline.lifetimes
        self.keeper: dict[int, int] = {}  # memory → the first value that is kept in it
        roots = self.facts.storage_roots
        for row in range(len(self.facts)):
            outcome = self._outcome(row)
            if outcome is not None and outcome.on_device:
                self.keeper.setdefault(roots[row], row)

    def _recomputes(self, row: int) -> int | None:
        """The node of the plan's facts whose value a node of the step recomputes."""
        planned = self.planned.get(self.facts.names[row])
        return None if planned is None or self.plan.facts.names[planned] == self.facts.names[row] else planned

    def _outcome(self, row: int) -> Outcome | None:
        planned = self.planned.get(self.facts.names[row])
        return None if planned is None or self._recomputes(row) is not None else self.outcomes[planned]

    def reason(self, at: int) -> tuple[str, str | None, str, int]:
        """Why it is there, by which line, in its words, and the value whose decision that is."""
        facts, row = self.facts, self.lifetimes.rows[at]
        by, what = row, ""
        match Origin(self.lifetimes.origins[at]):
            case Origin.INPUT | Origin.TANGENT:
                other = "constant" if facts.ops[row] == "get_attr" else "input"
                return _INPUTS.get(facts.input_kinds[row], other), None, "", row
            case Origin.FIRST_RUN:
                if (again := self._recomputes(row)) is not None:
                    return RECOMPUTED.word, *self._line(self.plan.decisions[again]), row
                if facts.phases[row] == Phase.BACKWARD:
                    return ("returned" if self._stays(at) else "backward"), None, "", row
                by = self.keeper.get(row, row)
                outcome = self._outcome(by)
                what = "returned" if self._stays(at) else "in use"
                if outcome is not None and outcome.held is not Held.NOWHERE:
                    what = outcome.word
            case Origin.SECOND_RUN:
                what = RECOMPUTED.word
            case Origin.COPY_FROM_HOST:
                what = "copied back"
            case Origin.GENERATOR_STATE:
                what = "generator state"
            case origin:
                assert_never(origin)
        planned = self.planned.get(facts.names[by])
        return what, *self._line(None if planned is None else self.plan.decisions[planned]), by

    def _line(self, decision: Decision | None) -> tuple[str | None, str]:
        if decision is None:
            return None, ""
        if decision.rule is None:
            return None, decision.reason or f"undecided -> {self.plan.undecided}"
        rule = self.plan.policy.rules[decision.rule]
        return rule.source, f"{rule.text} ({decision.reason})" if decision.reason else rule.text

    def _stays(self, at: int) -> bool:
        return self.lifetimes.last[at] >= len(self.schedule)

    def value(self, at: int) -> AliveValue:
        facts, lifetimes = self.facts, self.lifetimes
        row = lifetimes.rows[at]
        what, source, rule, by = self.reason(at)
        is_input = facts.phases[row] == Phase.INPUT
        block = self.block_of[row] if self.block_names else -1
        return AliveValue(
            name=facts.names[row],
            bytes=lifetimes.bytes[at],
            operator="" if is_input else operator_of(facts, row),
            module=facts.input_names[row] if is_input else facts.modules[row] or facts.modules[facts.owners[row]],
            block=self.block_names[block] if block >= 0 else "",
            what=what,
            source=source,
            rule=rule,
            saved_as=facts.names[by] if by != row else "",
            made=moment_of(self.schedule, facts, lifetimes.made[at]),
            last=moment_of(self.schedule, facts, lifetimes.last[at]),
        )
