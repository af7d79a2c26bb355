"""A finished order made better by moving single collectives: those that stay exposed most start earlier, or what is on
their stream before them goes after them.

A list scheduler decides once and goes by what is urgent. So a long collective whose stream others need one after the
other, as the second gather of a head's weight beside those of tensor parallelism, comes last, where nothing is computed
beside it. The best place for it is right behind the collective after which most is computed until the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nlargest

from policylang.language.interruption.wanted import check_cancelled
from policylang.planning.order.hiding.units import Units

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
        check_cancelled()
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
