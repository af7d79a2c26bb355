"""When the units of an order are due, and when its collectives have to start, if nothing is to be late for them.

Times are seconds of computation from the beginning: the place in a step that computes one unit after the other as given
and never waits. That is how far a step has come, whatever it waited for on the way.
"""

from __future__ import annotations

from policylang.planning.order.hiding.units import Units

_MARGIN = 1.2
"""A collective is started ahead as if it, and all before its deadline on its stream, took this much longer."""
_LOOSE = 0.25
"""A unit is loose whose longest path takes no more than this share of what is computed before it as given."""
_LIGHT = 0.5
"""Of a collective's time: its result does not make it urgent if the longest path of computation from there to the end
takes less. The path counts, not the first that reads: pieces are cut out of a bucket before anything computes with them."""


class LatestStarts:
    """O(units and their edges). ``close``: so far ahead of its reader, a share of all computation, what is loose is
    due."""

    def __init__(self, units: Units, close: float) -> None:
        count, self._close = len(units), close
        self.place: list[float] = []
        """Where a unit computes as given."""
        now = 0.0
        for seconds in units.seconds:
            self.place.append(now)
            now += seconds
        self.total = now
        self.loose = bytearray(count)
        """1 for what the rest of the step hardly leads to, as what is computed again from what is given: it could run
        long before its place."""
        self.at_end = bytearray(count)
        """1 for what nothing but the end of the step needs: gradients of weights, and what scatters and awaits them."""
        self.due = [0.0] * count
        """When a unit has to start, no later than as given, for the collectives that depend on it not to be late."""
        self.latest = [0.0] * count
        """Of a collective: when it has to start for those behind it on its stream not to be late either."""
        self.early = [0.0] * count
        """Of a collective: from when on it is started ahead."""
        self.read = [now] * count
        """Of a collective: where its first reader computes as given."""
        self._find(units)
        chained = (
            length for unit, length in enumerate(units.lengths) if not self.at_end[unit] and not self.loose[unit]
        )
        self.hole = max(chained, default=0.0)
        """Of the collectives that computation waits for between two of its own results, the longest: as those of tensor
        parallelism, which other computation has to hide."""

    def keys(self, lag: float) -> list[float]:
        """What computes goes in the order of these: when it is due, but what only the end of the step needs so much
        later than as given, to be there when there is something to hide."""
        return [
            min(due, place + lag) if at_end else due
            for due, place, at_end in zip(self.due, self.place, self.at_end, strict=True)
        ]

    def _find(self, units: Units) -> None:
        path = [0.0] * len(units)  # the longest that ends with a unit
        for unit, before in enumerate(units.before):
            head = max((path[each] for each in before), default=0.0)
            head = max((head, *(path[each] + units.lengths[each] for each in units.awaits[unit])))
            self.loose[unit] = head <= _LOOSE * self.place[unit]
            path[unit] = head + units.seconds[unit]
        awaited_by: list[list[int]] = [[] for _ in units.rows]
        for unit, awaited in enumerate(units.awaits):
            for each in awaited:
                awaited_by[each].append(unit)
        tail = [0.0] * len(units)  # the longest path of computation from a unit to the end
        free: dict[str, tuple[float, float]] = {}  # by stream, before when it has to be free for what is behind
        for unit in range(len(units) - 1, -1, -1):
            after = units.after[unit]
            tail[unit] = units.seconds[unit] + max((tail[each] for each in after), default=0.0)
            late = min((self._wanted(each, unit) for each in after), default=self.total)
            self.at_end[unit] = all(self.at_end[each] for each in after) and self._is_light(units, unit, tail[unit])
            if not units.movable[unit]:
                due = late - units.seconds[unit]
                self.due[unit] = due if self.at_end[unit] else min(due, self.place[unit])
                continue
            length, readers = units.lengths[unit], awaited_by[unit]
            start = min(late, min((self._wanted(each, unit) for each in readers), default=self.total) - length)
            self.read[unit] = min((self.place[each] for each in readers), default=self.total)
            self.at_end[unit] = self.at_end[unit] and all(self.at_end[each] for each in readers)
            self.due[unit] = start - units.seconds[unit]
            self.latest[unit] = self.early[unit] = start
            if not self.at_end[unit]:
                last, early = free.get(units.streams[unit], (self.total, self.total))
                self.latest[unit] = min(start, last - length)
                self.early[unit] = min(start - length, early - _MARGIN * length)
                free[units.streams[unit]] = (self.latest[unit], self.early[unit])

    def _wanted(self, reader: int, unit: int) -> float:
        """When a unit has to be done for one that reads it. Where more is sent than computed, all that leads from one
        collective to the next is long overdue; what is loose is no more so than its readers are close."""
        due = self.due[reader]
        if self.loose[unit] and not self.loose[reader]:
            return max(due, self.place[reader] - self._close * self.total)
        return due

    def _is_light(self, units: Units, unit: int, tail: float) -> bool:
        awaited = units.awaits[unit]
        return not awaited or tail <= _LIGHT * sum(units.lengths[each] for each in awaited)


def announced(units: Units) -> tuple[list[list[int]], list[float]]:
    """For each unit the collectives whose longest path begins where its own collective ends; and for each collective
    how much computation that path still has: when one is on the way, it is known when the other can come."""
    done, announcer, computes = [0.0] * len(units), [-1] * len(units), [0.0] * len(units)
    for unit, before in enumerate(units.before):
        latest = 0.0
        for each in before:
            if done[each] > latest:
                latest, announcer[unit], computes[unit] = done[each], announcer[each], computes[each]
        for each in units.awaits[unit]:
            over = done[each] + units.lengths[each]
            if over >= latest:
                latest, announcer[unit], computes[unit] = over, each, 0.0
        done[unit] = latest + units.seconds[unit]
        computes[unit] += units.seconds[unit]
    found: list[list[int]] = [[] for _ in units.rows]
    for unit, each in enumerate(announcer):
        if units.movable[unit] and each >= 0:
            found[each].append(unit)
    return found, computes
