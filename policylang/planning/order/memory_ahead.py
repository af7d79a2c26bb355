"""The memory of an order that is being made: the bytes alive now, and at each later step.

Counted as :mod:`policylang.simulation.memory` counts it. All that has not run is expected in the given order of the
scheduler nodes; a node that is *pulled* runs now instead, which changes what is alive up to its old place.
"""

from __future__ import annotations

from collections.abc import Sequence

from policylang.graph.facts import Facts, InputKind, Phase
from policylang.planning.order.scheduler_nodes import SchedulerNodes
from policylang.simulation.memory import pieces_with_memory

_LEAST = -(1 << 62)


class RangeMaximum:
    """Numbers: adds to a range and asks for the maximum of a range in O(log length), in a lazy segment tree."""

    def __init__(self, values: Sequence[int]) -> None:
        self._size = 1 << (len(values) + 1).bit_length()
        self._most = [_LEAST] * (2 * self._size)
        self._added = [0] * (2 * self._size)
        most, size = self._most, self._size
        most[size + 1 : size + 1 + len(values)] = values  # a leaf is free at either end
        for at in range(size - 1, 0, -1):
            left, right = most[2 * at], most[2 * at + 1]
            most[at] = left if left > right else right

    def add(self, start: int, end: int, amount: int) -> None:
        """To each number of ``[start, end)``."""
        if start >= end or not amount:
            return
        most, added = self._most, self._added
        low, high = start + self._size, end + self._size + 1
        while low ^ high ^ 1:
            if not low & 1:
                most[low ^ 1] += amount
                added[low ^ 1] += amount
            if high & 1:
                most[high ^ 1] += amount
                added[high ^ 1] += amount
            low >>= 1
            high >>= 1
            left, right = most[2 * low], most[2 * low + 1]
            most[low] = (left if left > right else right) + added[low]
            left, right = most[2 * high], most[2 * high + 1]
            most[high] = (left if left > right else right) + added[high]
        low >>= 1
        while low:
            left, right = most[2 * low], most[2 * low + 1]
            most[low] = (left if left > right else right) + added[low]
            low >>= 1

    def most(self, start: int, end: int) -> int:
        """The maximum of ``[start, end)``; far below zero if that is empty."""
        if start >= end:
            return _LEAST
        most, added = self._most, self._added
        low, high = start + self._size, end + self._size + 1
        left = right = _LEAST
        while low ^ high ^ 1:
            if not low & 1 and most[low ^ 1] > left:
                left = most[low ^ 1]
            if high & 1 and most[high ^ 1] > right:
                right = most[high ^ 1]
            low >>= 1
            high >>= 1
            left += added[low]
            right += added[high]
        found = left if left > right else right
        low >>= 1
        while low:
            found += added[low]
            low >>= 1
        return found


class BufferUses:
    """The buffers of a graph, named by the node that allocates each, and the scheduler nodes that make or read them."""

    def __init__(self, facts: Facts, nodes: SchedulerNodes) -> None:
        self.sizes: dict[int, int] = {}
        self.resident = 0
        """Bytes that are there before the first node."""
        self.needs: list[int] = []
        """By node, the bytes that it allocates."""
        self.keeps: list[int] = []
        """By node, those that outlive it."""
        self.used: list[list[int]] = []
        """By node, the buffers that it makes or reads, that others use as well, and that are freed after the last."""
        self.users: dict[int, list[int]] = {}
        """By buffer, the nodes that use it, in their order."""
        owner_of, pieces_of = pieces_with_memory(facts)
        roots, storage = facts.storage_roots, list(range(len(facts)))  # by node, the node that allocates its buffer
        for row, inputs in enumerate(facts.inputs):
            if roots[row] != row and inputs:
                storage[row] = storage[inputs[0]]
        runs = {row for rows in nodes.rows for row in rows}
        stays = set[int]()  # never freed
        for row, (op, phase) in enumerate(zip(facts.ops, facts.phases, strict=True)):
            if phase == Phase.OUTPUT:
                stays.update(storage[each] for each in facts.inputs[row])
            if op in ("placeholder", "get_attr"):
                self.resident += facts.bytes[row]
                if facts.input_kinds[row] == InputKind.TANGENT:  # as if the backward had begun
                    self.sizes[row] = facts.bytes[row]
                else:
                    stays.add(row)
        stays = stays.union(*(pieces_of.get(each, ()) for each in stays))
        for node, rows in enumerate(nodes.rows):
            new: list[int] = []
            for row in rows:
                if storage[row] == row and row not in owner_of:
                    pieces = [each for each in pieces_of.get(row, ()) if each in runs]
                    self.sizes.update((each, facts.bytes[each]) for each in pieces)
                    self.sizes[row] = facts.bytes[row] - sum(facts.bytes[each] for each in pieces)
                    new += (row, *pieces)
            own = dict.fromkeys(storage[each] for row in rows for each in (row, *facts.inputs[row]))
            for each in [*own]:  # a tuple holds its pieces until the last is taken
                own.update((piece, None) for piece in pieces_of.get(each, ()) if piece in runs)
            own.update((each, None) for each in new)
            self.needs.append(sum(self.sizes[each] for each in new))
            self.used.append([each for each in own if each not in stays])
            for each in self.used[node]:
                self.users.setdefault(each, []).append(node)
        for node, used in enumerate(self.used):
            inner = [each for each in used if self.users[each] == [node] and facts.ops[each] == "call_function"]
            self.keeps.append(self.needs[node] - sum(self.sizes[each] for each in inner))
            self.used[node] = [each for each in used if each not in inner and self.sizes.get(each)]


class LiveMemory:
    """The bytes alive now, as nodes run in any order."""

    def __init__(self, buffers: BufferUses) -> None:
        self._buffers = buffers
        self._left = {each: len(nodes) for each, nodes in buffers.users.items()}
        self.bytes = buffers.resident

    def run(self, node: int) -> None:
        buffers, left = self._buffers, self._left
        self.bytes += buffers.keeps[node]
        for each in buffers.used[node]:
            left[each] -= 1
            if not left[each]:
                self.bytes -= buffers.sizes[each]


class MemoryAhead:
    """The bytes alive at each node that has not run, if the rest runs in the given order."""

    def __init__(self, buffers: BufferUses) -> None:
        self._buffers = buffers
        self._live = LiveMemory(buffers)
        self._last = {each: [*nodes] for each, nodes in buffers.users.items()}
        self._done = bytearray(len(buffers.needs))
        levels: list[int] = []
        simulated = LiveMemory(buffers)
        for node, needs in enumerate(buffers.needs):
            levels.append(simulated.bytes + needs)
            simulated.run(node)
        self._levels = RangeMaximum(levels)

    def run(self, node: int) -> None:
        """Run the next node of the given order."""
        self._done[node] = 1
        self._live.run(node)

    def pull(self, node: int, head: int, limit: int) -> bool:
        """Run a node ahead of the next one, ``head``, if nothing up to its old place then exceeds the limit."""
        buffers, levels = self._buffers, self._levels
        if self._live.bytes + buffers.needs[node] > limit:
            return False
        keeps = buffers.keeps[node]
        gone = [(self._last_before(each, node, head), buffers.sizes[each]) for each in buffers.used[node]]
        gone = [(start, size) for start, size in gone if start <= node]
        levels.add(node, node + 1, _LEAST)
        levels.add(head, node, keeps)
        for start, size in gone:
            levels.add(start, node, -size)
        if keeps > 0 and levels.most(head, node) > limit:
            for start, size in gone:
                levels.add(start, node, size)
            levels.add(head, node, -keeps)
            levels.add(node, node + 1, -_LEAST)
            return False
        self._done[node] = 1
        self._live.run(node)
        return True

    def _last_before(self, each: int, node: int, head: int) -> int:
        """The first node at which a buffer would be free already, had ``node`` run; past ``node`` if none."""
        last, done = self._last[each], self._done
        while done[last[-1]]:
            last.pop()
        if last[-1] != node:
            return node + 1
        last.pop()
        while last and done[last[-1]]:
            last.pop()
        start = last[-1] + 1 if last else head
        last.append(node)
        return start
