"""Puts the units of a step into an order that hides what is sent, step by step along the time model.

At each step it first fills the streams as far as the next computation lasts, then chooses what computes. On a stream
the collective that has to start first goes first; those that only the end of the step awaits, as the reductions of
gradients, go where they delay none of the others. What computes goes by when it is due, and what would wait for a
collective lets others pass. All of it happens within two limits, on the memory alive and on the bytes on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice

from attrs import frozen

from policylang.language.interruption.wanted import check_cancelled
from policylang.planning.order.hiding.latest_starts import LatestStarts
from policylang.planning.order.hiding.memory_ahead import Touches
from policylang.planning.order.hiding.step_so_far import StepSoFar
from policylang.planning.order.hiding.units import Units

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
            check_cancelled()
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
