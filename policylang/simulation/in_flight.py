"""The bytes of collectives that are on the way at each step."""

from __future__ import annotations

from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule, StepKind
from policylang.simulation.streams import streams_of

_SECOND_RUN = int(StepKind.SECOND_RUN)


def in_flight(facts: Facts, schedule: Schedule) -> list[int]:
    """At each step, the bytes of the collectives that are started and not awaited; one that nobody awaits is on the way
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
    """Of a collective the more of what it is given and what it gives."""
    return max(facts.bytes[row], sum(facts.bytes[each] for each in facts.inputs[row]))
