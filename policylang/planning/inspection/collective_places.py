"""Where one collective starts and is awaited, as traced and as planned, and what each scheduling line did to it."""

from __future__ import annotations

from attrs import field, frozen

from policylang.graph.facts import storage_roots
from policylang.graph.schedule import StepKind
from policylang.operators.names import WAITS
from policylang.planning.inspection.communication import Communication, LineInOrder, StepInOrder, group_of
from policylang.simulation.collective_runs import CollectiveRun
from policylang.simulation.streams import streams_of

_LAST_RUN = int(StepKind.SECOND_RUN)


@frozen
class CollectivePlace:
    """A collective in one order."""

    name: str
    """Its node; of one that is in a bucket the bucket's."""
    step: int
    """The step of the schedule in which it starts, counted from 1."""
    before: str
    """The node that computes next."""
    awaited_step: int | None
    """None where nothing waits for it."""
    awaited_before: str
    """The node that computes next once it is awaited."""
    run: CollectiveRun | None
    """None without a device."""


@frozen
class LineOnCollective:
    """What one scheduling line has to do with a collective."""

    source: str
    text: str
    standing: str
    """``joined``, ``moved``, ``left``, ``not moved`` or ``no match``."""
    why: str = ""


@frozen
class PlacedCollective:
    """One collective of the step."""

    name: str
    """As it was asked for."""
    operator: str
    group: str
    lines: tuple[LineOnCollective, ...]
    """Every scheduling line, in the order of planning."""
    traced: CollectivePlace | None
    """None of what only the planned order has."""
    planned: CollectivePlace | None
    members: tuple[str, ...] = field(factory=tuple)
    """Of a bucket, or of what is in one: all that it joins."""


def collective_asked(found: Communication, name: str) -> str | None:
    """The collective that a node is, or waits for; None of anything else."""
    for step in (found.traced, found.planned):
        row = step.facts.index.get(name)
        if row is None:
            continue
        started = streams_of(step.facts).started
        if row in started:
            return name
        owner = step.facts.owners[row]
        if step.facts.targets[row] in WAITS and owner in started:
            return step.facts.names[owner]
    return None


def placed(found: Communication, name: str) -> PlacedCollective:
    """Of a collective of either order, as :func:`collective_asked` names it."""
    bucket = next((each for line in found.lines for each in line.buckets if name in (*each.names, *each.members)), None)
    joined = None if bucket is None or not bucket.names else bucket.names[0]
    now = joined if joined is not None and name not in found.planned.facts.index else name
    first = name if bucket is None or name in bucket.members else bucket.members[0]
    traced, planned = _placement(found.traced, first), _placement(found.planned, now)
    step = found.planned if now in found.planned.facts.index else found.traced
    row = step.facts.index[now]
    return PlacedCollective(
        name=name,
        operator=step.facts.targets[row],
        group=group_of(step.facts, row),
        lines=tuple(_standing(line, name, now) for line in found.lines),
        traced=traced,
        planned=planned,
        members=() if bucket is None else bucket.members,
    )


def _standing(line: LineInOrder, name: str, now: str) -> LineOnCollective:
    def say(standing: str, why: str = "") -> LineOnCollective:
        return LineOnCollective(line.source, line.text, standing, why)

    for bucket in line.buckets:
        if name in bucket.members or name in bucket.names:
            return say("joined", f"{len(bucket.members):,} in one")
    for reason, names in line.left.items():
        if name in names or now in names:
            return say("left", reason)
    if now in line.moved or name in line.moved:
        return say("moved")
    return say("not moved" if now in line.matched or name in line.matched else "no match")


def _placement(step: StepInOrder, name: str) -> CollectivePlace | None:
    facts = step.facts
    row = facts.index.get(name)
    if row is None:
        return None
    awaited = streams_of(facts).awaited
    started = waited = None
    for at, (kind, each, _) in enumerate(step.schedule):
        if kind > _LAST_RUN:
            continue
        if each == row and started is None:
            started = at
        elif started is not None and row in awaited.get(each, ()):
            waited = at
            break
    if started is None:
        return None
    runs = () if step.lanes is None else step.lanes.collectives
    return CollectivePlace(
        name=name,
        step=started + 1,
        before=_computing(step, started),
        awaited_step=None if waited is None else waited + 1,
        awaited_before="" if waited is None else _computing(step, waited),
        run=next((run for run in runs if run.row == row), None),
    )


def _computing(step: StepInOrder, at: int) -> str:
    """The node that computes first from a step on: not a start, a wait or what takes no memory."""
    started, roots = streams_of(step.facts).started, storage_roots(step.facts)
    for later in range(at, len(step.schedule)):
        row = step.schedule.rows[later]
        if step.schedule.kinds[later] <= _LAST_RUN and row not in started and roots[row] == row:
            return step.facts.names[row]
    return ""
