"""What no order can hide of a graph's communication: lower bounds of its step, from data flow and streams alone.

A step computes one node after the other, so what it exposes is how much longer it takes than all computation. It takes
no less than any of its streams, computation and each process group: what runs on one runs one after the other, each
node not before the longest path that leads to it is over (its *head*), and then comes the longest path that follows it
(its *tail*). With preemption allowed, the node of the longest tail first is the best order of one stream (Jackson's
preemptive schedule; Carlier, "The one-machine sequencing problem", EJOR 1982), so its length is a bound. It holds for
every part of a stream alone: for what depends on a collective (what precedes the first such computation), for what
comes last (what follows the last computation), for a group that has more to send than there is to compute, and for the
longest path, which is the head, length and tail of each node on it.
"""

from __future__ import annotations

from heapq import heappop, heappush
from operator import itemgetter

from attrs import frozen

from policylang.graph.facts import Facts
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import streams_of

Job = tuple[float, float, float]
"""Head, length and tail of a node, in seconds."""


@frozen
class ExposedBound:
    """Seconds that every order of the same nodes exposes at least."""

    seconds: float
    """The most of the others: what an order is held against."""
    path: float
    """By how much the longest path exceeds all computation."""
    streams: dict[str, float]
    """By how much what runs on one stream, ``computation`` or ``group 0``, exceeds all computation, heads and tails
    included."""


def exposed_bounds(facts: Facts, times: NodeTimes) -> ExposedBound:
    """Of a graph each of whose calls runs once. O((nodes + edges) + nodes log nodes)."""
    jobs, longest = _jobs(facts, times)
    computed = sum(length for _, length, _ in jobs.get("computation", ()))
    ends = {stream: max(_preemptive(each) - computed, 0.0) for stream, each in sorted(jobs.items())}
    path = max(longest - computed, 0.0)
    return ExposedBound(max((path, *ends.values())), path, ends)


def exposed_bound(facts: Facts, times: NodeTimes) -> float:
    """Seconds that no order can hide, whatever it moves: the most of all the bounds of :func:`exposed_bounds`."""
    return exposed_bounds(facts, times).seconds


def _jobs(facts: Facts, times: NodeTimes) -> tuple[dict[str, list[Job]], float]:
    """The nodes that take time by stream, and the longest path."""
    streams, seconds, inputs = streams_of(facts), times.seconds, facts.inputs
    started, awaited = streams.started, streams.awaited
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    head, passed, over = [0.0] * len(facts), [0.0] * len(facts), [0.0] * len(facts)
    for row in calls:  # passed: when computation can go on past a row; over: when a collective can have ended
        begin = max((passed[each] for each in inputs[row]), default=0.0)
        head[row] = begin = max((begin, *(over[each] for each in awaited.get(row, ()))))
        passed[row] = begin if row in started else begin + seconds[row]
        over[row] = begin + seconds[row]
    after, tail, whole = [0.0] * len(facts), [0.0] * len(facts), [0.0] * len(facts)
    for row in reversed(calls):  # after: from when computation is past a row; tail: from a collective's end
        whole[row] = max(after[row] + (0.0 if row in started else seconds[row]), seconds[row] + tail[row])
        for each in inputs[row]:
            after[each] = max(after[each], whole[row])
        for each in awaited.get(row, ()):
            tail[each] = max(tail[each], whole[row]) if each < row else tail[each]
    jobs: dict[str, list[Job]] = {}
    for row in calls:
        if seconds[row]:
            follows = tail[row] if row in started else after[row]
            jobs.setdefault(started.get(row, "computation"), []).append((head[row], seconds[row], follows))
    return jobs, max((head[row] + whole[row] for row in calls), default=0.0)


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
