"""The memory of a training step without fusion: lifetimes, what is alive at each step, and the peak.

Each node allocates its memory (a view shares that of what it views, an operator with several results allocates them
all), which is freed after its last reader; a tuple holds its pieces until the last is taken. Graph inputs and constants
are alive throughout, except tangents, which live from the start of the backward to their last reader. Graph outputs
stay alive, and so does what a checkpoint holds until it recomputes its block. A value copied to the host is held until
its copy is awaited, and allocated anew at the start of the copy back. Workspaces and fragmentation do not count.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import assert_never

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, Schedule, StepKind, is_gradient
from policylang.language.cancellation import check_cancelled
from policylang.operators.names import GETITEM

_FIRST_RUN, _SECOND_RUN = int(StepKind.FIRST_RUN), int(StepKind.SECOND_RUN)


def _allocates(kind: StepKind) -> bool:
    match kind:
        case StepKind.FIRST_RUN | StepKind.SECOND_RUN | StepKind.COPY_FROM_HOST:
            return True
        case StepKind.SCALE | StepKind.NARROW | StepKind.WIDEN:
            return True
        case StepKind.COPY_TO_HOST | StepKind.WAIT_TO_HOST | StepKind.WAIT_FROM_HOST:
            return False
        case _:
            assert_never(kind)


ALLOCATES = tuple(int(kind) for kind in StepKind if _allocates(kind))
"""The kinds of steps that allocate memory."""

_FIRST_FORM = (_FIRST_RUN, int(StepKind.SCALE), int(StepKind.NARROW))
_STATE_ON_CPU, _STATE_ELSEWHERE = 5056, 16
"""Bytes of a generator's state, which is kept for each recomputed random operator."""


class Origin(IntEnum):
    FIRST_RUN = 0
    SECOND_RUN = 1
    """A forward value is recomputed."""
    COPY_FROM_HOST = 2
    INPUT = 3
    """An input or a constant of the graph: there before the first step."""
    TANGENT = 4
    """Passed in as the backward begins."""
    GENERATOR_STATE = 5
    """Kept for a recomputed random operator."""
    NARROW = 6
    """The narrow form of a value, or its scales."""
    WIDEN = 7
    """A value that was narrowed, widened again."""


_ORIGINS = {
    StepKind.COPY_FROM_HOST: Origin.COPY_FROM_HOST,
    StepKind.SCALE: Origin.NARROW,
    StepKind.NARROW: Origin.NARROW,
    StepKind.WIDEN: Origin.WIDEN,
}
Lifetime = tuple[int, int, int, int, int, int]
"""Origin, node, region, bytes, the step that makes it, and the step after which it goes."""


@frozen
class Lifetimes:
    """One entry for each piece of memory. An operator with several results has one for each result that is read, and
    one, under its node, for the rest."""

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
    """The state of the generator of the device that a random operator runs on."""
    around = (row, *facts.followers.get(row, ()), *facts.inputs[row])
    device = next((facts.devices[each] for each in around if facts.devices[each]), "")
    return _STATE_ON_CPU if device.startswith("cpu") else _STATE_ELSEWHERE


def pieces_with_memory(facts: Facts) -> tuple[dict[int, int], dict[int, list[int]]]:
    """The ``getitem`` nodes with memory of their own, with the operator whose tuple they are of; and the inverse."""
    roots, owner_of, pieces_of = facts.storage_roots, dict[int, int](), dict[int, list[int]]()
    for row, target in enumerate(facts.targets):
        if target == GETITEM and roots[row] == row and facts.inputs[row]:
            source = facts.inputs[row][0]
            if facts.ops[source] == "call_function":
                owner_of[row] = owner_of.get(source, source)
                pieces_of.setdefault(owner_of[row], []).append(row)
    return owner_of, pieces_of


class _Lifetimes:
    """A value is named by its row; its recomputation in the nth region of the backward by ``row + n * length``. Copies
    back may be several of one value in a region: from where one is awaited, readers have that."""

    def __init__(self, facts: Facts, schedule: Schedule) -> None:
        self.facts, self.schedule, self.length, self.roots = facts, schedule, len(facts), facts.storage_roots
        self.owner_of, self.pieces_of = pieces_with_memory(facts)

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

    def _allocations(self, last: dict[int, int]) -> Iterator[Lifetime]:
        """The allocations of the steps, in their order; ``last``: storage → the step after which it is given back."""
        facts, length, end, roots = self.facts, self.length, len(self.schedule), self.roots
        sizes, owner_of, pieces_of = facts.bytes, self.owner_of, self.pieces_of
        computed: set[int] = set()
        for step, (kind, row, region) in enumerate(self.schedule):
            if kind > _SECOND_RUN:
                if kind not in ALLOCATES:
                    continue
                size = self.schedule.step_bytes(facts, kind, row)
                yield _ORIGINS[StepKind(kind)], row, region, size, step, last.get(~step, end)
                continue
            origin, shift = (Origin.FIRST_RUN, 0) if kind == _FIRST_RUN else (Origin.SECOND_RUN, region * length)
            if roots[row] != row or (row in owner_of and owner_of[row] + shift in computed):
                continue
            computed.add(row + shift)
            rest = sizes[row]
            for piece in pieces_of.get(row, ()):
                if piece + shift in last:
                    size = sizes[piece]
                    yield origin, piece, region, size, step, max(last[piece + shift], last[row + shift])
                    rest -= size
            yield origin, row, region, rest, step, last.get(row + shift, end)

    def _random_reruns(self) -> list[tuple[int, int]]:
        """The first and the last step of each recomputed random operator; in between its state is kept."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        owners, flags = self.facts.owners, self.facts.flags
        random = {row for row, flag in enumerate(flags) if flag & Flag.RANDOM and owners[row] == row}
        for step, (kind, row, _) in enumerate(self.schedule) if random else ():
            if row in random and kind <= _SECOND_RUN:
                first.setdefault(row, step)
                last[row] = step
        return [(step, last[row]) for row, step in first.items() if last[row] > step]

    def _last_uses(self) -> dict[int, int]:
        """Storage → the step after which it is given back; past the end for what the graph returns."""
        facts, length, roots = self.facts, self.length, self.roots
        last: dict[int, int] = {}
        storage: dict[int, int] = {}  # of every value that was computed; an input is its own; ~step of a copy back
        coming = defaultdict[int, list[int]](list)  # the copies back that are under way, by row
        narrow = defaultdict[int, list[int]](list)  # the narrow form of each value
        held = defaultdict[int, list[int]](list)
        for row, step in self.schedule.held:
            held[step].append(row)

        def read(source: int, region: int) -> int:  # in the backward the second copy, where there is one
            second = source + region * length
            return storage[second] if second in storage else storage.get(source, source)

        inputs = facts.inputs
        for step, (kind, row, region) in enumerate(self.schedule):
            if step in held:
                for each in held[step]:
                    for value in (read(each, region),) if each >= 0 else narrow[~each]:
                        last[value] = max(last.get(value, step), step)
            if kind <= _SECOND_RUN:
                shift = region * length
                value = row if kind == _FIRST_RUN else row + shift
                made = storage[value] = value if roots[row] == row else read(inputs[row][0], region)
                last[made] = step
                for source in inputs[row]:
                    second = source + shift
                    last[storage[second] if second in storage else storage.get(source, source)] = step
                continue
            match StepKind(kind):
                case StepKind.COPY_FROM_HOST:
                    coming[row].append(~step)
                    last[~step] = step
                case StepKind.WAIT_FROM_HOST:
                    value = storage[row + region * length] = coming[row].pop(0)
                    last[value] = step  # at least, should nothing read it
                case StepKind.WAIT_TO_HOST:
                    last[storage.get(row, row)] = step
                case StepKind.SCALE | StepKind.NARROW:
                    narrow[row].append(~step)
                    last[storage.get(row, row)] = last[~step] = step
                case StepKind.WIDEN:
                    storage[row + region * length] = ~step
                    last.update(dict.fromkeys((~step, *narrow[row]), step))
                case StepKind.FIRST_RUN | StepKind.SECOND_RUN | StepKind.COPY_TO_HOST:
                    pass
                case other:
                    assert_never(other)
        end = max(self.schedule.regions, default=0)
        for row, phase in enumerate(facts.phases):
            if phase == Phase.OUTPUT:
                for source in facts.inputs[row]:
                    late = facts.kind is GraphKind.JOINT and facts.ops[row] == "output" and is_gradient(facts, source)
                    last[read(source, end if late else 0)] = len(self.schedule)
        return last


@frozen(eq=False)
class Timeline:
    """The memory alive while each node runs, its results included. One entry for each run of a node and each copy from
    the host, in the order of execution."""

    rows: Sequence[int]
    live: Sequence[int]
    """Bytes."""
    again: bytes
    """1 where a step recomputes a forward value, or fetches it from the host."""
    backward: bytes
    """1 where a step belongs to the backward, recomputations included."""
    resident: int
    """Bytes of the graph inputs that are there before the first step."""
    steps: Sequence[int] = field(repr=False)
    """The number of each entry's step in the schedule."""
    lifetimes: Lifetimes = field(repr=False)
    """Value by value; those alive at a step sum up to its ``live``."""


def simulate(facts: Facts, schedule: Schedule) -> Timeline:
    """The memory of a step that runs in this order."""
    check_cancelled()
    found = lifetimes(facts, schedule)
    length = len(schedule)
    changes = array("q", bytes(8 * (length + 2)))  # the first of what is there before the first step
    for size, made, last in zip(found.bytes, found.made, found.last, strict=True):
        changes[made + 1] += size
        if last < length:
            changes[last + 2] -= size
    alive = array("q", accumulate(changes))
    steps = array("i", (step for step, kind in enumerate(schedule.kinds) if kind in ALLOCATES))
    return Timeline(
        rows=array("i", (schedule.rows[step] for step in steps)),
        live=array("q", (alive[step + 1] for step in steps)),
        again=bytes(schedule.kinds[step] not in _FIRST_FORM for step in steps),
        backward=bytes(schedule.regions[step] > 0 for step in steps),
        resident=alive[0],
        steps=steps,
        lifetimes=found,
    )


@frozen
class Peak:
    """Bytes; ``forward`` and ``backward`` are the worst moments of each, and ``at`` the node of the worse one."""

    forward: int
    backward: int
    at: str

    @property
    def bytes(self) -> int:
        return max(self.forward, self.backward)


def estimate_peak(facts: Facts, schedule: Schedule) -> Peak:
    """The worst moments of forward and backward in a step that runs in this order."""
    return peak_of(simulate(facts, schedule), facts)


def peak_of(timeline: Timeline, facts: Facts) -> Peak:
    """The worst moments; what is resident where forward or backward has no step."""
    worst = [timeline.resident, timeline.resident]
    for live, half in zip(timeline.live, timeline.backward, strict=True):
        worst[half] = max(worst[half], live)
    moment = highest_moment(timeline)
    return Peak(worst[0], worst[1], facts.names[timeline.rows[moment]] if moment is not None else "")


def highest_moment(timeline: Timeline) -> int | None:
    """The first entry of the timeline in which most is alive; None if that is before the first step."""
    most = max(timeline.live, default=0)
    return timeline.live.index(most) if most > timeline.resident else None
