"""The memory that a step is expected to need at its worst, from the lifetimes of its values alone.

A simulation of the nodes in graph order, as they run without fusion: each allocates its own memory (a view shares that
of what it views), which is given back after its last reader. Graph inputs and constants are there from beginning to
end, as are the values that the graph returns. Recomputed values are computed again as late as possible: right before
the first backward node that needs them. What a kernel needs for itself, and what the allocator wastes, is not counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from attrs import frozen

from policylang.graph.facts import Facts, Phase
from policylang.planning.storage import storage_roots


@frozen
class Peak:
    """Bytes; ``forward`` and ``backward`` are the worst moments of each half, and ``at`` the node of the worse one."""

    forward: int
    backward: int
    at: str

    @property
    def bytes(self) -> int:
        return max(self.forward, self.backward)


def estimate_peak(facts: Facts, recomputed: Sequence[int]) -> Peak:
    """Simulate forward and backward with the ``recomputed`` rows run a second time."""
    return _Simulation(facts, recomputed).run()


class _Simulation:
    """A storage is named by the row that allocates it; that of its second computation by ``row + len(facts)``."""

    def __init__(self, facts: Facts, recomputed: Sequence[int]) -> None:
        self.facts = facts
        self.length = len(facts)
        self.roots = storage_roots(facts)
        self.again = bytearray(self.length)
        for row in recomputed:
            self.again[row] = 1

    def run(self) -> Peak:
        order = self._order()
        last_use = self._last_uses(order)
        freed_at: dict[int, list[int]] = {}
        for storage, step in enumerate(last_use):
            if 0 <= step < len(order):
                freed_at.setdefault(step, []).append(self._bytes(storage))
        live = sum(size for row, size in enumerate(self.facts.bytes) if self._is_resident(row))
        peaks = {True: (live, ""), False: (live, "")}
        for step, value in enumerate(order):
            if self._storage(value) == value:
                live += self._bytes(value)
            row = value % self.length
            in_forward = value < self.length and self.facts.phases[row] == Phase.FORWARD
            if live > peaks[in_forward][0]:
                peaks[in_forward] = (live, self.facts.names[row])
            live -= sum(freed_at.get(step, ()))
        worst = max(peaks.values(), key=lambda peak: peak[0])
        return Peak(forward=peaks[True][0], backward=peaks[False][0], at=worst[1])

    def _is_resident(self, row: int) -> bool:
        return self.facts.ops[row] in ("placeholder", "get_attr")

    def _bytes(self, storage: int) -> int:
        """Of the memory that a value allocates; an operator whose pieces are counted one by one allocates none."""
        row = storage % self.length
        if self._is_resident(row) or self._has_pieces(row):
            return 0
        return self.facts.bytes[row]

    def _has_pieces(self, row: int) -> bool:
        return any(self.roots[follower] == follower for follower in self.facts.followers.get(row, ()))

    def _storage(self, value: int) -> int:
        """The storage of a value in the order of execution."""
        if value < self.length:
            return self.roots[value]
        root = self.roots[value - self.length]
        return root + self.length if self.again[root] else root

    def _inputs(self, value: int) -> list[int]:
        """What a step reads: the backward and the second forward read second copies where there are any."""
        row = value % self.length
        second = value >= self.length or self.facts.phases[row] == Phase.BACKWARD
        return [source + self.length if second and self.again[source] else source for source in self.facts.inputs[row]]

    def _order(self) -> list[int]:
        """Forward, then backward with each recomputation right before its first reader."""
        facts = self.facts
        order = array("q", facts.forward)
        done = bytearray(2 * self.length)
        for row in range(self.length):
            if facts.phases[row] == Phase.BACKWARD and facts.ops[row] == "call_function":
                self._append_with_recomputations(row, order, done)
        return list(order)

    def _append_with_recomputations(self, row: int, order: array[int], done: bytearray) -> None:
        stack = [(row, False)]
        while stack:
            value, ready = stack.pop()
            if done[value]:
                continue
            if ready:
                done[value] = 1
                order.append(value)
                continue
            stack.append((value, True))
            stack.extend(
                (source, False)
                for source in reversed(self._inputs(value))
                if source >= self.length and not done[source]
            )

    def _last_uses(self, order: list[int]) -> array[int]:
        """Storage → the step after which it is given back; past the end for what the graph returns."""
        last = array("q", [-1]) * (2 * self.length)
        for step, value in enumerate(order):
            last[self._storage(value)] = step
            for source in self._inputs(value):
                last[self._storage(source)] = step
        for row in range(self.length):
            if self.facts.phases[row] == Phase.OUTPUT:
                for source in self.facts.inputs[row]:
                    last[self.roots[source]] = len(order)
        return last
