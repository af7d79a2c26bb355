"""List scheduling: orders the nodes of a step so that communication is hidden, step by step along the time model.

At each step it first fills the streams as far as the next computation lasts, then chooses what computes. On a stream
the collective that has to start first goes first; those that only the end of the step awaits, such as reductions of
gradients, go where they delay no others. Computation goes by due time, and nodes that would wait for a collective let
others pass. A node that runs before its place in the given order is *pulled*; one that runs later is *held*, which it
may be while all held nodes could run at once. Two limits hold throughout: on the memory alive and the bytes in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import islice

from attrs import frozen

from policylang.language.cancellation import check_cancelled
from policylang.planning.order import scheduler_nodes

_NO_LIMIT = 1 << 62
_PATIENCE = 0.1
"""A stream stays idle for a more urgent collective that is about to come for this share of a collective's time."""
_BUSY = 0.8  # a stream that has to send for this share of the computation left never idles
_LONG = 3.0  # a collective may always start this many times the length of its stream's longest ahead of its reader
_LOOKED_AT = 4  # the nodes tried at a step that do not fit: into memory, or before more urgent ones


@frozen
class Leeway:
    """The limits on how far a schedule may leave the given order."""

    lag: float
    """The delay allowed for nodes that only the end of the step needs, as multiples of ``hole``."""
    fill: float
    """The share of all computation that may be pulled ahead to fill a wait."""
    reach: float
    """The share of all computation by which a loose collective may start before its reader."""
    close: float
    """The share of all computation by which a loose node is due before its reader."""
    nearest: bool = False
    """``nearest`` of :class:`LatestStarts`."""
    holds: bool = True
    """True if nodes that only the end of the step needs may run later than in the given order."""


class ListScheduler:
    """Runs the scheduler nodes one after the other, by what has run, the time, and what the limits allow."""

    def __init__(
        self,
        nodes: scheduler_nodes.SchedulerNodes,
        buffers: scheduler_nodes.BufferUses,
        starts: scheduler_nodes.LatestStarts,
        sizes: Sequence[int],
        leeway: Leeway,
        peak: int | None,
        in_flight: int | None,
    ) -> None:
        """``sizes``: bytes in flight of each collective; ``peak`` and ``in_flight``: limits in bytes."""
        self.nodes, self.buffers, self.starts, self.sizes, self.leeway = nodes, buffers, starts, sizes, leeway
        self.peak = _NO_LIMIT if peak is None else peak
        self.most_in_flight = _NO_LIMIT if in_flight is None else in_flight
        self.keys = starts.keys(leeway.lag * starts.hole)
        self.fill = leeway.fill * starts.total
        self.order: list[int] = []
        self.now = self.progress = 0.0
        """The time, and how much of it was computed."""
        self._live = scheduler_nodes.LiveMemory(buffers)
        self._ahead = scheduler_nodes.MemoryAhead(buffers) if peak is not None else None
        count = self._remaining = len(nodes)
        self._head = 0
        self._left = [len(each) for each in nodes.before]
        self._planned, self._done = bytearray(count), bytearray(count)  # a held node is planned and not done
        self._over = [0.0] * count  # when a collective ends
        self._in_flight = self._stuck = 0  # stuck: what nothing but its reader awaits
        self._largest = [*sizes, 0]
        for node in range(count - 1, -1, -1):
            self._largest[node] = max(self._largest[node], self._largest[node + 1])
        self._flying: list[tuple[float, int]] = []
        self._flies = bytearray(count)
        self._ready: list[tuple[float, int]] = []
        self._blocked: list[tuple[float, int]] = []  # by when what they await is over
        streams = [stream for stream in dict.fromkeys(nodes.streams) if stream]
        self._free = dict.fromkeys(streams, 0.0)
        self._to_send = dict.fromkeys(streams, 0.0)
        self.reaches = dict.fromkeys(streams, leeway.reach * starts.total)
        for node, (stream, length) in enumerate(zip(nodes.streams, nodes.lengths, strict=True)):
            if stream:
                self._to_send[stream] += length
                if starts.loose[node] and not starts.at_end[node]:
                    self.reaches[stream] = max(self.reaches[stream], _LONG * length)
        self._urgent: dict[str, list[tuple[float, int]]] = {each: [] for each in streams}
        self._patient: dict[str, deque[int]] = {each: deque() for each in streams}
        self._announces, self._computes = scheduler_nodes.announced(nodes)
        self._coming: dict[str, list[tuple[float, int]]] = {each: [] for each in streams}
        self._held: dict[int, None] = {}  # collectives
        self._needed: list[tuple[int, int]] = []  # bytes that what is held needs, the most first, negative
        self._reserved = 0  # for what runs next
        for node, left in enumerate(self._left):
            if not left:
                self._route(node)

    # --- limits ---

    def _pull(self, node: int) -> bool:
        """Plan a node for now if its memory fits; a held node is planned already."""
        needs = self.buffers.needs[node] + self._reserved
        if self._planned[node]:
            return self._live.bytes + needs <= self.peak
        if self._ahead is not None:
            if node == self._head:
                self._ahead.run(node)
            else:
                fits = self._live.bytes + needs + self._most_needed() <= self.peak
                if not fits or not self._ahead.pull(node, self._head, self.peak):
                    return False
        self._planned[node] = 1
        return True

    def _hold(self, node: int) -> bool:
        """Leave the next node for later, if it can run at any time without exceeding a limit."""
        needs = self.buffers.needs[node]
        sends = self.nodes.sent[node] >= 0
        if sends and self._live.bytes + max(needs, self._most_needed()) > self.peak:
            return False
        self._plan_head(node)
        if sends:
            self._held[node] = None
            heappush(self._needed, (-needs, node))
        return True

    def _plan_head(self, node: int) -> None:
        self._planned[node] = 1
        if self._ahead is not None:
            self._ahead.run(node)

    def _most_needed(self) -> int:
        """The most bytes that a held node needs."""
        while self._needed and self._done[self._needed[0][1]]:
            heappop(self._needed)
        return -self._needed[0][0] if self._needed else 0

    def _release(self, node: int) -> None:
        """Run held nodes, if possible those that wait for nothing, until there is memory for a node."""
        needs, keeps = self.buffers.needs[node], self.buffers.keeps[node]
        while self._held and self._live.bytes + max(needs, keeps + self._most_needed()) > self.peak:
            free = (each for each in islice(self._held, 16) if self._is_free(each))
            self._run_with_missing(next(free, next(iter(self._held))))

    def _await(self, node: int) -> bool:
        """Await a collective before anybody reads it, to have less in flight."""
        if self.nodes.waits[node]:
            self.order.append(~node)
            self._land(node)
            return True
        for each in self.nodes.after[node]:
            if node in self.nodes.awaits[each] and not self.nodes.seconds[each] and not self._left[each]:
                if not self._pull(each):
                    return False
                self._run(each)
                return not self._flies[node]
        return False

    def _waits_apart(self, node: int) -> bool:
        """True if its collective can be awaited before anybody reads it."""
        nodes = self.nodes
        free = (each for each in nodes.after[node] if not nodes.seconds[each])
        return bool(nodes.waits[node]) or any(node in nodes.awaits[each] for each in free)

    # --- running ---

    def _run(self, node: int) -> None:
        """Run a node now, after the held nodes that it needs."""
        if self._held and node not in self._held:
            self._release(node)
        self._run_with_missing(node)

    def _run_with_missing(self, node: int) -> None:
        """Run a node after all that has to run before it and has not, in order."""
        found, pending = {node}, [node] if self._left[node] else []
        while pending:
            for each in self.nodes.before[pending.pop()]:
                if not self._done[each] and each not in found:
                    found.add(each)
                    pending.append(each)
        for each in sorted(found):
            self._run_one(each)

    def _run_one(self, node: int) -> None:
        if self._done[node]:
            return
        nodes = self.nodes
        if not self._planned[node]:
            self._plan_head(node)
        self._held.pop(node, None)
        sends = nodes.sent[node] >= 0
        while sends and self._flying and self._in_flight + self.sizes[node] > self.most_in_flight:
            _, each = heappop(self._flying)  # the first to end
            if self._flies[each]:
                self._await(each)
        self._done[node] = 1
        self._remaining -= 1
        self.order.append(node)
        for each in nodes.awaits[node]:
            self._land(each)
        self._live.run(node)
        self.now += nodes.seconds[node]
        self.progress += nodes.seconds[node]
        if sends:
            self._issue(node)
        for each in nodes.after[node]:
            self._left[each] -= 1
            if not self._left[each]:
                self._route(each)

    def _issue(self, node: int) -> None:
        nodes, stream = self.nodes, self.nodes.streams[node]
        over = max(self.now, self._free[stream]) + nodes.lengths[node]
        self._over[node] = self._free[stream] = over
        self._to_send[stream] -= nodes.lengths[node]
        self._flies[node] = 1
        self._in_flight += self.sizes[node]
        self._stuck += 0 if self._waits_apart(node) else self.sizes[node]
        heappush(self._flying, (over, node))
        for each in self._announces[node]:
            if not self.starts.at_end[each]:
                heappush(self._coming[nodes.streams[each]], (over + self._computes[each], each))

    def _land(self, node: int) -> None:
        self.now = max(self.now, self._over[node])
        if self._flies[node]:
            self._flies[node] = 0
            self._in_flight -= self.sizes[node]
            self._stuck -= 0 if self._waits_apart(node) else self.sizes[node]

    def _is_free(self, node: int) -> bool:
        """True if it can run without waiting."""
        return not self._left[node] and all(self._over[each] <= self.now for each in self.nodes.awaits[node])

    def _unblock(self) -> None:
        while self._blocked and self._blocked[0][0] <= self.now:
            self._route(heappop(self._blocked)[1])

    def _route(self, node: int) -> None:
        """Queue a node whose dependencies have run: among those that can run, or those that wait."""
        if self._done[node]:
            return
        nodes = self.nodes
        until = max((self._over[each] for each in nodes.awaits[node]), default=0.0)
        if until > self.now:
            heappush(self._blocked, (until, node))
        elif not nodes.movable[node]:
            heappush(self._ready, (self.keys[node], node))
        elif self.starts.at_end[node]:
            self._patient[nodes.streams[node]].append(node)
        else:
            heappush(self._urgent[nodes.streams[node]], (self.starts.latest[node], node))

    # --- the order ---

    def run(self) -> list[int]:
        """The nodes in their new order; ``~node`` where its collective is awaited before anybody reads it."""
        nodes, count = self.nodes, len(self.nodes)
        while True:
            check_cancelled()
            while self._head < count and self._planned[self._head]:
                self._head += 1
            if self._head == count:
                break
            head = self._head
            self._unblock()
            movable, computes = nodes.movable[head], nodes.sent[head] < 0
            # Better left until there is communication to hide, or until it need not wait.
            may_wait = self.starts.at_end[head] and (movable or (computes and not self._is_free(head)))
            if self.leeway.holds and may_wait:
                if not self._hold(head):
                    self._run(head)
                continue
            if movable and self._is_free(head):
                self._run(head)
                continue
            self._feed(self.now + nodes.seconds[self._ready[0][1] if self._ready else head])
            if self._planned[head]:
                continue
            node = self._choose()
            if nodes.sent[node] < 0 and nodes.seconds[node]:
                self._reserved = self.buffers.needs[node] if self._planned[node] else 0
                begin = max(self.now, *(self._over[each] for each in nodes.awaits[node]), 0.0)
                self._feed(begin + nodes.seconds[node])
                self._reserved = 0
            self._run(node)
        self._finish()
        return self.order

    # --- what runs when ---

    def _choose(self) -> int:
        """Choose what computes next: the first due of the ready nodes, else the next in the given order."""
        head, parked, found = self._head, list[tuple[float, int]](), -1
        while self._ready and found < 0 and len(parked) < _LOOKED_AT:
            key, node = self._ready[0]
            if node != head and not self._planned[node] and key > self.progress + self.fill:
                break
            heappop(self._ready)
            if self._done[node]:
                continue
            if node == head or self._pull(node):
                found = node
            else:
                parked.append((key, node))
        for each in parked:
            heappush(self._ready, each)
        if found < 0 and not parked and self._blocked:  # all wait: the first that can go on
            node = self._blocked[0][1]
            may = node != head and not self._done[node] and not self.nodes.movable[node]
            if may and (self._planned[node] or self.keys[node] <= self.progress + self.fill) and self._pull(node):
                return node
        return head if found < 0 else found

    def _feed(self, until: float) -> None:
        """Start collectives on the streams that would be idle before a time."""
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
        starts, urgent, patient = self.starts, self._urgent[stream], self._patient[stream]
        first = [urgent[0][1]] if urgent else []
        slack = float("inf")
        if urgent:
            slack = urgent[0][0] - self.progress - max(self._free[stream] - self.now, 0.0)
        lengths = self.nodes.lengths
        fitting = [each for each in islice(patient, _LOOKED_AT) if lengths[each] <= slack and not self._done[each]][:1]
        busy = self._to_send[stream] >= _BUSY * (starts.total - self.progress)
        if first and starts.early[first[0]] <= self.progress + until - self.now:
            found = first + fitting
        elif fitting:
            return fitting
        else:
            found = first if patient or busy else []
        return [*found, *islice(patient, 1)] if busy else found

    def _start(self, node: int, until: float) -> bool:
        """Issue a collective ahead if it fits and is worth it."""
        nodes, starts = self.nodes, self.starts
        loose = starts.loose[node] and not starts.at_end[node]
        if loose and starts.read[node] > self.progress + self.reaches[nodes.streams[node]]:
            return False
        if self._is_better_left_free(node, until):
            return False
        stuck = self.most_in_flight != _NO_LIMIT and not self._waits_apart(node)
        if stuck and self._stuck + self.sizes[node] + self._largest[self._head] > self.most_in_flight:
            return False  # not all later ones would fit
        while self._in_flight + self.sizes[node] > self.most_in_flight:
            while self._flying and not self._flies[self._flying[0][1]]:
                heappop(self._flying)
            if not self._flying or self._flying[0][0] > self.now or not self._await(self._flying[0][1]):
                return False
        if node != self._head and not self._pull(node):
            return False
        if starts.at_end[node]:
            self._patient[nodes.streams[node]].remove(node)
        else:
            heappop(self._urgent[nodes.streams[node]])
        self._run(node)
        return True

    def _is_better_left_free(self, node: int, until: float) -> bool:
        """True if a more urgent collective is about to use the same stream."""
        coming = self._coming[self.nodes.streams[node]]
        while coming and (self._done[coming[0][1]] or not self._left[coming[0][1]]):
            heappop(coming)
        if not coming or self.starts.latest[coming[0][1]] >= self.starts.latest[node]:
            return False
        idle = max(coming[0][0], until) - max(self._free[self.nodes.streams[node]], self.now)
        return idle < _PATIENCE * self.nodes.lengths[node]

    def _finish(self) -> None:
        """Run the nodes still held when all else has run, those with the longest path to the end first."""
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
