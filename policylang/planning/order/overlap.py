"""The list scheduler behind ``overlap``: collectives start early and are awaited late, by the time model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from attrs import frozen

from policylang.graph.facts import Facts
from policylang.planning.order.dependencies import Dependencies
from policylang.simulation.node_times import NodeTimes


@frozen
class OverlapLimits:
    """Bytes; None for no limit."""

    in_flight: int | None = None
    """Of collectives that are started and not awaited, at every step: of each, the more of what it is given and what it
    gives."""
    peak: int | None = None
    """Of the memory alive at every step, as :mod:`policylang.simulation.memory` counts it."""


def overlapped(
    facts: Facts,
    order: Sequence[int],
    dependencies: Dependencies,
    times: NodeTimes,
    movable: Collection[int],
    limits: OverlapLimits,
) -> list[int]:
    """The rows in the order that hides most of the time of the ``movable`` collectives, from the order given.

    Deterministic; O((nodes + edges) log nodes). No limit that the order given honours is exceeded at any step.
    """
    raise NotImplementedError
