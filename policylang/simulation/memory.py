"""The memory that is alive while each step of a schedule runs, from the lifetimes of its values alone.

A simulation of the steps as they run without fusion. Each node allocates its memory (a view shares that of what it
views, an operator with several results allocates them all), which is given back after its last reader; a tuple holds
its pieces until the last is taken. Graph inputs and constants are there from beginning to end, but for tangents, which
come with the backward and go after their last reader; what the graph returns stays. A value that is copied to the host
is held until its copy is awaited, and memory for it is there again from the start of a copy back. What a kernel needs
for itself, and what the allocator wastes, is not counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from attrs import frozen

from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, is_gradient
from policylang.graph.schedule import Schedule, StepKind
from policylang.graph.storage import storage_roots
from policylang.operators.names import GETITEM

_FIRST_RUN, _SECOND_RUN = int(StepKind.FIRST_RUN), int(StepKind.SECOND_RUN)
_WAIT_TO_HOST, _COPY_FROM_HOST = int(StepKind.WAIT_TO_HOST), int(StepKind.COPY_FROM_HOST)
_ALLOCATES = (_FIRST_RUN, _SECOND_RUN, _COPY_FROM_HOST)

_STATE_ON_CPU, _STATE_ELSEWHERE = 5056, 16
"""Bytes of a generator's state, which is kept for each random operator that runs again."""


@frozen(eq=False)
class Timeline:
    """The memory alive while each node runs, its own results included. One entry for each run of a node and each copy
    from the host, in the order of execution."""

    rows: Sequence[int]
    live: Sequence[int]
    """Bytes."""
    again: bytes
    """1 where a step computes a forward value a second time, or fetches it from the host."""
    backward: bytes
    """1 where a step belongs to the backward, second computations included."""
    resident: int
    """Bytes of the graph inputs that are there before the first step."""


def simulate(facts: Facts, schedule: Schedule) -> Timeline:
    """The memory of a step that runs in this order."""
    return _Simulation(facts, schedule).run()


class _Simulation:
    """A value is named by its row; its second computation in the nth region of the backward by ``row + n * length``."""

    def __init__(self, facts: Facts, schedule: Schedule) -> None:
        self.facts = facts
        self.schedule = schedule
        self.length = len(facts)
        self.roots = storage_roots(facts)
        self.tangents = [row for row, kind in enumerate(facts.input_kinds) if kind == InputKind.TANGENT]
        self._find_pieces()

    def run(self) -> Timeline:
        sizes, freed = self._allocations()
        tangents = sum(self.facts.bytes[row] for row in self.tangents)
        alive = resident = self._resident()
        lives, rows, again, backward = array("q"), array("i"), bytearray(), bytearray()
        for step, (kind, row, region) in enumerate(self.schedule):
            if region:
                alive += tangents
                tangents = 0
            alive += sizes.get(step, 0)
            if kind in _ALLOCATES:
                lives.append(alive)
                rows.append(row)
                again.append(kind != _FIRST_RUN)
                backward.append(region > 0)
            alive -= freed.get(step, 0)
        return Timeline(rows, lives, bytes(again), bytes(backward), resident)

    def _resident(self) -> int:
        facts = self.facts
        inputs = (row for row, op in enumerate(facts.ops) if op in ("placeholder", "get_attr"))
        return sum(facts.bytes[row] for row in inputs if facts.input_kinds[row] != InputKind.TANGENT)

    def _find_pieces(self) -> None:
        """The ``getitem`` rows with memory of their own, and the operators that allocate it as part of a tuple."""
        facts = self.facts
        self.owner_of: dict[int, int] = {}
        self.pieces_of: dict[int, list[int]] = {}
        for row, target in enumerate(facts.targets):
            if target == GETITEM and self.roots[row] == row and facts.inputs[row]:
                source = facts.inputs[row][0]
                if facts.ops[source] == "call_function":
                    self.owner_of[row] = self.owner_of.get(source, source)
                    self.pieces_of.setdefault(self.owner_of[row], []).append(row)

    def _allocations(self) -> tuple[dict[int, int], dict[int, int]]:
        """By step what it allocates, and what is given back after it."""
        facts, length, last = self.facts, self.length, self._last_uses()
        sizes: dict[int, int] = {}
        freed: dict[int, int] = {}
        computed: set[int] = set()

        def give_back(storage: int, size: int, not_before: int = 0) -> None:
            step = max(last.get(storage, len(self.schedule)), not_before)
            freed[step] = freed.get(step, 0) + size

        for step, (kind, row, region) in enumerate(self.schedule):
            if kind not in _ALLOCATES:
                continue
            shift = 0 if kind == _FIRST_RUN else region * length
            if kind != _COPY_FROM_HOST:
                if self.roots[row] != row or (row in self.owner_of and self.owner_of[row] + shift in computed):
                    continue
                computed.add(row + shift)
            sizes[step] = rest = facts.bytes[row]
            for piece in self.pieces_of.get(row, ()) if kind != _COPY_FROM_HOST else ():
                if piece + shift in last:
                    give_back(piece + shift, facts.bytes[piece], last[row + shift])
                    rest -= facts.bytes[piece]
            give_back(row + shift, rest)
        for first, second in self._random_reruns():
            state = self._state_bytes(self.schedule.rows[first])
            sizes[first] = sizes.get(first, 0) + state
            freed[second] = freed.get(second, 0) + state
        for row in self.tangents:
            give_back(row, facts.bytes[row])
        return sizes, freed

    def _random_reruns(self) -> list[tuple[int, int]]:
        """The first and the last step of each random operator that runs again; in between its state is kept."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for step, (kind, row, _) in enumerate(self.schedule):
            if self.facts.flags[row] & Flag.RANDOM and self.facts.owners[row] == row and kind <= _SECOND_RUN:
                first.setdefault(row, step)
                last[row] = step
        return [(step, last[row]) for row, step in first.items() if last[row] > step]

    def _state_bytes(self, row: int) -> int:
        """Of the generator of the device that a random operator runs on."""
        facts = self.facts
        around = (row, *facts.followers.get(row, ()), *facts.inputs[row])
        device = next((facts.devices[each] for each in around if facts.devices[each]), "")
        return _STATE_ON_CPU if device.startswith("cpu") else _STATE_ELSEWHERE

    def _last_uses(self) -> dict[int, int]:
        """Storage → the step after which it is given back; past the end for what the graph returns."""
        facts, length, roots = self.facts, self.length, self.roots
        last: dict[int, int] = {}
        storage: dict[int, int] = {}  # of every value that was computed; an input is its own

        def read(source: int, region: int) -> int:
            """The storage of what a step reads: in the backward the second copy, where there is one."""
            second = source + region * length
            return storage[second] if second in storage else storage.get(source, source)

        for step, (kind, row, region) in enumerate(self.schedule):
            if kind == _COPY_FROM_HOST:
                value = row + region * length
                storage[value], last[value] = value, step
            elif kind == _WAIT_TO_HOST:
                last[storage.get(row, row)] = step
            elif kind <= _SECOND_RUN:
                sources = facts.inputs[row]
                value = row if kind == _FIRST_RUN else row + region * length
                storage[value] = value if roots[row] == row else read(sources[0], region)
                for each in (storage[value], *(read(source, region) for source in sources)):
                    last[each] = step
        end = max(self.schedule.regions, default=0)
        for row, phase in enumerate(facts.phases):
            if phase == Phase.OUTPUT:
                for source in facts.inputs[row]:
                    late = facts.kind is GraphKind.JOINT and facts.ops[row] == "output" and is_gradient(facts, source)
                    last[read(source, end if late else 0)] = len(self.schedule)
        return last
