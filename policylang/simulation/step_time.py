"""The time of a training step: its operators one after the other, collectives and host copies beside them.

What waits for a collective or a copy is *exposed*. :mod:`policylang.simulation.streams` says what waits for what, and
:mod:`policylang.simulation.collective_runs` how each collective fares.
"""

from __future__ import annotations

from attrs import frozen

from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import walk


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
    """The times of a step that runs in this order; one pass over its steps."""
    walked = walk(facts, schedule, times)
    forward = sum(times.seconds[row] for row in facts.forward)
    return StepTime(forward, walked.recomputed, walked.end, walked.exposed)
