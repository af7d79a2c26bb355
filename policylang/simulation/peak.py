"""Peak memory of a training step: the highest points of its simulated timeline."""

from __future__ import annotations

from attrs import frozen

from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule
from policylang.simulation.memory import Timeline, simulate


@frozen
class Peak:
    """Bytes; ``forward`` and ``backward`` are the worst moments of each half, and ``at`` the node of the worse one."""

    forward: int
    backward: int
    at: str

    @property
    def bytes(self) -> int:
        return max(self.forward, self.backward)


def estimate_peak(facts: Facts, schedule: Schedule) -> Peak:
    """The worst moments of forward and backward in a step that runs in this order."""
    return peak_of(simulate(facts, schedule), facts)


def peak_of(timeline: Timeline, facts: Facts) -> Peak:
    """The worst moments; what is resident where one half has no step."""
    worst, at = [timeline.resident, timeline.resident], [-1, -1]
    for step, live in enumerate(timeline.live):
        half = timeline.backward[step]
        if live > worst[half]:
            worst[half], at[half] = live, step
    step = at[0] if worst[0] >= worst[1] else at[1]
    return Peak(worst[0], worst[1], facts.names[timeline.rows[step]] if step >= 0 else "")
