"""A step while its order is being made: what has run, what the time is, and what two limits leave room for.

A unit that runs before its turn is *pulled*; one whose turn comes and that is better run later is *held*, which it may
be as long as everything could be run at once without exceeding a limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice

from policylang.planning.order.hiding.latest_starts import LatestStarts, announced
from policylang.planning.order.hiding.memory_ahead import LiveMemory, MemoryAhead, Touches
from policylang.planning.order.hiding.units import Units

_NO_LIMIT = 1 << 62


class StepSoFar:
    """``sizes``: bytes on the way of each unit's collective; ``keys``: what computes is ready in the order of these."""

    def __init__(
        self,
        units: Units,
        touches: Touches,
        starts: LatestStarts,
        sizes: Sequence[int],
        keys: Sequence[float],
        peak: int | None,
        in_flight: int | None,
    ) -> None:
        self.units, self.touches, self.starts, self.sizes = units, touches, starts, sizes
        self.peak = _NO_LIMIT if peak is None else peak
        self.most_in_flight = _NO_LIMIT if in_flight is None else in_flight
        self.keys = keys
        self.order: list[int] = []
        self.now = self.progress = 0.0
        """The time, and how much of it was computed."""
        self._live = LiveMemory(touches)
        self._ahead = MemoryAhead(touches) if peak is not None else None
        count = self._remaining = len(units)
        self._head = 0
        self._left = [len(each) for each in units.before]
        self._planned, self._done = bytearray(count), bytearray(count)  # a held unit is planned and not done
        self._over = [0.0] * count  # when a collective ends
        self._in_flight = self._stuck = 0  # stuck: what nothing but its reader awaits
        self._largest = [*sizes, 0]
        for unit in range(count - 1, -1, -1):
            self._largest[unit] = max(self._largest[unit], self._largest[unit + 1])
        self._flying: list[tuple[float, int]] = []
        self._flies = bytearray(count)
        self._ready: list[tuple[float, int]] = []
        self._blocked: list[tuple[float, int]] = []  # by when what they await is over
        streams = [stream for stream in dict.fromkeys(units.streams) if stream]
        self._free = dict.fromkeys(streams, 0.0)
        self._to_send = dict.fromkeys(streams, 0.0)
        for stream, length in zip(units.streams, units.lengths, strict=True):
            if stream:
                self._to_send[stream] += length
        self._urgent: dict[str, list[tuple[float, int]]] = {each: [] for each in streams}
        self._patient: dict[str, deque[int]] = {each: deque() for each in streams}
        self._announces, self._computes = announced(units)
        self._coming: dict[str, list[tuple[float, int]]] = {each: [] for each in streams}
        self._held: dict[int, None] = {}  # collectives
        self._needed: list[tuple[int, int]] = []  # bytes that what is held needs, the most first, negative
        self._reserved = 0  # for what runs next
        for unit, left in enumerate(self._left):
            if not left:
                self._route(unit)

    # --- limits ------------------------------------------------------------------------------------------------------

    def _pull(self, unit: int) -> bool:
        """Plans a unit for now, if its memory fits; of one that is held it is planned already."""
        needs = self.touches.needs[unit] + self._reserved
        if self._planned[unit]:
            return self._live.bytes + needs <= self.peak
        if self._ahead is not None:
            if unit == self._head:
                self._ahead.run(unit)
            else:
                fits = self._live.bytes + needs + self._most_needed() <= self.peak
                if not fits or not self._ahead.pull(unit, self._head, self.peak):
                    return False
        self._planned[unit] = 1
        return True

    def _hold(self, unit: int) -> bool:
        """Leaves a unit for later whose turn it is, if it can be run any time without exceeding a limit."""
        needs = self.touches.needs[unit]
        sends = self.units.sent[unit] >= 0
        if sends and self._live.bytes + max(needs, self._most_needed()) > self.peak:
            return False
        self._plan_head(unit)
        if sends:
            self._held[unit] = None
            heappush(self._needed, (-needs, unit))
        return True

    def _plan_head(self, unit: int) -> None:
        self._planned[unit] = 1
        if self._ahead is not None:
            self._ahead.run(unit)

    def _most_needed(self) -> int:
        """By any of what is held."""
        while self._needed and self._done[self._needed[0][1]]:
            heappop(self._needed)
        return -self._needed[0][0] if self._needed else 0

    def _release(self, unit: int) -> None:
        """Runs what is held, one by one and if possible what waits for nothing, until there is memory for a unit."""
        needs, keeps = self.touches.needs[unit], self.touches.keeps[unit]
        while self._held and self._live.bytes + max(needs, keeps + self._most_needed()) > self.peak:
            free = (each for each in islice(self._held, 16) if self._is_free(each))
            self._run_with_missing(next(free, next(iter(self._held))))

    def _await(self, unit: int) -> bool:
        """Awaits a collective before anybody reads it, to have less on the way."""
        if self.units.waits[unit]:
            self.order.append(~unit)
            self._land(unit)
            return True
        for each in self.units.after[unit]:
            if unit in self.units.awaits[each] and not self.units.seconds[each] and not self._left[each]:
                if not self._pull(each):
                    return False
                self._run(each)
                return not self._flies[unit]
        return False

    def _waits_apart(self, unit: int) -> bool:
        """Whether its collective can be awaited before anybody reads it."""
        units = self.units
        return bool(units.waits[unit]) or any(
            unit in units.awaits[each] and not units.seconds[each] for each in units.after[unit]
        )

    def _leaves_room(self, unit: int) -> bool:
        """Whether all that is to come can still be sent within the limit, one by one, if a unit is started now."""
        if self.most_in_flight == _NO_LIMIT or self._waits_apart(unit):
            return True
        return self._stuck + self.sizes[unit] + self._largest[self._head] <= self.most_in_flight

    def _make_room(self, unit: int) -> None:
        """For a collective whose turn it is: awaits what is on the way, the first to end first."""
        while self._flying and self._in_flight + self.sizes[unit] > self.most_in_flight:
            _, each = heappop(self._flying)
            if self._flies[each]:
                self._await(each)

    # --- running -----------------------------------------------------------------------------------------------------

    def _run(self, unit: int) -> None:
        """Now, after what it needs that is held."""
        if self._held and unit not in self._held:
            self._release(unit)
        self._run_with_missing(unit)

    def _run_with_missing(self, unit: int) -> None:
        if self._left[unit]:
            for each in self._missing(unit):
                self._run_one(each)
        self._run_one(unit)

    def _missing(self, unit: int) -> list[int]:
        """What has to run before a unit and has not, in order."""
        found, pending = dict[int, None](), [*self.units.before[unit]]
        while pending:
            each = pending.pop()
            if not self._done[each] and each not in found:
                found[each] = None
                pending.extend(self.units.before[each])
        return sorted(found)

    def _run_one(self, unit: int) -> None:
        if self._done[unit]:
            return
        units = self.units
        if not self._planned[unit]:
            self._plan_head(unit)
        self._held.pop(unit, None)
        if units.sent[unit] >= 0 and self._in_flight + self.sizes[unit] > self.most_in_flight:
            self._make_room(unit)
        self._done[unit] = 1
        self._remaining -= 1
        self.order.append(unit)
        for each in units.awaits[unit]:
            self._land(each)
        self._live.run(unit)
        self.now += units.seconds[unit]
        self.progress += units.seconds[unit]
        if units.sent[unit] >= 0:
            self._issue(unit)
        for each in units.after[unit]:
            self._left[each] -= 1
            if not self._left[each]:
                self._route(each)

    def _issue(self, unit: int) -> None:
        units, stream = self.units, self.units.streams[unit]
        over = max(self.now, self._free[stream]) + units.lengths[unit]
        self._over[unit] = self._free[stream] = over
        self._to_send[stream] -= units.lengths[unit]
        self._flies[unit] = 1
        self._in_flight += self.sizes[unit]
        self._stuck += 0 if self._waits_apart(unit) else self.sizes[unit]
        heappush(self._flying, (over, unit))
        for each in self._announces[unit]:
            if not self.starts.at_end[each]:
                heappush(self._coming[units.streams[each]], (over + self._computes[each], each))

    def _land(self, unit: int) -> None:
        self.now = max(self.now, self._over[unit])
        if self._flies[unit]:
            self._flies[unit] = 0
            self._in_flight -= self.sizes[unit]
            self._stuck -= 0 if self._waits_apart(unit) else self.sizes[unit]

    def _is_free(self, unit: int) -> bool:
        """Whether it can run without waiting."""
        return not self._left[unit] and all(self._over[each] <= self.now for each in self.units.awaits[unit])

    def _unblock(self) -> None:
        while self._blocked and self._blocked[0][0] <= self.now:
            self._route(heappop(self._blocked)[1])

    def _route(self, unit: int) -> None:
        """To those that can run, or to those that wait."""
        if self._done[unit]:
            return
        units = self.units
        until = max((self._over[each] for each in units.awaits[unit]), default=0.0)
        if until > self.now:
            heappush(self._blocked, (until, unit))
        elif not units.movable[unit]:
            heappush(self._ready, (self.keys[unit], unit))
        elif self.starts.at_end[unit]:
            self._patient[units.streams[unit]].append(unit)
        else:
            heappush(self._urgent[units.streams[unit]], (self.starts.latest[unit], unit))
