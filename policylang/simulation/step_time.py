"""The time of a training step: its operators one after the other, collectives and host copies beside them.

Computation runs on one stream, the collectives of each process group on one of their own, copies to the host and back
on one each way. What waits for a collective or a copy is *exposed*.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from policylang.graph.facts import Facts, Flag
from policylang.graph.schedule import Schedule, StepKind
from policylang.simulation.node_times import NodeTimes


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


def step_time(facts: Facts, schedule: Schedule, times: NodeTimes) -> StepTime:
    """The times of a step that runs in this order."""
    seconds: Sequence[float] = times.seconds
    host = times.device.host_bandwidth
    now = exposed = recomputed = 0.0
    free: dict[str, float] = {}
    done: dict[tuple[str, int, int], float] = {}

    def start(stream: str, key: tuple[str, int, int], length: float) -> None:
        free[stream] = max(now, free.get(stream, 0.0)) + length
        done[key] = free[stream]

    def wait(key: tuple[str, int, int]) -> None:
        nonlocal now, exposed
        until = done.get(key, now)
        if until > now:
            exposed += until - now
            now = until

    for kind, row, region in schedule:
        if kind in (StepKind.COPY_TO_HOST, StepKind.COPY_FROM_HOST):
            stream = "to host" if kind == StepKind.COPY_TO_HOST else "from host"
            start(stream, (stream, row, region), facts.bytes[row] / host if host else 0.0)
        elif kind == StepKind.WAIT_TO_HOST:
            wait(("to host", row, region))
        elif kind == StepKind.WAIT_FROM_HOST:
            wait(("from host", row, region))
        else:
            again = kind == StepKind.SECOND_RUN
            shown = region if again else 0
            recomputed += seconds[row] * again
            if facts.flags[row] & Flag.COLLECTIVE:
                start(f"group {facts.group_names[row]}", ("", row, shown), seconds[row])
            elif facts.owners[row] != row and facts.flags[facts.owners[row]] & Flag.COLLECTIVE:
                wait(("", facts.owners[row], shown))
            else:
                now += seconds[row]
    end = max((now, *free.values()))
    forward = sum(seconds[row] for row in facts.forward)
    return StepTime(forward, recomputed, end, exposed + end - now)
