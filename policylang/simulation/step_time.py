"""The time of a training step: its operators one after the other, collectives and host copies beside them.

Computation runs on one stream, the collectives of each process group on one of their own, copies to the host and back
on one each way. What waits for a collective or a copy is *exposed*. A collective is awaited where the graph says so
(``wait_tensor``), and at the latest where something computes with what it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

from attrs import frozen

from policylang.graph.facts import Facts, Flag
from policylang.graph.schedule import Schedule, StepKind
from policylang.graph.storage import returns_memory_of_input, storage_roots
from policylang.operators.names import GETITEM, WAITS
from policylang.simulation.collective_times import written_by
from policylang.simulation.node_times import NodeTimes

_SECOND_RUN = int(StepKind.SECOND_RUN)
_TO_HOST, _AWAIT_TO_HOST = int(StepKind.COPY_TO_HOST), int(StepKind.WAIT_TO_HOST)
_FROM_HOST, _AWAIT_FROM_HOST = int(StepKind.COPY_FROM_HOST), int(StepKind.WAIT_FROM_HOST)


@frozen
class StepTime:
    """Seconds."""

    forward: float
    """Of the forward's operators, each run once, one after the other: what computes and what communicates."""
    recomputed: float
    """Of the operators that run a second time."""
    step: float
    """From the first operator to the last."""
    exposed: float
    """In which computation waits for a collective or a copy."""


@frozen(eq=False)
class Streams:
    """What runs beside computation."""

    started: Mapping[int, str]
    """Each collective that runs beside computation, and its stream."""
    awaited: Mapping[int, tuple[int, ...]]
    """The collectives that must be over before a row runs."""


_known: WeakKeyDictionary[Facts, Streams] = WeakKeyDictionary()


def step_time(facts: Facts, schedule: Schedule, times: NodeTimes) -> StepTime:
    """The times of a step that runs in this order; one pass over its steps."""
    streams = streams_of(facts)
    started, awaited, seconds = streams.started, streams.awaited, times.seconds
    host = times.device.host_bandwidth
    now = exposed = recomputed = 0.0
    free: dict[str, float] = {}  # by stream, when it has done what was started on it
    done: dict[tuple[int, int], float] = {}  # by collective and region, 0 for a first run
    copied: dict[tuple[int, int, int], float] = {}
    for kind, row, region in schedule:
        until = now
        if kind <= _SECOND_RUN:
            length = seconds[row]
            for each in awaited.get(row, ()):
                until = max(until, done.get((each, region), done.get((each, 0), 0.0)))
            exposed += until - now
            now = until
            if kind == _SECOND_RUN:
                recomputed += length
            if row in started:
                stream = started[row]
                over = max(now, free.get(stream, 0.0)) + length
                free[stream] = done[row, region if kind == _SECOND_RUN else 0] = over
            else:
                now += length
        elif kind in (_TO_HOST, _FROM_HOST):
            stream = "to the host" if kind == _TO_HOST else "from the host"
            over = max(now, free.get(stream, 0.0)) + (facts.bytes[row] / host if host else 0.0)
            free[stream] = copied[kind, row, region] = over
        else:
            copy = _TO_HOST if kind == _AWAIT_TO_HOST else _FROM_HOST
            until = max(now, copied.get((copy, row, region), 0.0))
            exposed += until - now
            now = until
    end = max((now, *free.values()))
    forward = sum(seconds[row] for row in facts.forward)
    return StepTime(forward, recomputed, end, exposed + end - now)


def streams_of(facts: Facts) -> Streams:
    """The collectives of a graph, and who waits for them; once for each facts."""
    if facts not in _known:
        _known[facts] = _streams(facts)
    return _known[facts]


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
