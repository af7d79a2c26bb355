"""A finished order made better by moving single collectives: those that stay exposed most start earlier, or what is on
their stream before them goes after them.

A list scheduler decides once and goes by what is urgent. So a long collective whose stream others need one after the
other, as the second gather of a head's weight beside those of tensor parallelism, comes last, where nothing is computed
beside it. The best place for it is right behind the collective after which most is computed until the next one.


---

The list scheduler behind ``overlap``: collectives start early and are awaited late, by the time model.

:mod:`policylang.planning.order.hiding` makes an order. How far it may depart from the order given for the
best result depends on whether a step has more to compute or to send, so a few are made, each held against the others,
and against the order given, by the simulation itself. The best is then looked over once more, collective by collective.


---

``overlap`` within its limits: what it comes to, that the limits hold, and which would let it do something."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from heapq import nlargest

from attrs import evolve, frozen

from policylang.graph.facts import Facts, Phase
from policylang.graph.schedule import Schedule, StepKind
from policylang.language.figures import figure
from policylang.language.interruption.wanted import stop_unless_wanted
from policylang.language.syntax import Overlap, Quantity
from policylang.planning.order.dependencies import Dependencies, Progress
from policylang.planning.order.list_scheduler import Leeway, ListScheduler
from policylang.planning.order.memory_ahead import Touches
from policylang.planning.order.scheduler_nodes import LatestStarts, Units, units
from policylang.planning.order.selected_collectives import Picked
from policylang.simulation.exposed_bound import exposed_bound
from policylang.simulation.in_flight import in_flight, size_in_flight
from policylang.simulation.memory import simulate
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.peak import estimate_peak
from policylang.simulation.streams import walk

_EXPOSED = 6
"""How many of the most exposed collectives are tried in a round."""
_PLACES = 4
"""How many earlier places each is tried at."""
_STEPS = 400_000
"""How many units all tries together walk along; that bounds them on large graphs."""
_REFUSED = 3
"""The search ends when so many shorter steps were refused."""
_LEAST = 1e-3
"""A try is worth it that shortens the step by this share of what is exposed."""


class LocalMoves:
    """``accepts``: whether an order may stand in place of the one before, as by its limits."""

    def __init__(self, units: Units, accepts: Callable[[list[int]], bool]) -> None:
        self._units, self._accepts = units, accepts
        self._total = sum(units.seconds)
        self._left, self._refused = _STEPS // max(len(units), 1), 0

    def improve(self, order: Sequence[int]) -> list[int]:
        """The best order found; the one given where none is better. O(1) walks for each of O(1) moves of a round, and
        at most a set number of units in all."""
        best = [*order]
        end, exposed = self._walk(best)
        while self._left > 0:
            found = self._step(best, end, exposed)
            if found is None:
                break
            best = found
            end, exposed = self._walk(best)
        return best

    def _step(self, order: list[int], end: float, exposed: Sequence[float]) -> list[int] | None:
        place = {unit: at for at, unit in enumerate(order)}
        worst = nlargest(
            _EXPOSED, (unit for unit, each in enumerate(exposed) if each > 0), key=lambda unit: (exposed[unit], -unit)
        )
        enough = end - _LEAST * (end - self._total)
        for unit in worst:
            for start, stop, rest in self._moves(order, place, unit):
                if self._left <= 0 or self._refused >= _REFUSED:
                    return None
                found = [*order[:start], *rest, *order[stop:]]
                if self._walk(found)[0] < enough:
                    if self._accepts(found):
                        return found
                    self._refused += 1
        return None

    def _moves(self, order: list[int], place: dict[int, int], unit: int) -> list[tuple[int, int, list[int]]]:
        """Stretches of the order, and what is to stand there instead, the most promising first."""
        units, at = self._units, place[unit]
        found: list[tuple[int, int, list[int]]] = []
        previous = -1
        if units.movable[unit]:
            first = 1 + max((place[each] for each in (*units.before[unit], *units.awaits[unit])), default=-1)
            holes: list[tuple[float, int]] = []  # seconds computed from a place to the next collective of the stream
            beside = 0.0
            for before in range(at - 1, first - 1, -1):
                each = order[before]
                if each < 0:
                    continue
                if units.streams[each] == units.streams[unit]:
                    holes.append((beside, before + 1))
                    beside = 0.0
                beside += units.seconds[each]
            holes.append((beside, first))
            for _, start in nlargest(_PLACES, holes):
                if start < at:
                    found.append((start, at + 1, [unit, *order[start:at]]))
        for before in range(at - 1, -1, -1):
            each = order[before]
            if each >= 0 and units.streams[each] == units.streams[unit]:
                previous = each
                break
        if previous >= 0 and units.movable[previous]:
            readers = (place[each] for each in units.after[previous])
            start = place[previous]
            if min(readers, default=len(order)) > at and place.get(~previous, len(order)) > at:
                found.append((start, at + 1, [*order[start + 1 : at + 1], previous]))
        return found

    def _walk(self, order: Sequence[int]) -> tuple[float, list[float]]:
        """The length of the step, and how long computation waits for each collective."""
        stop_unless_wanted()
        self._left -= 1
        units = self._units
        now = 0.0
        seconds, awaits, sent, lengths, streams = units.seconds, units.awaits, units.sent, units.lengths, units.streams
        over, exposed = [0.0] * len(units), [0.0] * len(units)
        free: dict[str, float] = {}
        for unit in order:
            for each in (~unit,) if unit < 0 else awaits[unit]:
                if over[each] > now:
                    exposed[each] += over[each] - now
                    now = over[each]
            if unit < 0:
                continue
            now += seconds[unit]
            if sent[unit] >= 0:
                over[unit] = free[streams[unit]] = max(now, free.get(streams[unit], 0.0)) + lengths[unit]
        for unit, ended in enumerate(over):
            exposed[unit] += max(ended - now, 0.0)
        return max((now, *free.values())), exposed


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
        stop_unless_wanted()
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


_ATTEMPTS = 3
_HALVINGS = 8


@frozen
class TooTight:
    """A limit within which nothing can be moved."""

    statement: Overlap
    limit: Quantity
    least: int | None
    """The smallest that would let something move, in bytes; None where it was not found."""


class Limited:
    """The ``overlap`` lines of one policy on one graph, planned as one."""

    def __init__(
        self,
        facts: Facts,
        needs: Dependencies,
        times: NodeTimes,
        picked: Sequence[Picked],
        scheduled: Callable[[Sequence[int]], Schedule],
        traced_peak: Callable[[], int],
    ) -> None:
        """``scheduled``: the steps of calls in some order, copies to the host and back between them;
        ``traced_peak``: bytes, of the order as traced."""
        self._facts, self._needs, self._times = facts, needs, times
        self._mine = [each for each in picked if isinstance(each.statement, Overlap)]
        self._scheduled, self._traced_peak = scheduled, traced_peak
        self._named = sorted({row for each in self._mine for row in each.taken})
        self.too_tight: list[TooTight] = []
        self.too_large: dict[int, str] = {}
        """Collectives that are more than the limit of bytes in flight by themselves, and that as a phrase."""

    @cached_property
    def limits(self) -> OverlapLimits:
        """The tightest of all lines; that of the peak in bytes alive, not in bytes more than as traced."""
        statements = [each.statement for each in self._mine if isinstance(each.statement, Overlap)]
        in_flight = [int(each.in_flight.value) for each in statements if each.in_flight is not None]
        peaks = [self._peak_limit(each.peak) for each in statements if each.peak is not None]
        return OverlapLimits(min(in_flight, default=None), min(peaks, default=None))

    def _peak_limit(self, within: Quantity) -> int:
        more = within.value * self._traced_peak() if within.dimension == "fraction" else within.value
        return self._traced_peak() + int(more)

    def order(self, order: Sequence[int]) -> list[int]:
        """The calls in the order that hides most, from the order given; that order itself where nothing may move."""
        self.movable = self._small_enough(self.limits.in_flight)
        if not self.movable:
            return list(order)
        found = self._within(order, self.limits)
        if not self._moves(order, found):
            self._explain(order)
        return found

    def _small_enough(self, limit: int | None) -> list[int]:
        sizes = {row: size_in_flight(self._facts, row) for row in self._named}
        if limit is None or not sizes:
            return self._named
        for row, size in sizes.items():
            if size > limit:
                self.too_large[row] = f"it is {figure(size, 'bytes')}, more than may be in flight"
        if len(self.too_large) == len(sizes):
            self._too_tight("in_flight", limit, min(sizes.values()))
        return [row for row in self._named if row not in self.too_large]

    def _within(self, order: Sequence[int], limits: OverlapLimits) -> list[int]:
        """A schedule that keeps to its limits with the copies to the host and back between its steps: the scheduler
        counts none of them, so that its own limit is by so much tighter."""
        if limits.peak is None:
            return self._overlapped(order, limits)
        alone = self._peak(Schedule.of((0, row, 0) for row in order)) if self._copies(order) else None
        own = limits.peak if alone is None else limits.peak + alone - self._peak(self._scheduled(order))
        for _ in range(_ATTEMPTS):
            found = self._overlapped(order, evolve(limits, peak=own))
            excess = self._peak(self._scheduled(found)) - limits.peak
            if excess <= 0:
                return found
            own -= excess
        return list(order)

    def _overlapped(self, order: Sequence[int], limits: OverlapLimits) -> list[int]:
        return overlapped(self._facts, order, self._needs, self._times, self.movable, limits)

    def _copies(self, order: Sequence[int]) -> bool:
        return len(self._scheduled(order)) > len(order)

    def _peak(self, schedule: Schedule) -> int:
        return estimate_peak(self._facts, schedule).bytes

    # --- limits within which nothing moves ---

    def _moves(self, order: Sequence[int], found: Sequence[int]) -> bool:
        before, after = Progress(self._facts, order), Progress(self._facts, found)
        return any(after.shifted(row, before) for row in self.movable)

    def _moves_within(self, order: Sequence[int], limits: OverlapLimits) -> bool:
        return self._moves(order, self._within(order, limits))

    def _explain(self, order: Sequence[int]) -> None:
        """The limit that keeps everything where it is, where one does."""
        limits = self.limits
        if limits == OverlapLimits() or not self._moves_within(order, OverlapLimits()):
            return
        if limits.in_flight is not None and (
            limits.peak is None or not self._moves_within(order, evolve(limits, peak=None))
        ):
            sizes = sorted({size_in_flight(self._facts, row) for row in self._named})
            larger = [size for size in sizes if size > limits.in_flight]
            least = self._least(larger, lambda size: self._moves_within(order, OverlapLimits(in_flight=size)))
            self._too_tight("in_flight", limits.in_flight, least)
        if limits.peak is not None and not self._moves_within(order, evolve(limits, in_flight=None)):
            most = self._peak(self._scheduled(self._overlapped(order, OverlapLimits())))
            step = max((most - limits.peak) >> _HALVINGS, 1)
            larger = [*range(limits.peak + step, most, step), most]
            least = self._least(larger, lambda peak: self._moves_within(order, OverlapLimits(peak=peak)))
            self._too_tight("peak", limits.peak, None if least is None else least - self._traced_peak())

    def _least(self, sizes: Sequence[int], moves: Callable[[int], bool]) -> int | None:
        """The first of some sizes that lets something move, all that are larger doing so too."""
        low, high = 0, len(sizes) - 1
        if high < 0 or not moves(sizes[high]):
            return None
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if moves(sizes[middle]) else (middle + 1, high)
        return sizes[low]

    def _too_tight(self, which: str, limit: int, least: int | None) -> None:
        for each in self._mine:
            statement = each.statement
            assert isinstance(statement, Overlap)
            asked: Quantity | None = getattr(statement, which)
            if asked is None or statement.optional:
                continue
            own = int(asked.value) if which == "in_flight" else self._peak_limit(asked)
            if own == limit:
                self.too_tight.append(TooTight(statement, asked, least))
