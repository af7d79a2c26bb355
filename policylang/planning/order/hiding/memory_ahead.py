"""The memory of an order that is being made: what is alive now, and at each step that is still to come.

Counted as :mod:`policylang.simulation.memory` counts it. What is still to come runs in the order of the units; a unit
that is *pulled* runs now, before all of these, which changes what is alive until its old place.
"""

from __future__ import annotations

from policylang.graph.facts import Facts, InputKind, Phase, storage_roots
from policylang.operators.names import GETITEM
from policylang.planning.order.hiding.range_maximum import RangeMaximum
from policylang.planning.order.hiding.units import Units


class Touches:
    """The pieces of memory of a graph, and the units that make or read them."""

    def __init__(self, facts: Facts, units: Units) -> None:
        self.sizes: dict[int, int] = {}
        """By the row that allocates it."""
        self.resident = 0
        """Bytes that are there before the first unit."""
        self.needs: list[int] = []
        """By unit, the bytes that it allocates."""
        self.keeps: list[int] = []
        """By unit, those that outlive it."""
        self.touched: list[list[int]] = []
        """By unit, the memory that it makes or reads, that others touch as well, and that goes after the last."""
        self.touching: dict[int, list[int]] = {}
        """By piece of memory, the units that touch it, in their order."""
        self._storage = self._find_storage(facts)
        self._pieces = self._find_pieces(facts)
        self._read(facts, units)

    def _read(self, facts: Facts, units: Units) -> None:
        runs = {row for rows in units.rows for row in rows}
        stays = self._inputs_and_outputs(facts)
        for unit, rows in enumerate(units.rows):
            new: list[int] = []
            for row in rows:
                if self._storage[row] == row and row not in self._owner_of:
                    pieces = [each for each in self._pieces.get(row, ()) if each in runs]
                    self.sizes.update((each, facts.bytes[each]) for each in pieces)
                    self.sizes[row] = facts.bytes[row] - sum(facts.bytes[each] for each in pieces)
                    new += (row, *pieces)
            own = dict.fromkeys(self._storage[each] for row in rows for each in (row, *facts.inputs[row]))
            for each in [*own]:  # a tuple holds its pieces until the last is taken
                own.update((piece, None) for piece in self._pieces.get(each, ()) if piece in runs)
            own.update((each, None) for each in new)
            self.needs.append(sum(self.sizes[each] for each in new))
            self.touched.append([each for each in own if each not in stays])
            for each in self.touched[unit]:
                self.touching.setdefault(each, []).append(unit)
        for unit, touched in enumerate(self.touched):
            inner = [each for each in touched if self.touching[each] == [unit] and facts.ops[each] == "call_function"]
            self.keeps.append(self.needs[unit] - sum(self.sizes[each] for each in inner))
            self.touched[unit] = [each for each in touched if each not in inner and self.sizes.get(each)]

    def _inputs_and_outputs(self, facts: Facts) -> set[int]:
        """What stays to the end. Tangents are counted from the beginning on, as if the backward had begun."""
        stays = set[int]()
        for row, (op, phase) in enumerate(zip(facts.ops, facts.phases, strict=True)):
            if phase == Phase.OUTPUT:
                stays.update(self._storage[each] for each in facts.inputs[row])
            if op in ("placeholder", "get_attr"):
                self.resident += facts.bytes[row]
                if facts.input_kinds[row] == InputKind.TANGENT:
                    self.sizes[row] = facts.bytes[row]
                else:
                    stays.add(row)
        return stays.union(*(self._pieces.get(each, ()) for each in stays))

    def _find_storage(self, facts: Facts) -> list[int]:
        """By row, the row that allocates the memory it lies in."""
        roots, storage = storage_roots(facts), list(range(len(facts)))
        for row in range(len(facts)):
            if roots[row] != row and facts.inputs[row]:
                storage[row] = storage[facts.inputs[row][0]]
        return storage

    def _find_pieces(self, facts: Facts) -> dict[int, list[int]]:
        """By operator that returns a tuple, the rows of its pieces that have memory of their own."""
        self._owner_of: dict[int, int] = {}
        pieces: dict[int, list[int]] = {}
        for row, target in enumerate(facts.targets):
            if target == GETITEM and self._storage[row] == row and facts.inputs[row]:
                source = facts.inputs[row][0]
                if facts.ops[source] == "call_function":
                    self._owner_of[row] = self._owner_of.get(source, source)
                    pieces.setdefault(self._owner_of[row], []).append(row)
        return pieces


class LiveMemory:
    """What is alive now, as units run in any order."""

    def __init__(self, touches: Touches) -> None:
        self._touches = touches
        self._left = {each: len(units) for each, units in touches.touching.items()}
        self.bytes = touches.resident

    def run(self, unit: int) -> None:
        touches, left = self._touches, self._left
        self.bytes += touches.keeps[unit]
        for each in touches.touched[unit]:
            left[each] -= 1
            if not left[each]:
                self.bytes -= touches.sizes[each]


class MemoryAhead:
    """What will be alive at each unit that has not run, if all run in the order of their numbers from now on."""

    def __init__(self, touches: Touches) -> None:
        self._touches = touches
        self._live = LiveMemory(touches)
        self._last = {each: [*units] for each, units in touches.touching.items()}
        self._done = bytearray(len(touches.needs))
        heights: list[int] = []
        simulated = LiveMemory(touches)
        for unit, needs in enumerate(touches.needs):
            heights.append(simulated.bytes + needs)
            simulated.run(unit)
        self.peak = max(heights, default=touches.resident)
        self.mean = sum(heights) // len(heights) if heights else 0
        self._heights = RangeMaximum(heights)

    def run(self, unit: int) -> None:
        """The next one."""
        self._done[unit] = 1
        self._live.run(unit)

    def pull(self, unit: int, head: int, limit: int) -> bool:
        """Runs a unit ahead of the next one, ``head``, if nothing up to its old place then exceeds the limit."""
        touches, heights = self._touches, self._heights
        if self._live.bytes + touches.needs[unit] > limit:
            return False
        keeps = touches.keeps[unit]
        gone = [(self._last_before(each, unit, head), touches.sizes[each]) for each in touches.touched[unit]]
        gone = [(start, size) for start, size in gone if start <= unit]
        heights.leave_out(unit)
        heights.add(head, unit, keeps)
        for start, size in gone:
            heights.add(start, unit, -size)
        if keeps > 0 and heights.most(head, unit) > limit:
            for start, size in gone:
                heights.add(start, unit, size)
            heights.add(head, unit, -keeps)
            heights.put_back(unit)
            return False
        self._done[unit] = 1
        self._live.run(unit)
        return True

    def _last_before(self, each: int, unit: int, head: int) -> int:
        """The first unit at which memory would be given back already, had ``unit`` run; past it where it would not."""
        last, done = self._last[each], self._done
        while done[last[-1]]:
            last.pop()
        if last[-1] != unit:
            return unit + 1
        last.pop()
        while last and done[last[-1]]:
            last.pop()
        start = last[-1] + 1 if last else head
        last.append(unit)
        return start
