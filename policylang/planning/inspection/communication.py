"""The collectives of a step as traced and as planned, and what each scheduling line did.

Two steps are compared, the graph as it runs without any scheduling line and with all of them. Which
collectives are hidden and which exposed comes from :mod:`policylang.simulation.streams`; without a device there
are counts and bytes, and no times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag, Schedule, StepKind
from policylang.language.devices.profile import collective_kind
from policylang.language.syntax import Bucket, Overlap, Policy
from policylang.operators.names import WAITS
from policylang.planning.graph_edit import Edits, Proof
from policylang.planning.plan import Plan
from policylang.simulation.memory import Peak, Timeline, peak_of, simulate
from policylang.simulation.node_times import NodeTimes, operator_name
from policylang.simulation.streams import CollectiveRun, Lanes, exposed_bound, lanes, size_in_flight, streams_of
from policylang.simulation.streams import in_flight as in_flight_at


@frozen(eq=False)
class StepInOrder:
    facts: Facts
    schedule: Schedule
    timeline: Timeline
    peak: Peak
    in_flight: int
    """The most bytes of collectives under way: of each, the more of what it is given and what it gives."""
    lanes: Lanes | None
    """None without a device."""
    block_of: Sequence[int] = field(factory=tuple, repr=False)
    """Node to block number, -1 outside every block; empty where no blocks are known."""

    def kinds(self) -> dict[str, int]:
        """The number of collectives by kind: ``all-gather``; in the order of their first run."""
        rows = self.collectives
        return dict(Counter(kind_of(self.facts.targets[row]) for row in rows))

    @property
    def collectives(self) -> list[int]:
        """Nodes of collectives in the order in which they start; a recomputed one is there twice."""
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
    moved: tuple[str, ...]
    """Collectives that a ``bucket`` line joined; for another line, those that start earlier or are awaited later."""
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
    """The graph as it runs under the policy; the same object where no line schedules anything."""
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
    times, traced_times = (None, None) if plan.shown_times is None else (order.times, order.traced_times)
    of_name = {order.facts.names[row]: block for row, block in enumerate(order.block_of)}
    blocks = tuple(of_name.get(name, -1) for name in order.traced.names) if of_name else ()
    traced = step_in_order(order.traced, order.traced_schedule, traced_times, blocks)
    limits = _limits(plan, traced.peak.bytes)
    planned = step_in_order(order.facts, order.schedule, times, order.block_of, limits)
    lines = [_bucket_line(plan, at, order.edits.of(at)) for at in bucket_statements(plan.policy)]
    for outcome in order.outcomes:
        span, left = outcome.statement.span, _by_reason(outcome.left.items())
        lines.append(LineInOrder(span.location, span.one_line, outcome.matched, outcome.moved, left))
    return Communication(
        traced=traced,
        planned=planned,
        lines=tuple(lines),
        collectives=_collectives(planned, order.block_names, lines),
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
    entries, bound = _collectives(step, plan.block_names), exposed_bound(plan.facts, times)
    return Communication(step, step, (), entries, bound, times.device.name)


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
    return [row for kind, row, _ in schedule if kind <= StepKind.SECOND_RUN and flags[row] & Flag.COLLECTIVE]


def kind_of(target: str) -> str:
    """The kind of a collective, ``all-gather``; of an unknown one the operator's name."""
    name = operator_name(target)
    kind = collective_kind(name)
    return name if kind is None else kind.value


def group_of(facts: Facts, row: int) -> str:
    """The mesh dimension that a collective sends over where one is known, else the name of its group."""
    group = facts.groups.get(facts.group_names[row])
    return (group.dim if group is not None else None) or facts.group_names[row]


def bucket_statements(policy: Policy) -> list[int]:
    """The indices of the buckets in ``Policy.rewrites``."""
    return [at for at, statement in enumerate(policy.rewrites) if isinstance(statement, Bucket)]


def _bucket_line(plan: Plan, statement: int, edits: Edits) -> LineInOrder:
    span = plan.policy.rewrites[statement].span
    members = tuple(name for edit in edits.done for name in edit.collectives)
    refused = [(name, refusal.reason) for refusal in edits.refused for name in refusal.collectives]
    carry = [tuple(node.name for node in edit.nodes if _communicates(node.target)) for edit in edits.done]
    matched = tuple(dict.fromkeys((*members, *(name for name, _ in refused))))
    joined = zip(carry, edits.done, strict=True)
    buckets = tuple(JoinedCollectives(names, edit.collectives, edit.proof) for names, edit in joined)
    return LineInOrder(span.location, span.one_line, matched, members, left=_by_reason(refused), buckets=buckets)


def _communicates(target: str) -> bool:
    return target not in WAITS and collective_kind(operator_name(target)) is not None and "c10d" in target


def _by_reason(left: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    found = defaultdict[str, list[str]](list)
    for name, reason in left:
        found[reason].append(name)
    return {reason: tuple(names) for reason, names in found.items()}


def _collectives(
    step: StepInOrder, block_names: Sequence[str], lines: Sequence[LineInOrder] = ()
) -> tuple[CollectiveEntry, ...]:
    facts = step.facts
    by_line, members = defaultdict[str, list[int]](list), dict[str, int]()
    for index, line in enumerate(lines):
        members |= {name: len(bucket.members) for bucket in line.buckets for name in bucket.names}
        for name in (name for bucket in line.buckets for name in bucket.names) if line.buckets else line.moved:
            by_line[name].append(index)
    runs = defaultdict[int, list[CollectiveRun]](list)
    for run in reversed(step.lanes.collectives if step.lanes is not None else ()):
        runs[run.row].append(run)
    found: list[CollectiveEntry] = []
    for row in step.collectives:
        block = step.block_of[row] if block_names and step.block_of else -1
        entry = CollectiveEntry(
            name=facts.names[row],
            operator=operator_name(facts.targets[row]),
            kind=kind_of(facts.targets[row]),
            group=group_of(facts, row),
            block=block_names[block] if block >= 0 else "",
            bytes=size_in_flight(facts, row),
            lines=tuple(by_line[facts.names[row]]),
            members=members.get(facts.names[row], 1),
            run=runs[row].pop() if runs[row] else None,
        )
        found.append(entry)
    return tuple(found)


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


def places_of(facts: Facts, schedule: Schedule, lanes: Lanes | None = None) -> dict[str, CollectivePlace]:
    """Each collective by its name, in the order in which they start; of one that runs twice, the first run. Goes from
    the last step to the first, so that the node that computes next is known."""
    streams, roots, names = streams_of(facts), facts.storage_roots, facts.names
    started, awaited = dict[int, tuple[int, str]](), dict[int, tuple[int | None, str]]()
    coming, never = "", (None, "")
    for at in range(len(schedule) - 1, -1, -1):
        row = schedule.rows[at]
        if schedule.kinds[at] > StepKind.SECOND_RUN:
            continue
        if row in streams.started:
            started[row] = at + 1, coming
        elif roots[row] == row:
            coming = names[row]
        for each in streams.awaited.get(row, ()):
            awaited[each] = at + 1, coming
    runs = {run.row: run for run in reversed(lanes.collectives if lanes is not None else ())}
    return {
        names[row]: CollectivePlace(names[row], *started[row], *awaited.get(row, never), runs.get(row))
        for row in reversed(started)
    }


@frozen
class LineStanding:
    """A line of the policy, as a node, a collective or another rule sees it."""

    source: str
    text: str
    standing: str
    """``decided``, ``overridden``, ``kept by the user`` or ``always saved``; of a collective ``joined``, ``moved``,
    ``left`` or ``not moved``; else ``no match``."""
    why: str = ""
    """The part of a rule that left the node out, or the rule that took it over; why a collective was left."""


@frozen
class PlacedCollective:
    """One collective of the step."""

    name: str
    """The name that was asked for."""
    operator: str
    group: str
    lines: tuple[LineStanding, ...]
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
    traced, planned = (places_of(each.facts, each.schedule, each.lanes) for each in (found.traced, found.planned))
    step = found.planned if now in found.planned.facts.index else found.traced
    row = step.facts.index[now]
    return PlacedCollective(
        name=name,
        operator=step.facts.targets[row],
        group=group_of(step.facts, row),
        lines=tuple(_standing(line, name, now) for line in found.lines),
        traced=traced.get(first),
        planned=planned.get(now),
        members=() if bucket is None else bucket.members,
    )


def _standing(line: LineInOrder, name: str, now: str) -> LineStanding:
    asked = {name, now}
    joined = [bucket for bucket in line.buckets if name in (*bucket.members, *bucket.names)]
    left = [reason for reason, names in line.left.items() if not asked.isdisjoint(names)]
    standing, why = "no match", ""
    if joined:
        standing, why = "joined", f"{len(joined[0].members):,} in one"
    elif left:
        standing, why = "left", left[0]
    elif not asked.isdisjoint(line.moved):
        standing = "moved"
    elif not asked.isdisjoint(line.matched):
        standing = "not moved"
    return LineStanding(line.source, line.text, standing, why)
