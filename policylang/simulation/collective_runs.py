"""How each collective of a step fares: when it starts, ends and is awaited, what is exposed of it, and what bounds it.

The same walk as :mod:`policylang.simulation.step_time`, which gives the totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from attrs import frozen

from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule
from policylang.simulation.node_times import NodeTimes


class ExposedBy(Enum):
    """Why a collective is exposed."""

    DATA = "data"
    """It starts as soon as what it reads is made, and is awaited where it is first read."""
    LIMIT = "limit"
    """A limit of the policy keeps it from starting earlier."""
    GROUP = "group"
    """Another collective of its group is on the way when it could start."""
    ORDER = "order"
    """Nothing but the order of the graph keeps it from starting earlier, or from being awaited later."""


@frozen
class CollectiveRun:
    """Seconds from the beginning of the step; a row of the facts."""

    row: int
    stream: str
    """``group 0``."""
    issued: float
    """When computation comes to its start."""
    start: float
    """When its stream is free for it."""
    end: float
    awaited: float
    """When computation comes to its wait."""
    exposed: float
    """How long computation waits there. What several are awaited for at once is shared out from the first to end."""
    exposed_by: ExposedBy | None
    """What keeps it exposed; None where it is hidden."""


@frozen
class ComputeRun:
    row: int
    start: float
    end: float


@frozen(eq=False)
class Lanes:
    """A step drawn as lanes: what computes, and what is on the way beside it."""

    compute: Sequence[ComputeRun]
    collectives: Sequence[CollectiveRun]
    step: float
    exposed: float


def lanes(facts: Facts, schedule: Schedule, times: NodeTimes) -> Lanes:
    """One pass over the steps."""
    raise NotImplementedError


def exposed_bound(facts: Facts, times: NodeTimes) -> float:
    """Seconds that no order can hide, whatever it moves: what precedes the first computation that depends on a
    collective, what follows the last computation, and by how much the communication of a group exceeds all
    computation."""
    raise NotImplementedError
