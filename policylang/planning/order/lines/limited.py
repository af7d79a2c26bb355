"""``overlap`` within its limits: what it comes to, that the limits hold, and which would let it do something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from attrs import evolve, frozen

from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule
from policylang.language.syntax import Overlap, Quantity
from policylang.language.wording import figure
from policylang.planning.order.dependencies import Dependencies
from policylang.planning.order.lines.named import Picked
from policylang.planning.order.overlap import OverlapLimits, overlapped
from policylang.planning.order.reading.roles import Progress
from policylang.simulation.in_flight import size_in_flight
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.peak import estimate_peak

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
