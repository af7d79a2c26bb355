"""``overlap``: collectives start early and are awaited late, by the time model, within limits.

:mod:`policylang.planning.order.list_scheduler` makes an order. How far it should depart from the given order depends
on whether a step has more to compute or to send, so a few orders are made, and the simulation compares them with each
other and with the given one. The best is then improved by moving single collectives (:class:`LocalMoves`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from heapq import nlargest

from attrs import evolve, frozen

from policylang.graph.facts import Facts, Phase, Schedule, StepKind
from policylang.language.cancellation import check_cancelled
from policylang.language.shown import format_quantity
from policylang.language.syntax import Overlap, Quantity
from policylang.planning.order.dependencies import ComputeProgress, Dependencies
from policylang.planning.order.list_scheduler import Leeway, ListScheduler
from policylang.planning.order.moves import SelectedCollectives
from policylang.planning.order.scheduler_nodes import BufferUses, LatestStarts, SchedulerNodes, scheduler_nodes
from policylang.simulation.memory import estimate_peak, simulate
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import exposed_bound, in_flight, size_in_flight, walk

_EXPOSED = 6  # the number of the most exposed collectives tried in a round
_PLACES = 4  # the number of earlier places each is tried at
_STEPS = 400_000  # the nodes that all tries together walk along, in
_WALKS = 12  # so many tries at least: as many however deep the model, since what they mend is outside its layers
_REFUSED = 3  # the search ends when so many shorter steps were refused
_LEAST = 1e-3  # a try has to shorten the step by this share of what is exposed
_COMPUTES = (Leeway(lag=2.0, fill=0.15, reach=0.1, close=0.02), Leeway(lag=10.0, fill=0.15, reach=0.1, close=0.02))
"""For steps that mostly compute."""
_SENDING = Leeway(lag=0.5, fill=0.01, reach=0.06, close=0.01)
_SENDS = (_SENDING, evolve(_SENDING, nearest=True))
"""For steps that have more to send than to compute: what is computed ahead there only takes memory."""
_CAUTIOUS = Leeway(lag=0.0, fill=0.01, reach=0.06, close=0.01, holds=False)
"""Used if no other leeway keeps within the limits: nothing runs later than given, so that no memory is held longer."""
_TRIES = 3  # an order that exceeds the limit on the peak is computed again with a limit tighter by the excess
_MOSTLY = 0.2  # a step mostly sends that exposes at least this share of all computation
_ENOUGH = 1.01  # the search ends with an order that exposes at most so many times the lower bound, or
_HARDLY = 0.001  # at most this share of all computation
_HALVINGS = 8


class LocalMoves:
    """Improves a finished order: the most exposed collectives start earlier, or swap with the one before them.

    A list scheduler decides once, by urgency. A long collective on a stream that others need one after the other, such
    as the second gather of a head's weight beside those of tensor parallelism, is scheduled last, with no computation
    left to hide it. Its best place is right after the collective followed by the most computation. ``accepts``: returns
    True if a shorter order may replace the last one.
    """

    def __init__(self, nodes: SchedulerNodes, accepts: Callable[[list[int]], bool]) -> None:
        self._nodes, self._accepts = nodes, accepts
        self._total = sum(nodes.seconds)
        self._left, self._refused = max(_STEPS // max(len(nodes), 1), _WALKS), 0

    def improve(self, order: Sequence[int]) -> list[int]:
        """The best order found, or the given one. Walks along a bounded number of nodes in all."""
        found: list[int] | None = [*order]
        while found is not None:
            best = found
            end, exposed = self._walk(best)
            found = self._step(best, end, exposed) if self._left > 0 else None
        return best

    def _step(self, order: list[int], end: float, exposed: Sequence[float]) -> list[int] | None:
        place = {node: at for at, node in enumerate(order)}
        candidates = (node for node, each in enumerate(exposed) if each > 0)
        worst = nlargest(_EXPOSED, candidates, key=lambda node: (exposed[node], -node))
        enough = end - _LEAST * (end - self._total)
        for node in worst:
            for start, stop, rest in self._moves(order, place, node):
                if self._left <= 0 or self._refused >= _REFUSED:
                    return None
                found = [*order[:start], *rest, *order[stop:]]
                if self._walk(found)[0] < enough:
                    if self._accepts(found):
                        return found
                    self._refused += 1
        return None

    def _moves(self, order: list[int], place: dict[int, int], node: int) -> list[tuple[int, int, list[int]]]:
        """Ranges of the order, and what replaces each, the most promising first."""
        nodes, at = self._nodes, place[node]
        found: list[tuple[int, int, list[int]]] = []
        previous = -1
        if nodes.movable[node]:
            first = 1 + max((place[each] for each in (*nodes.before[node], *nodes.awaits[node])), default=-1)
            holes: list[tuple[float, int]] = []  # seconds computed from a place to the next collective of the stream
            beside = 0.0
            for before in range(at - 1, first - 1, -1):
                each = order[before]
                if each < 0:
                    continue
                if nodes.streams[each] == nodes.streams[node]:
                    holes.append((beside, before + 1))
                    beside = 0.0
                beside += nodes.seconds[each]
            holes.append((beside, first))
            for _, start in nlargest(_PLACES, holes):
                if start < at:
                    found.append((start, at + 1, [node, *order[start:at]]))
        for before in range(at - 1, -1, -1):
            each = order[before]
            if each >= 0 and nodes.streams[each] == nodes.streams[node]:
                previous = each
                break
        if previous >= 0 and nodes.movable[previous]:
            readers = (place[each] for each in nodes.after[previous])
            start = place[previous]
            if min(readers, default=len(order)) > at and place.get(~previous, len(order)) > at:
                found.append((start, at + 1, [*order[start + 1 : at + 1], previous]))
        return found

    def _walk(self, order: Sequence[int]) -> tuple[float, list[float]]:
        """The seconds of the step, and those for which computation waits for each collective."""
        check_cancelled()
        self._left -= 1
        nodes = self._nodes
        now = 0.0
        seconds, awaits, sent, lengths, streams = nodes.seconds, nodes.awaits, nodes.sent, nodes.lengths, nodes.streams
        over, exposed = [0.0] * len(nodes), [0.0] * len(nodes)
        free: dict[str, float] = {}
        for node in order:
            for each in (~node,) if node < 0 else awaits[node]:
                if over[each] > now:
                    exposed[each] += over[each] - now
                    now = over[each]
            if node < 0:
                continue
            now += seconds[node]
            if sent[node] >= 0:
                over[node] = free[streams[node]] = max(now, free.get(streams[node], 0.0)) + lengths[node]
        for node, ended in enumerate(over):
            if ended > now:
                exposed[node] += ended - now
        return max((now, *free.values())), exposed


@frozen
class OverlapLimits:
    """Bytes at every step; None for no limit."""

    in_flight: int | None = None
    """Bytes of collectives in flight: of each, the larger of its inputs and its results."""
    peak: int | None = None
    """Bytes alive, as :mod:`policylang.simulation.memory` counts them."""


def overlapped(
    facts: Facts,
    order: Sequence[int],
    dependencies: Dependencies,
    times: NodeTimes,
    movable: Collection[int],
    limits: OverlapLimits,
) -> list[int]:
    """The nodes in the order that hides most of the time of the ``movable`` collectives, from the given order.
    Deterministic; O((nodes + edges) log nodes). No limit that the given order keeps is exceeded at any step, and no
    more is exposed than in the given order. Collectives that may not move keep their order among themselves."""
    nodes = scheduler_nodes(facts, order, dependencies, times, movable)
    search = _Search(facts, times, nodes, order, limits)
    if not any(nodes.movable):
        return search.best.order
    buffers, computed = BufferUses(facts, nodes), sum(nodes.seconds)
    sizes = [size_in_flight(facts, each) if each >= 0 else 0 for each in nodes.sent]
    bound = exposed_bound(facts, times)
    enough = max(_ENOUGH * bound, _HARDLY * computed)
    leeways = (*_SENDS, *_COMPUTES) if bound > _MOSTLY * computed else (*_COMPUTES, *_SENDS[:1])
    for leeway in (*leeways, _CAUTIOUS):
        if leeway is _CAUTIOUS and search.best is not search.given:
            break
        starts, peak = LatestStarts(nodes, leeway.close, nearest=leeway.nearest), limits.peak
        for _ in range(_TRIES):
            excess = search.offer(ListScheduler(nodes, buffers, starts, sizes, leeway, peak, limits.in_flight).run())
            if peak is None or excess <= 0:
                break
            peak -= excess
        if search.best.exposed <= enough:
            return search.best.order
    LocalMoves(nodes, search.takes).improve(search.order)
    return search.best.order


class _Candidate:
    def __init__(self, facts: Facts, order: list[int], times: NodeTimes) -> None:
        self.facts, self.order = facts, order
        runs = ((StepKind.FIRST_RUN, row, int(facts.phases[row] == Phase.BACKWARD)) for row in order)
        self.schedule = Schedule.of(runs)
        self.exposed = walk(facts, self.schedule, times).exposed

    @cached_property
    def peak(self) -> int:
        return max(simulate(self.facts, self.schedule).live, default=0)

    @cached_property
    def most_in_flight(self) -> int:
        return max(in_flight(self.facts, self.schedule), default=0)


class _Search:
    """The best order so far; ``order`` is that of its scheduler nodes."""

    def __init__(
        self, facts: Facts, times: NodeTimes, nodes: SchedulerNodes, order: Sequence[int], limits: OverlapLimits
    ) -> None:
        self._facts, self._times, self._nodes, self._limits = facts, times, nodes, limits
        self.best = self.given = _Candidate(facts, [*order], times)
        self.order = [*range(len(nodes))]

    def offer(self, order: list[int]) -> int:
        """Keep an order if it is the best so far. Returns the bytes by which a better one exceeds the peak's limit."""
        check_cancelled()
        found, limits = _Candidate(self._facts, self._nodes.in_rows(order), self._times), self._limits
        given = self.given
        if found.exposed >= self.best.exposed:
            return 0
        peak, flight = limits.peak, limits.in_flight
        keeps = peak is None or found.peak <= peak or found.peak <= given.peak
        if keeps and (flight is None or found.most_in_flight <= max(flight, given.most_in_flight)):
            self.best, self.order = found, order
            return 0
        return 0 if peak is None else found.peak - peak

    def takes(self, order: list[int]) -> bool:
        self.offer(order)
        return self.order is order


# --- the lines of a policy ---


@frozen
class TooTight:
    """A limit within which nothing can be moved."""

    statement: Overlap
    limit: Quantity
    least: int | None
    """The smallest limit in bytes that lets something move; None where it was not found."""


class OverlapLines:
    """The ``overlap`` lines of one policy on one graph, planned as one."""

    def __init__(
        self,
        facts: Facts,
        dependencies: Dependencies,
        times: NodeTimes,
        selected: Sequence[SelectedCollectives],
        scheduled: Callable[[Sequence[int]], Schedule],
        traced_peak: Callable[[], int],
    ) -> None:
        """``scheduled``: the steps of calls in some order, with host copies; ``traced_peak``: in bytes, as traced."""
        self._facts, self._dependencies, self._times = facts, dependencies, times
        self._scheduled, self._traced_peak = scheduled, traced_peak
        chosen = [(each.statement, each.taken) for each in selected if isinstance(each.statement, Overlap)]
        self._statements = [statement for statement, _ in chosen]
        self._rows = sorted({row for _, taken in chosen for row in taken})
        self.too_tight: list[TooTight] = []
        self.too_large: dict[int, str] = {}
        """Collectives that alone exceed the limit of bytes in flight, with a phrase that gives the sizes."""

    @cached_property
    def limits(self) -> OverlapLimits:
        """The tightest of all lines; the peak's in bytes alive, not in bytes more than traced."""
        in_flight = [int(each.in_flight.value) for each in self._statements if each.in_flight is not None]
        peaks = [self._peak_limit(each.peak) for each in self._statements if each.peak is not None]
        return OverlapLimits(min(in_flight, default=None), min(peaks, default=None))

    def _peak_limit(self, within: Quantity) -> int:
        more = within.value * self._traced_peak() if within.dimension == "fraction" else within.value
        return self._traced_peak() + int(more)

    def order(self, order: Sequence[int]) -> list[int]:
        """The calls in the order that hides most, from the given order; unchanged if nothing may move."""
        limit, sizes = self.limits.in_flight, {row: size_in_flight(self._facts, row) for row in self._rows}
        for row, size in sizes.items():
            if limit is not None and size > limit:
                self.too_large[row] = f"it is {format_quantity(size, 'bytes')}, more than may be in flight"
        self.movable = [row for row in self._rows if row not in self.too_large]
        if limit is not None and sizes and not self.movable:
            self._in_flight_too_tight(limit, min(sizes.values()))
        if not self.movable:
            return list(order)
        found = self._within(order, self.limits)
        if not self._moves(order, found):
            self._explain(order)
        return found

    def _within(self, order: Sequence[int], limits: OverlapLimits) -> list[int]:
        """An order that keeps the limits with copies to the host and back between its steps. The scheduler does not
        count these copies, so its own limit on the peak is tighter by their memory."""
        if limits.peak is None:
            return self._overlapped(order, limits)
        own, scheduled = limits.peak, self._scheduled(order)
        if len(scheduled) > len(order):
            own += self._peak(Schedule.of((0, row, 0) for row in order)) - self._peak(scheduled)
        for _ in range(_TRIES):
            found = self._overlapped(order, evolve(limits, peak=own))
            excess = self._peak(self._scheduled(found)) - limits.peak
            if excess <= 0:
                return found
            own -= excess
        return list(order)

    def _overlapped(self, order: Sequence[int], limits: OverlapLimits) -> list[int]:
        return overlapped(self._facts, order, self._dependencies, self._times, self.movable, limits)

    def _peak(self, schedule: Schedule) -> int:
        return estimate_peak(self._facts, schedule).bytes

    # --- limits within which nothing moves ---

    def _moves(self, order: Sequence[int], found: Sequence[int]) -> bool:
        before, after = ComputeProgress(self._facts, order), ComputeProgress(self._facts, found)
        return any(after.shifted(row, before) for row in self.movable)

    def _moves_within(self, order: Sequence[int], limits: OverlapLimits) -> bool:
        return self._moves(order, self._within(order, limits))

    def _explain(self, order: Sequence[int]) -> None:
        """Find the limit, if any, that keeps everything in place."""
        limits = self.limits
        if limits == OverlapLimits() or not self._moves_within(order, OverlapLimits()):
            return
        all_peaks = evolve(limits, peak=None)
        if limits.in_flight is not None and (limits.peak is None or not self._moves_within(order, all_peaks)):
            sizes = sorted({size_in_flight(self._facts, row) for row in self._rows})
            larger = [size for size in sizes if size > limits.in_flight]
            least = _least(larger, lambda size: self._moves_within(order, OverlapLimits(in_flight=size)))
            self._in_flight_too_tight(limits.in_flight, least)
        if limits.peak is not None and not self._moves_within(order, evolve(limits, in_flight=None)):
            most = self._peak(self._scheduled(self._overlapped(order, OverlapLimits())))
            step = max((most - limits.peak) >> _HALVINGS, 1)
            larger = [*range(limits.peak + step, most, step), most]
            least = _least(larger, lambda peak: self._moves_within(order, OverlapLimits(peak=peak)))
            more = None if least is None else least - self._traced_peak()
            for each in self._statements:
                if each.peak is not None and not each.optional and self._peak_limit(each.peak) == limits.peak:
                    self.too_tight.append(TooTight(each, each.peak, more))

    def _in_flight_too_tight(self, limit: int, least: int | None) -> None:
        for each in self._statements:
            if each.in_flight is not None and not each.optional and int(each.in_flight.value) == limit:
                self.too_tight.append(TooTight(each, each.in_flight, least))


def _least(sizes: Sequence[int], moves: Callable[[int], bool]) -> int | None:
    """The first of some sizes that lets something move, given that all larger ones do."""
    low, high = 0, len(sizes) - 1
    if high < 0 or not moves(sizes[high]):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if moves(sizes[middle]) else (middle + 1, high)
    return sizes[low]
