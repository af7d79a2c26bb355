"""The collectives of a step as traced and as planned, and what each scheduling line did.

Two steps are compared, the graph as it runs without any scheduling line and with all of them. Which
collectives are hidden and which exposed comes from :mod:`policylang.simulation.streams`; without a device there
are counts and bytes, and no times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag, storage_roots
from policylang.graph.schedule import Schedule, StepKind
from policylang.language.devices.profile import collective_kind
from policylang.language.syntax import Bucket, Overlap, Policy
from policylang.operators.names import WAITS
from policylang.planning.graph_edit import Edits, Proof
from policylang.planning.plan import OrderPlan, Plan
from policylang.simulation.collective_times import operator_name
from policylang.simulation.memory import Peak, Timeline, peak_of, simulate
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import CollectiveRun, Lanes, exposed_bound, lanes, size_in_flight, streams_of
from policylang.simulation.streams import in_flight as in_flight_at

_HIGHEST_RUN = int(StepKind.SECOND_RUN)


@frozen(eq=False)
class StepInOrder:
    """A step that runs in one order."""

    facts: Facts
    schedule: Schedule
    timeline: Timeline
    peak: Peak
    in_flight: int
    """Bytes of the collectives that are started and not awaited, where they are most: of each, the more of what it is
    given and what it gives."""
    lanes: Lanes | None
    """None without a device."""
    block_of: Sequence[int] = field(factory=tuple, repr=False)
    """Row to block number, -1 outside every block; empty where no blocks are known."""

    def kinds(self) -> dict[str, int]:
        """The number of collectives by kind: ``all-gather``; in the order of their first run."""
        rows = self.collectives
        return dict(Counter(kind_of(self.facts.targets[row]) for row in rows))

    @property
    def collectives(self) -> list[int]:
        """Their rows in the order in which they start; a recomputed one is there twice."""
        return collective_rows(self.facts, self.schedule)


@frozen
class JoinedCollectives:
    """Collectives that a ``bucket`` line makes one."""

    names: tuple[str, ...]
    """The nodes that carry the bytes now: mostly one collective."""
    members: tuple[str, ...]
    """The collectives that go, in the order in which they ran."""
    proof: Proof


@frozen
class LineInOrder:
    """The effect of one scheduling line, or of one ``bucket`` line."""

    source: str
    """``file:line``."""
    text: str
    matched: tuple[str, ...]
    """The collectives that it picks."""
    moved: tuple[str, ...]
    """For a ``bucket`` line those that became one with others; for the others those that start earlier, or are awaited
    later, because of it."""
    left: Mapping[str, tuple[str, ...]] = field(factory=dict)
    """Why collectives were left where they are, and which."""
    buckets: tuple[JoinedCollectives, ...] = ()
    exposed_without: float | None = None
    """Seconds that the step would expose without this line, where that was worked out."""


@frozen
class CollectiveEntry:
    """One collective of the step as planned."""

    name: str
    operator: str
    """``all_gather_into_tensor``."""
    kind: str
    """``all-gather``."""
    group: str
    """Its mesh dimension where one is known, else the name of its process group."""
    block: str
    """Empty outside every block."""
    bytes: int
    """The more of what it is given and what it gives."""
    lines: tuple[int, ...]
    """The :attr:`Communication.lines` that joined or moved it."""
    members: int
    """The number of collectives of the graph as traced that it replaces."""
    run: CollectiveRun | None
    """None without a device, and of one that computes as well, which runs among the computation."""


@frozen(eq=False)
class Communication:
    """The collectives of a plan's step."""

    traced: StepInOrder
    """The graph as it runs without any scheduling line."""
    planned: StepInOrder
    """As it runs under the policy; the same object where no line schedules anything."""
    lines: tuple[LineInOrder, ...] = ()
    """In the order of planning: buckets, then the others."""
    collectives: tuple[CollectiveEntry, ...] = ()
    """The step as planned, in the order in which they start."""
    bound: float | None = None
    """Seconds that no order of the planned graph can hide; None without a device."""
    device: str | None = None
    barriers: Mapping[str, int] = field(factory=dict)
    """Operators that nothing was moved across because nobody knows what they do, and how many calls."""
    orders: bool = False
    """True if the policy has scheduling lines that were planned."""


def communication(plan: Plan) -> Communication | None:
    """A few passes over the graph; None where the policy schedules nothing."""
    order = plan.order
    if order is None:
        return None
    timed = plan.shown_times is not None
    times, traced_times = (order.times, order.traced_times) if timed else (None, None)
    of_name = {order.facts.names[row]: block for row, block in enumerate(order.block_of)}
    blocks = tuple(of_name.get(name, -1) for name in order.traced.names) if of_name else ()
    traced = step_in_order(order.traced, order.traced_schedule, traced_times, blocks)
    limits = _limits(plan, traced.peak.bytes)
    planned = step_in_order(order.facts, order.schedule, times, order.block_of, limits)
    return Communication(
        traced=traced,
        planned=planned,
        lines=lines_of(plan, order),
        collectives=tuple(_entries(plan, order, planned)),
        bound=None if times is None else exposed_bound(order.facts, times),
        device=None if times is None else times.device.name,
        barriers=order.barriers,
        orders=True,
    )


def as_decided(plan: Plan) -> Communication | None:
    """The collectives of a plan that schedules none, on a device; None without one, where there are none, and of a
    model in eager, whose gathers FSDP orders."""
    times = plan.shown_times
    if times is None or plan.checkpoints is not None or not any(flag & Flag.COLLECTIVE for flag in plan.facts.flags):
        return None
    step = step_in_order(plan.facts, plan.schedule, times, plan.block_of if plan.block_names else ())
    entries = _collectives(step, plan.block_names, {}, {})
    bound = exposed_bound(plan.facts, times)
    return Communication(step, step, (), tuple(entries), bound, times.device.name)


def step_in_order(
    facts: Facts,
    schedule: Schedule,
    times: NodeTimes | None,
    block_of: Sequence[int] = (),
    limits: tuple[int | None, int | None] = (None, None),
) -> StepInOrder:
    """A step as it runs. ``limits``: the bytes in flight and alive that the order was made under."""
    in_flight, most = limits
    timeline = simulate(facts, schedule)
    return StepInOrder(
        facts=facts,
        schedule=schedule,
        timeline=timeline,
        peak=peak_of(timeline, facts),
        in_flight=max(in_flight_at(facts, schedule), default=0),
        lanes=None if times is None else lanes(facts, schedule, times, in_flight=in_flight, peak=most),
        block_of=block_of,
    )


def _limits(plan: Plan, peak: int) -> tuple[int | None, int | None]:
    """The least that any ``overlap`` line allows in flight and alive, with the peak of the order as traced."""
    lines = [each for each in plan.policy.scheduling if isinstance(each, Overlap)]
    in_flight = [int(each.in_flight.value) for each in lines if each.in_flight is not None]
    rises = [each.peak for each in lines if each.peak is not None]
    most = [peak + int(each.value * (peak if each.dimension == "fraction" else 1)) for each in rises]
    return min(in_flight, default=None), min(most, default=None)


def collective_rows(facts: Facts, schedule: Schedule) -> list[int]:
    """In the order in which they start; a recomputed one is there twice."""
    flags = facts.flags
    return [row for kind, row, _ in schedule if kind <= _HIGHEST_RUN and flags[row] & Flag.COLLECTIVE]


def kind_of(target: str) -> str:
    """The kind of a collective, ``all-gather``; of an unknown one the operator's name."""
    name = operator_name(target)
    kind = collective_kind(name)
    return name if kind is None else kind.value


def group_of(facts: Facts, row: int) -> str:
    """The mesh dimension that a collective sends over where one is known, else the name of its group."""
    group = facts.groups.get(facts.group_names[row])
    return (group.dim if group is not None else None) or facts.group_names[row]


def lines_of(plan: Plan, order: OrderPlan) -> tuple[LineInOrder, ...]:
    """Every line that schedules, buckets first: as they are planned."""
    found = [_bucket_line(plan, at, order.edits.of(at)) for at in bucket_statements(plan.policy)]
    for outcome in order.outcomes:
        span = outcome.statement.span
        left = _by_reason(outcome.left.items())
        found.append(LineInOrder(span.location, span.one_line, outcome.matched, outcome.moved, left))
    return tuple(found)


def bucket_statements(policy: Policy) -> list[int]:
    """Which of ``Policy.rewrites`` are buckets."""
    return [at for at, statement in enumerate(policy.rewrites) if isinstance(statement, Bucket)]


def _bucket_line(plan: Plan, statement: int, edits: Edits) -> LineInOrder:
    span = plan.policy.rewrites[statement].span
    members = tuple(name for edit in edits.done for name in edit.collectives)
    refused = [(name, refusal.reason) for refusal in edits.refused for name in refusal.collectives]
    return LineInOrder(
        source=span.location,
        text=span.one_line,
        matched=tuple(dict.fromkeys((*members, *(name for name, _ in refused)))),
        moved=members,
        left=_by_reason(refused),
        buckets=tuple(
            JoinedCollectives(
                tuple(node.name for node in edit.nodes if _communicates(node.target)), edit.collectives, edit.proof
            )
            for edit in edits.done
        ),
    )


def _communicates(target: str) -> bool:
    return target not in WAITS and collective_kind(operator_name(target)) is not None and "c10d" in target


def _by_reason(left: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for name, reason in left:
        found.setdefault(reason, []).append(name)
    return {reason: tuple(names) for reason, names in found.items()}


def _entries(plan: Plan, order: OrderPlan, step: StepInOrder) -> Iterable[CollectiveEntry]:
    by_line: dict[str, list[int]] = {}
    members: dict[str, int] = {}
    for index, line in enumerate(lines_of(plan, order)):
        for bucket in line.buckets:
            for name in bucket.names:
                by_line.setdefault(name, []).append(index)
                members[name] = len(bucket.members)
        for name in () if line.buckets else line.moved:
            by_line.setdefault(name, []).append(index)
    return _collectives(step, order.block_names, by_line, members)


def _collectives(
    step: StepInOrder,
    block_names: Sequence[str],
    by_line: Mapping[str, Sequence[int]],
    members: Mapping[str, int],
) -> Iterable[CollectiveEntry]:
    facts, runs = step.facts, dict[int, list[CollectiveRun]]()
    for run in reversed(step.lanes.collectives if step.lanes is not None else ()):
        runs.setdefault(run.row, []).append(run)
    for row in step.collectives:
        block = step.block_of[row] if block_names and step.block_of else -1
        mine = runs.get(row)
        yield CollectiveEntry(
            name=facts.names[row],
            operator=operator_name(facts.targets[row]),
            kind=kind_of(facts.targets[row]),
            group=group_of(facts, row),
            block=block_names[block] if block >= 0 else "",
            bytes=size_in_flight(facts, row),
            lines=tuple(by_line.get(facts.names[row], ())),
            members=members.get(facts.names[row], 1),
            run=mine.pop() if mine else None,
        )


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
    """The effect of one scheduling line on a collective."""

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
    """The members of the bucket that it is, or is in."""


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
    """Describe a collective of either order, as :func:`collective_asked` names it."""
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
