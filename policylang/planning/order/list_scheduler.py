"""A step while its order is being made: what has run, what the time is, and what two limits leave room for.

A unit that runs before its turn is *pulled*; one whose turn comes and that is better run later is *held*, which it may
be as long as everything could be run at once without exceeding a limit.


---

Puts the units of a step into an order that hides what is sent, step by step along the time model.

At each step it first fills the streams as far as the next computation lasts, then chooses what computes. On a stream
the collective that has to start first goes first; those that only the end of the step awaits, as the reductions of
gradients, go where they delay none of the others. What computes goes by when it is due, and what would wait for a
collective lets others pass. All of it happens within two limits, on the memory alive and on the bytes on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice

from attrs import frozen

from policylang.language.interruption.wanted import stop_unless_wanted
from policylang.planning.order.memory_ahead import LiveMemory, MemoryAhead, Touches
from policylang.planning.order.scheduler_nodes import LatestStarts, Units, announced

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


_PATIENCE = 0.1
"""Of a collective's time: how long a stream stays idle for one that is more urgent and about to come."""
_BUSY = 0.8
"""A stream that has to send for so much of the time that is left to compute never idles."""
_LONG = 3.0
"""A collective may always start so many times ahead of its reader what the longest of its stream takes."""
_LOOKED_AT = 4
"""How many units are tried at a step that do not fit: into memory, or before what is more urgent."""


@frozen
class Leeway:
    """How far from the order given a schedule may go."""

    lag: float
    """How much later what only the end of the step needs may compute: in times of :attr:`LatestStarts.hole`."""
    fill: float
    """How far ahead computation may be taken to pass the time of a wait: a share of all computation."""
    reach: float
    """How far ahead of its reader a collective may start that could start at any time: a share of all computation."""
    close: float
    """How far ahead of its reader what could run at any time is due: a share of all computation."""
    nearest: bool = False
    """As in :class:`LatestStarts`."""
    holds: bool = True
    """Whether what only the end of the step needs may run later than as given."""


class ListScheduler(StepSoFar):
    """Runs the units one after the other. ``sizes``: bytes on the way of each unit's collective."""

    def __init__(
        self,
        units: Units,
        touches: Touches,
        starts: LatestStarts,
        sizes: Sequence[int],
        leeway: Leeway,
        peak: int | None,
        in_flight: int | None,
    ) -> None:
        super().__init__(units, touches, starts, sizes, starts.keys(leeway.lag * starts.hole), peak, in_flight)
        self.holds = leeway.holds
        self.fill = leeway.fill * starts.total
        self.reaches = dict.fromkeys(units.streams, leeway.reach * starts.total)
        for unit, stream in enumerate(units.streams):
            if starts.loose[unit] and not starts.at_end[unit]:
                self.reaches[stream] = max(self.reaches[stream], _LONG * units.lengths[unit])

    def run(self) -> list[int]:
        """The units in the order in which they run; ``~unit`` where its collective is awaited before anybody reads."""
        units, count = self.units, len(self.units)
        while True:
            stop_unless_wanted()
            while self._head < count and self._planned[self._head]:
                self._head += 1
            if self._head == count:
                break
            head = self._head
            self._unblock()
            if self.holds and self._may_wait(head):
                if not self._hold(head):
                    self._run(head)
                continue
            if units.movable[head] and self._is_free(head):
                self._run(head)
                continue
            self._feed(self.now + units.seconds[self._ready[0][1] if self._ready else head])
            if self._planned[head]:
                continue
            unit = self._choose()
            if units.sent[unit] < 0 and units.seconds[unit]:
                self._reserved = self.touches.needs[unit] if self._planned[unit] else 0
                begin = max(self.now, *(self._over[each] for each in units.awaits[unit]), 0.0)
                self._feed(begin + units.seconds[unit])
                self._reserved = 0
            self._run(unit)
        self._finish()
        return self.order

    # --- what runs when ----------------------------------------------------------------------------------------------

    def _may_wait(self, head: int) -> bool:
        """Whether what is next is better left for when there is something to hide, or it need not wait itself."""
        computes = self.units.sent[head] < 0
        return bool(self.starts.at_end[head]) and (
            bool(self.units.movable[head]) or (computes and not self._is_free(head))
        )

    def _choose(self) -> int:
        """What computes next: of what is ready the first that is due; the next one given where nothing else may."""
        head, parked, found = self._head, list[tuple[float, int]](), -1
        while self._ready and found < 0 and len(parked) < _LOOKED_AT:
            key, unit = self._ready[0]
            if unit != head and not self._planned[unit] and key > self.progress + self.fill:
                break
            heappop(self._ready)
            if self._done[unit]:
                continue
            if unit == head or self._pull(unit):
                found = unit
            else:
                parked.append((key, unit))
        for each in parked:
            heappush(self._ready, each)
        if found < 0 and not parked and self._blocked:  # all wait: the first that can go on
            unit = self._blocked[0][1]
            may = unit != head and not self._done[unit] and not self.units.movable[unit]
            if may and (self._planned[unit] or self.keys[unit] <= self.progress + self.fill) and self._pull(unit):
                return unit
        return head if found < 0 else found

    def _feed(self, until: float) -> None:
        """Starts collectives on the streams that would be idle before a time."""
        for stream, urgent in self._urgent.items():
            patient = self._patient[stream]
            while self._free[stream] <= until:
                while urgent and self._done[urgent[0][1]]:
                    heappop(urgent)
                while patient and self._done[patient[0]]:
                    patient.popleft()
                if not any(self._start(each, until) for each in self._candidates(stream, until)):
                    break

    def _candidates(self, stream: str, until: float) -> list[int]:
        """What may go onto a stream next, the best first."""
        starts, urgent, patient = self.starts, self._urgent[stream], self._patient[stream]
        first = [urgent[0][1]] if urgent else []
        slack = float("inf")
        if urgent:
            slack = urgent[0][0] - self.progress - max(self._free[stream] - self.now, 0.0)
        lengths = self.units.lengths
        fitting = [each for each in islice(patient, _LOOKED_AT) if lengths[each] <= slack and not self._done[each]][:1]
        busy = self._to_send[stream] >= _BUSY * (starts.total - self.progress)
        if first and starts.early[first[0]] <= self.progress + until - self.now:
            found = first + fitting
        elif fitting:
            return fitting
        else:
            found = first if patient or busy else []
        return [*found, *islice(patient, 1)] if busy else found

    def _start(self, unit: int, until: float) -> bool:
        """Issues a collective ahead if that fits, and is worth it."""
        units, starts = self.units, self.starts
        loose = starts.loose[unit] and not starts.at_end[unit]
        if loose and starts.read[unit] > self.progress + self.reaches[units.streams[unit]]:
            return False
        if self._is_better_left_free(unit, until) or not self._leaves_room(unit):
            return False
        while self._in_flight + self.sizes[unit] > self.most_in_flight:
            while self._flying and not self._flies[self._flying[0][1]]:
                heappop(self._flying)
            if not self._flying or self._flying[0][0] > self.now or not self._await(self._flying[0][1]):
                return False
        if unit != self._head and not self._pull(unit):
            return False
        if starts.at_end[unit]:
            self._patient[units.streams[unit]].remove(unit)
        else:
            heappop(self._urgent[units.streams[unit]])
        self._run(unit)
        return True

    def _is_better_left_free(self, unit: int, until: float) -> bool:
        """Whether something more urgent is about to come to the same stream."""
        coming = self._coming[self.units.streams[unit]]
        while coming and (self._done[coming[0][1]] or not self._left[coming[0][1]]):
            heappop(coming)
        if not coming or self.starts.latest[coming[0][1]] >= self.starts.latest[unit]:
            return False
        idle = max(coming[0][0], until) - max(self._free[self.units.streams[unit]], self.now)
        return idle < _PATIENCE * self.units.lengths[unit]

    def _finish(self) -> None:
        """What is held when all else has run: of what can start, the longest way to the end first."""
        due = self.starts.due
        while self._remaining:
            self._unblock()
            sent = [each for patient in self._patient.values() for each in patient]
            sent += [each for urgent in self._urgent.values() for _, each in urgent]
            for stream in self._urgent:
                self._urgent[stream].clear()
                self._patient[stream].clear()
            if not sent and self._ready:
                sent = [heappop(self._ready)[1]]
            for each in sorted(sent, key=lambda each: (due[each], each)):
                self._run(each)
            if not sent:
                self.now = max(self.now, self._blocked[0][0])
