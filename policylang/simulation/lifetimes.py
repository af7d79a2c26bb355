"""The lifetimes of the memory that a training step allocates: what is made at which step, and after which it goes.

Each node allocates its memory (a view shares that of what it views, an operator with several results allocates them
all), which is given back after its last reader; a tuple holds its pieces until the last is taken. Graph inputs and
constants are there from beginning to end, but for tangents, which come with the backward and go after their last
reader; what the graph returns stays, and what a checkpoint holds until it runs its block again. A value that is copied
to the host is held until its copy is awaited, and memory for it is there again from the start of a copy back. What a
kernel needs for itself, and what the allocator wastes, is not counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import IntEnum

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, is_gradient, storage_roots
from policylang.graph.schedule import Schedule, StepKind
from policylang.operators.names import GETITEM

_FIRST_RUN, _SECOND_RUN = int(StepKind.FIRST_RUN), int(StepKind.SECOND_RUN)
_WAIT_TO_HOST, _COPY_FROM_HOST = int(StepKind.WAIT_TO_HOST), int(StepKind.COPY_FROM_HOST)
ALLOCATES = (_FIRST_RUN, _SECOND_RUN, _COPY_FROM_HOST)
"""The kinds of steps that allocate memory."""

_STATE_ON_CPU, _STATE_ELSEWHERE = 5056, 16
"""Bytes of a generator's state, which is kept for each random operator that runs again."""


class Origin(IntEnum):
    """Where memory comes from."""

    FIRST_RUN = 0
    SECOND_RUN = 1
    """A forward value is computed again."""
    COPY_FROM_HOST = 2
    INPUT = 3
    """An input or a constant of the graph: there before the first step."""
    TANGENT = 4
    """Handed in as the backward begins."""
    GENERATOR_STATE = 5
    """Kept for a random operator that runs again."""


Lifetime = tuple[int, int, int, int, int, int]
"""Origin, row, region, bytes, the step that makes it, and the step after which it goes."""


@frozen
class Lifetimes:
    """One entry for each piece of memory. An operator with several results has one for each result that is taken, and
    one, by its own row, for the rest."""

    origins: bytes = field(repr=False)
    rows: array[int] = field(repr=False)
    regions: array[int] = field(repr=False)
    bytes: array[int] = field(repr=False)
    made: array[int] = field(repr=False)
    """The number of a step in the schedule; -1 for what is there before the first."""
    last: array[int] = field(repr=False)
    """The step after which it is given back; the length of the schedule for what stays."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Lifetime]:
        columns = (self.origins, self.rows, self.regions, self.bytes, self.made, self.last)
        return zip(*columns, strict=True)

    def alive_at(self, step: int) -> list[int]:
        """The entries that are alive while a step runs, in the order in which they were made; at -1 the inputs."""
        return [at for at, (made, last) in enumerate(zip(self.made, self.last, strict=True)) if made <= step <= last]


def lifetimes(facts: Facts, schedule: Schedule) -> Lifetimes:
    """The lifetimes of a step that runs in this order; one pass over its steps and one over its readers."""
    found = [*_Lifetimes(facts, schedule).all()]
    origins, rows, regions, sizes, made, last = tuple(zip(*found, strict=True)) or ((),) * 6
    return Lifetimes(
        bytes(origins), array("i", rows), array("i", regions), array("q", sizes), array("i", made), array("i", last)
    )


def generator_state_bytes(facts: Facts, row: int) -> int:
    """Of the generator of the device that a random operator runs on."""
    around = (row, *facts.followers.get(row, ()), *facts.inputs[row])
    device = next((facts.devices[each] for each in around if facts.devices[each]), "")
    return _STATE_ON_CPU if device.startswith("cpu") else _STATE_ELSEWHERE


class _Lifetimes:
    """A value is named by its row; its second computation in the nth region of the backward by ``row + n * length``."""

    def __init__(self, facts: Facts, schedule: Schedule) -> None:
        self.facts = facts
        self.schedule = schedule
        self.length = len(facts)
        self.roots = storage_roots(facts)
        self._find_pieces()

    def all(self) -> Iterator[Lifetime]:
        facts, end = self.facts, len(self.schedule)
        last = self._last_uses()
        backward = next((step for step, region in enumerate(self.schedule.regions) if region), end)
        for row, op in enumerate(facts.ops):
            if facts.input_kinds[row] == InputKind.TANGENT:
                if backward < end:
                    yield Origin.TANGENT, row, 0, facts.bytes[row], backward, max(last.get(row, end), backward)
            elif op in ("placeholder", "get_attr"):
                yield Origin.INPUT, row, 0, facts.bytes[row], -1, end
        yield from self._allocations(last)
        for first, second in self._random_reruns():
            row = self.schedule.rows[first]
            yield Origin.GENERATOR_STATE, row, 0, generator_state_bytes(self.facts, row), first, second

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

    def _allocations(self, last: dict[int, int]) -> Iterator[Lifetime]:
        """What the steps allocate, in their order; ``last``: storage → the step after which it is given back."""
        facts, length, end = self.facts, self.length, len(self.schedule)
        computed: set[int] = set()
        for step, (kind, row, region) in enumerate(self.schedule):
            if kind not in ALLOCATES:
                continue
            if kind == _COPY_FROM_HOST:
                value = row + region * length
                yield Origin.COPY_FROM_HOST, row, region, facts.bytes[row], step, last.get(value, end)
                continue
            origin, shift = (Origin.FIRST_RUN, 0) if kind == _FIRST_RUN else (Origin.SECOND_RUN, region * length)
            if self.roots[row] != row or (row in self.owner_of and self.owner_of[row] + shift in computed):
                continue
            computed.add(row + shift)
            rest = facts.bytes[row]
            for piece in self.pieces_of.get(row, ()):
                if piece + shift in last:
                    size = facts.bytes[piece]
                    yield origin, piece, region, size, step, max(last[piece + shift], last[row + shift])
                    rest -= size
            yield origin, row, region, rest, step, last.get(row + shift, end)

    def _random_reruns(self) -> list[tuple[int, int]]:
        """The first and the last step of each random operator that runs again; in between its state is kept."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for step, (kind, row, _) in enumerate(self.schedule):
            if self.facts.flags[row] & Flag.RANDOM and self.facts.owners[row] == row and kind <= _SECOND_RUN:
                first.setdefault(row, step)
                last[row] = step
        return [(step, last[row]) for row, step in first.items() if last[row] > step]

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
                last[storage[value]] = step
                for source in sources:
                    second = source + region * length
                    last[storage[second] if second in storage else storage.get(source, source)] = step
        for row, step in self.schedule.held:
            value = read(row, self.schedule.regions[step])
            last[value] = max(last.get(value, step), step)
        end = max(self.schedule.regions, default=0)
        for row, phase in enumerate(facts.phases):
            if phase == Phase.OUTPUT:
                for source in facts.inputs[row]:
                    late = facts.kind is GraphKind.JOINT and facts.ops[row] == "output" and is_gradient(facts, source)
                    last[read(source, end if late else 0)] = len(self.schedule)
        return last
