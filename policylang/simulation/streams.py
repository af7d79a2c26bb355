"""The walk along a schedule that every account of time shares: computation on one stream, what is sent on others.

Computation runs on one stream, the collectives of each process group on one of their own, copies to the host and back
on one each way. A collective is *issued* when computation comes to it, starts once its stream is free, and is awaited
where the graph says so (``wait_tensor``), at the latest where something computes with what it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from attrs import define, field, frozen

from policylang.graph.facts import Facts, Flag
from policylang.graph.schedule import Schedule, StepKind
from policylang.graph.storage import returns_memory_of_input, storage_roots
from policylang.language.interruption.wanted import check_cancelled
from policylang.operators.names import GETITEM, WAITS
from policylang.simulation.collective_times import written_by
from policylang.simulation.node_times import NodeTimes

_SECOND_RUN = int(StepKind.SECOND_RUN)
_TO_HOST, _FROM_HOST = int(StepKind.COPY_TO_HOST), int(StepKind.COPY_FROM_HOST)
_AWAITED = {int(StepKind.WAIT_TO_HOST): _TO_HOST, int(StepKind.WAIT_FROM_HOST): _FROM_HOST}


@frozen(eq=False)
class Streams:
    started: Mapping[int, str]
    """Each collective that runs beside computation, and its stream."""
    awaited: Mapping[int, tuple[int, ...]]
    """The collectives that must be over before a row runs."""


@define(eq=False)
class RunLog:
    """What :func:`walk` notes of each run where it is asked to."""

    compute: list[tuple[int, int, float, float]] = field(factory=list)
    """Row, region (0 for a first run), start and end of what takes time."""
    sent: list[SentRun] = field(factory=list)
    """The runs of collectives, in the order in which they are issued."""
    run_of: dict[tuple[int, int], SentRun] = field(factory=dict)
    """By collective and region, 0 for a first run: the latest."""
    ends: dict[tuple[int, int], float] = field(factory=dict)
    """By row and region: when computation is done with it; of a collective, when it is issued."""


@define(eq=False)
class SentRun:
    """Seconds from the beginning of the step."""

    row: int
    region: int
    stream: str
    step: int
    """Its number in the schedule."""
    issued: float
    start: float
    end: float
    awaited: float | None = None
    """When computation first comes to something that waits for it."""
    read: float | None = None
    """When computation first comes to what reads it, past waits and views."""
    exposed: float = 0.0


@frozen
class Walked:
    """Seconds."""

    end: float
    exposed: float
    recomputed: float


_known: WeakKeyDictionary[Facts, Streams] = WeakKeyDictionary()


def streams_of(facts: Facts) -> Streams:
    """Worked out once for each facts."""
    found = _known.get(facts)
    if found is None:
        found = _known[facts] = _streams(facts)
    return found


def walk(facts: Facts, schedule: Schedule, times: NodeTimes, log: RunLog | None = None) -> Walked:
    """One pass over the steps; ``log`` is filled in where it is given."""
    check_cancelled()
    streams = streams_of(facts)
    started, awaited, seconds = streams.started, streams.awaited, times.seconds
    host = times.device.host_bandwidth
    now = exposed = recomputed = 0.0
    free: dict[str, float] = {}  # by stream, when it has done what was started on it
    done: dict[tuple[int, int], float] = {}  # by collective and region, 0 for a first run
    copied: dict[tuple[int, int, int], float] = {}
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
                    run = SentRun(row, again, stream, step, now, start, start + length)
                    log.sent.append(run)
                    log.run_of[row, again] = run
            else:
                if log is not None and length:
                    log.compute.append((row, again, now, now + length))
                now += length
            if log is not None:
                log.ends[row, again] = now
        elif kind in (_TO_HOST, _FROM_HOST):
            stream = "to the host" if kind == _TO_HOST else "from the host"
            over = max(now, free.get(stream, 0.0)) + (facts.bytes[row] / host if host else 0.0)
            free[stream] = copied[kind, row, region] = over
        else:
            until = max(now, copied.get((_AWAITED[kind], row, region), 0.0))
            exposed += until - now
            now = until
    end = max((now, *free.values()))
    if log is not None:
        _share_out_the_end(log, now, copied.values())
    return Walked(end, exposed + end - now, recomputed)


def _share_out(facts: Facts, log: RunLog, row: int, region: int, now: float, awaited: tuple[int, ...]) -> None:
    """What a row waits for: of each collective, what it takes longer than the one that ends before it."""
    runs = [log.run_of.get((each, region), log.run_of.get((each, 0))) for each in awaited]
    for run in sorted((each for each in runs if each is not None), key=lambda each: each.end):
        if run.awaited is None:
            run.awaited = now
        run.exposed += max(run.end - now, 0.0)
        now = max(now, run.end)
    if facts.targets[row] not in WAITS:
        for each in runs:
            if each is not None and each.read is None:
                each.read = now


def _share_out_the_end(log: RunLog, now: float, copies: object) -> None:
    """What is on the way when computation is over; of a copy to the host nothing is noted."""
    last = now
    under_way = [(run.end, run) for run in log.sent if run.end > now]
    over = [(end, None) for end in copies if end > now]  # type: ignore[attr-defined]
    for end, run in sorted((*under_way, *over), key=lambda each: each[0]):
        if run is not None:
            run.exposed += max(end - last, 0.0)
        last = max(last, end)
    for run in log.sent:
        run.awaited = now if run.awaited is None else run.awaited


def _streams(facts: Facts) -> Streams:
    """One pass over nodes and edges; a collective that computes as well runs among the computation."""
    flags, roots = facts.flags, storage_roots(facts)
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
            found = dict.fromkeys(
                each for read in facts.inputs[row] for each in writers.get(roots[read], ()) if each != row
            )
            if found:
                awaited[row] = tuple(found)
    return Streams(started, awaited)
