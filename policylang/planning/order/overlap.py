"""The list scheduler behind ``overlap``: collectives start early and are awaited late, by the time model.

:mod:`policylang.planning.order.hiding` makes an order. How far it may depart from the order given for the
best result depends on whether a step has more to compute or to send, so a few are made, each held against the others,
and against the order given, by the simulation itself. The best is then looked over once more, collective by collective.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property

from attrs import frozen

from policylang.graph.facts import Facts, Phase
from policylang.graph.schedule import Schedule, StepKind
from policylang.language.interruption.wanted import check_cancelled
from policylang.planning.order.dependencies import Dependencies
from policylang.planning.order.hiding.latest_starts import LatestStarts
from policylang.planning.order.hiding.list_scheduler import Leeway, ListScheduler
from policylang.planning.order.hiding.local_moves import LocalMoves
from policylang.planning.order.hiding.memory_ahead import Touches
from policylang.planning.order.hiding.units import Units, units
from policylang.simulation.exposed_bound import exposed_bound
from policylang.simulation.in_flight import in_flight, size_in_flight
from policylang.simulation.memory import simulate
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import walk

_COMPUTES = (
    Leeway(lag=2.0, fill=0.15, reach=0.1, close=0.02),
    Leeway(lag=10.0, fill=0.15, reach=0.1, close=0.02),
)
"""For steps that mostly compute."""
_SENDS = (
    Leeway(lag=0.5, fill=0.01, reach=0.06, close=0.01),
    Leeway(lag=0.5, fill=0.01, reach=0.06, close=0.01, nearest=True),
)
"""For steps that have more to send than to compute: what is computed ahead there only takes memory."""
_CAUTIOUS = Leeway(lag=0.0, fill=0.01, reach=0.06, close=0.01, holds=False)
"""Where none of the others keeps to the limits: nothing runs later than as given, so that no memory is held back."""
_TRIES = 3
"""An order that exceeds the limit on the peak is made again with one that is tighter by as much."""
_MOSTLY = 0.2
"""A step mostly sends that exposes so much at least, a share of all computation."""
_LARGE = 40_000
"""Of more nodes than this one order is made, and no others beside it."""
_ENOUGH = 1.01
"""An order that exposes at most so many times the lower bound, or"""
_HARDLY = 0.001
"""so small a share of all computation, ends the search."""


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

    Deterministic; O((nodes + edges) log nodes). No limit that the order given honours is exceeded at any step, and no
    more is exposed than in the order given. Collectives that may not move keep their order among themselves.
    """
    given = _Candidate(facts, [*order], times)
    read = units(facts, order, dependencies, times, movable)
    if not any(read.movable):
        return given.order
    touches, computed = Touches(facts, read), sum(read.seconds)
    sizes = [size_in_flight(facts, each) if each >= 0 else 0 for each in read.sent]
    bound = exposed_bound(facts, times)
    enough = max(_ENOUGH * bound, _HARDLY * computed)
    leeways = (*_SENDS, *_COMPUTES) if bound > _MOSTLY * computed else (*_COMPUTES, *_SENDS[:1])
    search = _Search(facts, times, read, given, limits)
    for leeway in leeways[:1] if len(order) > _LARGE else (*leeways, _CAUTIOUS):
        if leeway is _CAUTIOUS and search.best is not given:
            break
        starts, peak = LatestStarts(read, leeway.close, nearest=leeway.nearest), limits.peak
        for _ in range(_TRIES):
            excess = search.hold(ListScheduler(read, touches, starts, sizes, leeway, peak, limits.in_flight).run())
            if peak is None or excess <= 0:
                break
            peak -= excess
        if search.best.exposed <= enough:
            return search.best.order
    if len(order) <= _LARGE:
        LocalMoves(read, search.takes).improve(search.units)
    return search.best.order


class _Search:
    """The best order so far, and its units."""

    def __init__(self, facts: Facts, times: NodeTimes, units: Units, given: _Candidate, limits: OverlapLimits) -> None:
        self._facts, self._times, self._read = facts, times, units
        self._given, self._limits = given, limits
        self.best, self.units = given, [*range(len(units))]

    def hold(self, units: list[int]) -> int:
        """Keeps the best order so far. Of a better one that the limit on the peak rules out: the bytes over it."""
        check_cancelled()
        found = _Candidate(self._facts, self._read.in_rows(units), self._times)
        if found.exposed >= self.best.exposed:
            return 0
        if found.keeps(self._limits, self._given):
            self.best, self.units = found, units
            return 0
        return found.peak - self._limits.peak if self._limits.peak is not None else 0

    def takes(self, units: list[int]) -> bool:
        self.hold(units)
        return self.units is units


class _Candidate:
    """An order and what it comes to."""

    def __init__(self, facts: Facts, order: list[int], times: NodeTimes) -> None:
        self.facts, self.order = facts, order
        self.schedule = Schedule.of(
            (StepKind.FIRST_RUN, row, int(facts.phases[row] == Phase.BACKWARD)) for row in order
        )
        self.exposed = walk(facts, self.schedule, times).exposed

    def keeps(self, limits: OverlapLimits, given: _Candidate) -> bool:
        """Whether it honours each limit that the order given honours, and exceeds none by more than that does."""
        if limits.peak is not None and self.peak > limits.peak and self.peak > given.peak:
            return False
        most = limits.in_flight
        return most is None or self.most_in_flight <= most or self.most_in_flight <= given.most_in_flight

    @cached_property
    def peak(self) -> int:
        return max(simulate(self.facts, self.schedule).live, default=0)

    @cached_property
    def most_in_flight(self) -> int:
        return max(in_flight(self.facts, self.schedule), default=0)
