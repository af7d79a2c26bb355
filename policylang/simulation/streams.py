"""The walk along a schedule that all timings share: computation on one stream, communication on others.

Computation runs on one stream, the collectives of each process group on a separate one, copies to the host and back on
one each. A collective is *issued* when computation reaches it, starts once its stream is free, and is awaited where the
graph says so (``wait_tensor``), at the latest where something computes with what it wrote.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from heapq import heappop, heappush
from itertools import chain
from math import inf
from operator import itemgetter
from typing import assert_never
from weakref import WeakKeyDictionary

from attrs import define, field, frozen

from policylang.graph.blocks import directions
from policylang.graph.facts import Facts, Flag, Schedule, StepKind, returns_memory_of_input
from policylang.language.cancellation import check_cancelled
from policylang.operators.names import GETITEM, WAITS
from policylang.simulation.memory import simulate
from policylang.simulation.node_times import NodeTimes, written_by

_SECOND_RUN = int(StepKind.SECOND_RUN)
_AWAITED = {StepKind.WAIT_TO_HOST: StepKind.COPY_TO_HOST, StepKind.WAIT_FROM_HOST: StepKind.COPY_FROM_HOST}


@frozen(eq=False)
class Streams:
    started: Mapping[int, str]
    """Each collective that runs beside computation, and its stream."""
    awaited: Mapping[int, tuple[int, ...]]
    """The collectives that must be over before a node runs."""


class ExposedBy(Enum):
    """Why a collective is exposed."""

    DATA = "data"
    """It starts as soon as what it reads is made, and is awaited where it is first read."""
    LIMIT = "limit"
    """A limit of the policy keeps it from starting earlier."""
    GROUP = "group"
    """Another collective of its group is in flight when it could start."""
    ORDER = "order"
    """Nothing but the order of the graph keeps it from starting earlier, or from being awaited later."""


@frozen
class ComputeRun:
    """Seconds from the beginning of the step."""

    row: int
    region: int
    """0 for a run in the forward."""
    start: float
    end: float
    conversion: StepKind | None = None
    """The step that narrows or widens the value, where this is one."""


@define
class CollectiveRun:
    """Seconds from the beginning of the step; a node of the facts."""

    row: int
    region: int
    """0 for a run in the forward."""
    stream: str
    """``group 0``."""
    step: int
    """Its number in the schedule."""
    issued: float
    """When computation reaches its start."""
    start: float
    """When its stream is free for it."""
    end: float
    awaited: float = inf
    """When computation first reaches something that waits for it."""
    read: float = inf
    """When computation first reaches a reader of it, past waits and views."""
    exposed: float = 0.0
    """Time that computation waits there. What several are awaited for at once is shared out from the first to end."""
    exposed_by: ExposedBy | None = None
    """The cause of the exposure; None where it is hidden."""


@define(eq=False)
class RunLog:
    """Notes of :func:`walk` on each run, where it is asked for them."""

    compute: list[ComputeRun] = field(factory=list)
    sent: list[CollectiveRun] = field(factory=list)
    """The runs of collectives, in the order in which they are issued."""
    run_of: dict[tuple[int, int], CollectiveRun] = field(factory=dict)
    """By collective and region, 0 for a first run: the latest."""
    copy_waits: list[tuple[int, float]] = field(factory=list)
    """The steps that wait for copies to the host and back, and how long."""
    ends: dict[tuple[int, int], float] = field(factory=dict)
    """By node and region: when computation is done with it; of a collective, when it is issued."""


@frozen
class Walked:
    """Seconds."""

    end: float
    exposed: float
    recomputed: float


_known: WeakKeyDictionary[Facts, Streams] = WeakKeyDictionary()


def streams_of(facts: Facts) -> Streams:
    """Worked out once for each facts."""
    if facts not in _known:
        _known[facts] = _streams(facts)
    return _known[facts]


def walk(facts: Facts, schedule: Schedule, times: NodeTimes, log: RunLog | None = None) -> Walked:
    """One pass over the steps; ``log`` is filled in where it is given."""
    check_cancelled()
    streams = streams_of(facts)
    started, awaited, seconds = streams.started, streams.awaited, times.seconds
    host = times.device.host_bandwidth
    now = exposed = recomputed = 0.0
    free: dict[str, float] = {}  # by stream, when it has done what was started on it
    done: dict[tuple[int, int], float] = {}  # by collective and region, 0 for a first run
    copied = defaultdict[tuple[StepKind, int], list[float]](list)  # the ends of copies that are not awaited
    for step, (kind, row, region) in enumerate(schedule):
        until = now
        if kind <= _SECOND_RUN:
            length = seconds[row]
            for each in awaited.get(row, ()):
                until = max(until, done.get((each, region), done.get((each, 0), 0.0)))
            if log is not None and row in awaited:
                _share_out(facts, log, row, region, now, awaited[row])
            exposed += until - now
            now = until
            again = region if kind == _SECOND_RUN else 0
            if kind == _SECOND_RUN:
                recomputed += length
            if row in started:
                stream = started[row]
                start = max(now, free.get(stream, 0.0))
                free[stream] = done[row, again] = start + length
                if log is not None:
                    run = CollectiveRun(row, again, stream, step, now, start, start + length)
                    log.sent.append(run)
                    log.run_of[row, again] = run
            else:
                if log is not None and length:
                    log.compute.append(ComputeRun(row, again, now, now + length))
                now += length
            if log is not None:
                log.ends[row, again] = now
            continue
        match StepKind(kind):
            case StepKind.COPY_TO_HOST | StepKind.COPY_FROM_HOST as copy:
                stream = "to the host" if copy is StepKind.COPY_TO_HOST else "from the host"
                over = max(now, free.get(stream, 0.0)) + (facts.bytes[row] / host if host else 0.0)
                free[stream] = over
                copied[copy, row].append(over)
            case StepKind.WAIT_TO_HOST | StepKind.WAIT_FROM_HOST as wait:
                ends = copied[_AWAITED[wait], row]
                until = max(now, ends.pop(0) if ends else 0.0)
                if log is not None and until > now:
                    log.copy_waits.append((step, until - now))
                exposed += until - now
                now = until
            case StepKind.SCALE | StepKind.NARROW | StepKind.WIDEN as conversion:  # value and form are read or written
                moved = facts.bytes[row] + schedule.step_bytes(facts, min(kind, StepKind.NARROW), row)
                now += times.device.overhead + moved / times.device.bandwidth.at(moved)
                if log is not None:
                    log.compute.append(ComputeRun(row, region, until, now, conversion))
            case StepKind.FIRST_RUN | StepKind.SECOND_RUN:
                pass
            case other:
                assert_never(other)
    end = max((now, *free.values()))
    if log is not None:
        _share_out_the_end(log, now, chain.from_iterable(copied.values()))
    return Walked(end, exposed + end - now, recomputed)


def _share_out(facts: Facts, log: RunLog, row: int, region: int, now: float, awaited: tuple[int, ...]) -> None:
    """Share out a wait among the collectives: each gets the time after the one that ends before it."""
    found = (log.run_of.get((each, region), log.run_of.get((each, 0))) for each in awaited)
    runs = sorted((each for each in found if each is not None), key=lambda each: each.end)
    for run in runs:
        run.awaited = min(run.awaited, now)
        run.exposed += max(run.end - now, 0.0)
        now = max(now, run.end)
    for run in runs if facts.targets[row] not in WAITS else ():
        run.read = min(run.read, now)


def _share_out_the_end(log: RunLog, now: float, copies: Iterable[float]) -> None:
    """Share out what is in flight when computation ends; copies to the host are not recorded."""
    last = now
    under_way = [*((run.end, run) for run in log.sent), *((end, None) for end in copies)]
    for end, run in sorted((each for each in under_way if each[0] > now), key=itemgetter(0)):
        if run is not None:
            run.exposed += end - last
        last = end
    for run in log.sent:
        run.awaited = min(run.awaited, now)


def _streams(facts: Facts) -> Streams:
    """One pass over nodes and edges; a collective that computes as well runs among the computation."""
    flags, roots = facts.flags, facts.storage_roots
    started = {
        row: f"group {facts.group_names[row]}"
        for row in range(len(facts))
        if flags[row] & Flag.COLLECTIVE and not facts.flops[row]
    }
    if not started:
        return Streams({}, {})
    writers: dict[int, list[int]] = {}
    for row in started:
        memory = {row, *(roots[each] for each in written_by(facts, row))} if flags[row] & Flag.WRITES else {row}
        for each in memory:
            writers.setdefault(each, []).append(row)
    awaited: dict[int, tuple[int, ...]] = {}
    for row, target in enumerate(facts.targets):
        if target == GETITEM:
            if facts.owners[row] in started:  # a piece of what a collective returns
                writers.setdefault(row, []).append(facts.owners[row])
        elif facts.ops[row] == "call_function" and (target in WAITS or not returns_memory_of_input(facts, row)):
            wrote = (each for read in facts.inputs[row] for each in writers.get(roots[read], ()))
            found = dict.fromkeys(each for each in wrote if each != row)
            if found:
                awaited[row] = tuple(found)
    return Streams(started, awaited)


@frozen
class StepTime:
    """Seconds."""

    forward: float
    """The forward's operators, each run once, one after the other: those that compute and those that communicate."""
    recomputed: float
    step: float
    """From the first operator to the last."""
    exposed: float
    """Seconds in which computation waits for a collective or a copy."""


def step_time(facts: Facts, schedule: Schedule, times: NodeTimes) -> StepTime:
    """The times of a step that runs in this order; one pass over its steps."""
    walked = walk(facts, schedule, times)
    forward = sum(times.seconds[row] for row in facts.forward)
    return StepTime(forward, walked.recomputed, walked.end, walked.exposed)


def in_flight(facts: Facts, schedule: Schedule) -> list[int]:
    """At each step, the bytes of the collectives that are started and not awaited; one that nobody awaits is in flight
    to the end. One pass over the steps."""
    streams = streams_of(facts)
    under_way: dict[tuple[int, int], int] = {}
    found, now = [], 0
    for kind, row, region in schedule:
        if kind <= _SECOND_RUN:
            for each in streams.awaited.get(row, ()):
                key = (each, region) if (each, region) in under_way else (each, 0)
                now -= under_way.pop(key, 0)
            if row in streams.started:
                size = size_in_flight(facts, row)
                under_way[row, region if kind == _SECOND_RUN else 0] = size
                now += size
        found.append(now)
    return found


def size_in_flight(facts: Facts, row: int) -> int:
    """The larger of a collective's inputs and its result."""
    return max(facts.bytes[row], sum(facts.bytes[each] for each in facts.inputs[row]))


@frozen(eq=False)
class Lanes:
    """A step drawn as lanes: what computes, and what is in flight beside it."""

    compute: Sequence[ComputeRun]
    collectives: Sequence[CollectiveRun]
    """In the order in which they are issued; a recomputed one is there twice."""
    step: float
    exposed: float
    """Time exposed by collectives and copies to the host and back."""


def lanes(
    facts: Facts, schedule: Schedule, times: NodeTimes, *, in_flight: int | None = None, peak: int | None = None
) -> Lanes:
    """One pass over the steps. ``in_flight`` and ``peak``: the limits, in bytes, that the order was made under; without
    them no exposure is attributed to a limit."""
    log = RunLog()
    walked = walk(facts, schedule, times, log)
    causes = _Causes(facts, schedule, log, in_flight, peak)
    least = 1e-12 * walked.end  # what rounding leaves
    for run in log.sent:
        run.exposed_by = causes.of(run) if run.exposed > least else None
    return Lanes(log.compute, log.sent, walked.end, walked.exposed)


class _Causes:
    """Finds why a collective is exposed, from the notes of the walk."""

    def __init__(self, facts: Facts, schedule: Schedule, log: RunLog, in_flight: int | None, peak: int | None) -> None:
        self.facts, self.log = facts, log
        self.in_flight, self.peak = in_flight, peak
        taken = _taken_along(facts)
        runs = ((row, region if kind == _SECOND_RUN else 0) for kind, row, region in schedule if kind <= _SECOND_RUN)
        self.made = {run: 0.0 if taken[run[0]] else log.ends[run] for run in runs}
        """By node and region, when its result is there; for what a collective takes along, from the beginning."""
        runs_of = (each for each in log.compute if each.conversion is None)
        of_data = [(each.row, each.start) for each in runs_of if self.made[each.row, each.region]]
        self.starts = [start for _, start in of_data]
        self.over = max((each.end for each in log.compute), default=0.0)
        if in_flight is not None or peak is not None:
            self._note_limits(schedule, {row for row, _ in of_data})

    def of(self, run: CollectiveRun) -> ExposedBy:
        if run.start > run.issued:
            return ExposedBy.GROUP
        facts, made = self.facts, self.made
        reads = (made.get((each, run.region), made.get((each, 0), 0.0)) for each in facts.inputs[run.row])
        if self._computes_between(max(reads, default=0.0), run.issued):
            return ExposedBy.LIMIT if self._is_full_before(run) else ExposedBy.ORDER
        is_late = self._computes_between(max(run.awaited, run.end), min(run.read, self.over))
        return ExposedBy.ORDER if is_late else ExposedBy.DATA

    def _computes_between(self, start: float, end: float) -> bool:
        """True if any computation begins in a stretch of time, what collectives take along aside."""
        at = bisect_left(self.starts, start)
        return at < len(self.starts) and self.starts[at] < end

    def _note_limits(self, schedule: Schedule, computing: set[int]) -> None:
        """For each step the last one before it that computes, and the bytes in flight and alive in each."""
        facts, self.before = self.facts, list[int]()
        last = -1
        for step, (kind, row, _) in enumerate(schedule):
            self.before.append(last)
            if kind <= StepKind.SECOND_RUN and row in computing:
                last = step
        self.sent = in_flight(facts, schedule)
        timeline = simulate(facts, schedule)
        self.live = dict(zip(timeline.steps, timeline.live, strict=True))

    def _is_full_before(self, run: CollectiveRun) -> bool:
        """True if a limit would be exceeded had it been started before what computes last ahead of it."""
        if self.in_flight is None and self.peak is None:
            return False
        before, facts = self.before[run.step], self.facts
        if before < 0:
            return False
        if self.in_flight is not None and self.sent[before] + size_in_flight(facts, run.row) > self.in_flight:
            return True
        return self.peak is not None and self.live[before] + facts.bytes[run.row] > self.peak


def _taken_along(facts: Facts) -> bytearray:
    """1 for what is made of inputs alone and read by collectives alone: a shard's cast moves with its gather."""
    started, ops = streams_of(facts).started, facts.ops
    of_inputs, taken = bytearray(len(facts)), bytearray(len(facts))
    for row, op in enumerate(ops):
        made_of_inputs = row not in started and all(of_inputs[each] for each in facts.inputs[row])
        of_inputs[row] = op != "call_function" or made_of_inputs
    for row in range(len(facts) - 1, -1, -1):
        users = facts.users[row]
        taken[row] = of_inputs[row] and bool(users) and all(each in started or taken[each] for each in users)
    return taken


Job = tuple[float, float, float]
"""Head, length and tail of a node, in seconds."""


@frozen
class ExposedBound:
    """Seconds that every order of the same nodes exposes at least."""

    seconds: float
    """The largest of the others in each direction, added up: the bound that an order is compared with."""
    path: float
    """The longest path of each direction less its computation."""
    streams: dict[str, float]
    """By stream, ``computation`` or ``group 0``, its work with heads and tails, less all computation."""


def exposed_bounds(facts: Facts, times: NodeTimes) -> ExposedBound:
    """Lower bounds of what any order exposes, for a graph each of whose calls runs once, from data flow and streams.

    A step runs one node after the other, and its directions, forward and backward, one after the other, so what it
    exposes is how much longer each of them takes than its computation. A direction takes no less than any of its
    streams: what runs on one runs one after the other, each node not before the longest path that leads to it is over
    (its *head*), and then comes the longest path that follows it (its *tail*). With preemption allowed, the node of the
    longest tail first is the best order of one stream (Jackson's preemptive schedule; Carlier, "The one-machine
    sequencing problem", EJOR 1982), so its length is a bound. O((nodes + edges) + nodes log nodes)."""
    seconds = path = 0.0
    streams: dict[str, float] = {}
    for jobs, longest in _jobs(facts, times):
        computed = sum(length for _, length, _ in jobs.get("computation", ()))
        ends = {stream: max(_preemptive(each) - computed, 0.0) for stream, each in sorted(jobs.items())}
        seconds += max((longest - computed, *ends.values(), 0.0))
        path += max(longest - computed, 0.0)
        for stream, end in ends.items():
            streams[stream] = streams.get(stream, 0.0) + end
    return ExposedBound(seconds, path, streams)


def exposed_bound(facts: Facts, times: NodeTimes) -> float:
    """Seconds that no order can hide, whatever it moves: the most of all the bounds of :func:`exposed_bounds`."""
    return exposed_bounds(facts, times).seconds


def _jobs(facts: Facts, times: NodeTimes) -> list[tuple[dict[str, list[Job]], float]]:
    """For each direction the nodes that take time by stream, and the longest path. A collective that its own direction
    does not await, and another follows, may take its time there: it counts in none."""
    streams, seconds, turns = streams_of(facts), list(times.seconds), directions(facts)
    started = streams.started
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    inputs = {row: [each for each in facts.inputs[row] if turns[each] == turns[row]] for row in calls}
    awaited = {row: [each for each in waits if turns[each] == turns[row]] for row, waits in streams.awaited.items()}
    last, waited = max((turns[row] for row in calls), default=0), set(chain.from_iterable(awaited.values()))
    for row in started:
        if turns[row] != last and row not in waited:
            seconds[row] = 0.0
    head, passed, over = [0.0] * len(facts), [0.0] * len(facts), [0.0] * len(facts)
    for row in calls:  # passed: when computation can continue past a node; over: when a collective can have ended
        begin = max((passed[each] for each in inputs[row]), default=0.0)
        head[row] = begin = max((begin, *(over[each] for each in awaited.get(row, ()))))
        passed[row] = begin if row in started else begin + seconds[row]
        over[row] = begin + seconds[row]
    after, tail, whole = [0.0] * len(facts), [0.0] * len(facts), [0.0] * len(facts)
    for row in reversed(calls):  # after: from when computation is past a node; tail: from a collective's end
        whole[row] = max(after[row] + (0.0 if row in started else seconds[row]), seconds[row] + tail[row])
        for each in inputs[row]:
            after[each] = max(after[each], whole[row])
        for each in awaited.get(row, ()):
            tail[each] = max(tail[each], whole[row]) if each < row else tail[each]
    found: dict[int, dict[str, list[Job]]] = {}
    longest: dict[int, float] = {}
    for row in calls:
        turn = turns[row]
        longest[turn] = max(longest.get(turn, 0.0), head[row] + whole[row])
        if seconds[row]:
            follows = tail[row] if row in started else after[row]
            stream = found.setdefault(turn, {}).setdefault(started.get(row, "computation"), [])
            stream.append((head[row], seconds[row], follows))
    return [(found.get(turn, {}), longest[turn]) for turn in sorted(longest)]


def _preemptive(jobs: list[Job]) -> float:
    """When the last tail is over if, of what is ready, the longest tail always goes first."""
    waiting = sorted(jobs, key=itemgetter(0))
    ready: list[tuple[float, float]] = []  # tail, negative, and what is left
    now = end = 0.0
    at = 0
    while ready or at < len(waiting):
        if not ready:
            now = max(now, waiting[at][0])
        while at < len(waiting) and waiting[at][0] <= now:
            _, length, tail = waiting[at]
            heappush(ready, (-tail, length))
            at += 1
        tail, left = heappop(ready)
        until = now + left
        if at < len(waiting) and waiting[at][0] < until:
            heappush(ready, (tail, until - waiting[at][0]))
            now = waiting[at][0]
        else:
            now = until
            end = max(end, now - tail)
    return end
