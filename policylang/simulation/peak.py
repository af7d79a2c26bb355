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
    worst = [timeline.resident, timeline.resident]
    for live, half in zip(timeline.live, timeline.backward, strict=True):
        worst[half] = max(worst[half], live)
    moment = highest_moment(timeline)
    return Peak(worst[0], worst[1], facts.names[timeline.rows[moment]] if moment is not None else "")


def highest_moment(timeline: Timeline) -> int | None:
    """The entry of the timeline in which most is alive, the first of several; None where no step has more than what is
    there before."""
    most = max(timeline.live, default=0)
    return timeline.live.index(most) if most > timeline.resident else None
