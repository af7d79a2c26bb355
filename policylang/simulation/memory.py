"""The memory that is alive while each node of a step runs, from the lifetimes of its values alone.

A simulation of the nodes as they run without fusion: a joint graph forward first and then backward, a flat graph in
its own order. Each node allocates its memory (a view shares that of what it views, an operator with several results
allocates them all), which is given back after its last reader. Graph inputs and constants are there from beginning to
end, but for tangents, which come with the backward and go after their last reader; what the graph returns stays. What
leads to no result does not run. Recomputed values are computed again as late as possible, right before the first
backward node that needs them, all that is needed of a tuple at once, and once more for each further stretch of backward
that a flat graph has. Offloaded values leave the device, and come back once a stretch, by the rule of
:mod:`policylang.planning.decisions.offloading`. What a kernel needs for itself, and what the allocator wastes, is not
counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from attrs import frozen

from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase
from policylang.operators.names import GETITEM
from policylang.planning.liveness import is_gradient
from policylang.planning.storage import IN_FLIGHT, storage_roots

# Plain integers: the enumeration's own operators cost ten times as much.
_HAS_EFFECT = int(Flag.RANDOM | Flag.EFFECTFUL)
_RANDOM = int(Flag.RANDOM)
_WRITES_OUTSIDE = int(Flag.WRITES)
_WRITES_WITHIN = int(Flag.WRITES | Flag.REPEATABLE)
_FORWARD, _BACKWARD = int(Phase.FORWARD), int(Phase.BACKWARD)

_STATE_ON_CPU, _STATE_ELSEWHERE = 5056, 16
"""Bytes of a generator's state, which is kept for each random operator that runs again."""


@frozen(eq=False)
class Timeline:
    """The memory alive while each node runs, its own results included. One entry a step, in the order of execution."""

    rows: Sequence[int]
    live: Sequence[int]
    """Bytes."""
    again: bytes
    """1 where a step computes a forward value a second time, or fetches it from the host."""
    backward: bytes
    """1 where a step belongs to the backward, second computations included."""
    resident: int
    """Bytes of the graph inputs that are there before the first step."""


def simulate(facts: Facts, recomputed: Iterable[int] = (), offloaded: Iterable[int] = ()) -> Timeline:
    """The memory of a step in which the ``recomputed`` rows run a second time, the ``offloaded`` ones leave the device
    in between, and all else that is read is kept."""
    return _Simulation(facts, recomputed, offloaded).run()


class _Simulation:
    """A value is named by its row; its second computation in the nth stretch of backward by ``row + n * length``."""

    def __init__(self, facts: Facts, recomputed: Iterable[int], offloaded: Iterable[int]) -> None:
        self.facts = facts
        self.length = len(facts)
        self.roots = storage_roots(facts)
        self.again = bytearray(self.length)
        self.moved = bytearray(self.length)
        for row in recomputed:
            self.again[row] = 1
        for row in offloaded:
            self.again[row] = self.moved[row] = 1  # it is there a second time, and is made of nothing
        self.live = self._live_rows()
        self.held_until = self._held_by_forward()

    def run(self) -> Timeline:
        order, stretches = self._order()
        sizes, freed = self._allocations(order, stretches)
        length = self.length
        alive = resident = self._resident()
        lives, rows, again, backward = array("q"), array("i"), bytearray(), bytearray()
        tangents = self._tangents(order)
        for step, value in enumerate(order):
            row = value % length
            if stretches[step]:
                alive += tangents
                tangents = 0
            alive += sizes.get(value, 0)
            lives.append(alive)
            rows.append(row)
            again.append(value >= length)
            backward.append(stretches[step] > 0)
            alive -= freed.get(step, 0)
        return Timeline(rows, lives, bytes(again), bytes(backward), resident)

    # --- what runs, and in which order --------------------------------------------------------------------------

    def _live_rows(self) -> bytearray:
        """1 for what leads to a result or has an effect; of the forward only what runs there as well."""
        facts, again = self.facts, self.again
        live = bytearray(self.length)
        wanted = bytearray(self.length)  # forward rows that a second computation reads, itself in the backward
        for row in range(self.length - 1, -1, -1):
            phase = facts.phases[row]
            if (
                phase == Phase.OUTPUT
                or facts.flags[row] & _HAS_EFFECT
                or facts.flags[row] & _WRITES_WITHIN == _WRITES_OUTSIDE
            ):
                live[row] = 1
            if wanted[row] and self.moved[row]:
                live[row] = 1
            elif wanted[row]:
                for source in facts.inputs[row]:
                    (wanted if again[source] else live)[source] = 1
            if not live[row]:
                continue
            for source in facts.inputs[row]:
                second = again[source] and (phase == _BACKWARD or self._is_gradient(row, source))
                (wanted if second else live)[source] = 1
        return live

    def _has_effect(self, row: int) -> bool:
        flags = self.facts.flags[row]
        return bool(flags & _HAS_EFFECT) or flags & _WRITES_WITHIN == _WRITES_OUTSIDE

    def _is_gradient(self, row: int, source: int) -> bool:
        """Whether the graph returns a forward value as the gradient it happens to be."""
        facts = self.facts
        return facts.kind is GraphKind.JOINT and facts.phases[row] == Phase.OUTPUT and is_gradient(facts, source)

    def _held_by_forward(self) -> dict[int, int]:
        """Of a flat graph, by storage: the last forward row that reads it, beside what is run again."""
        held: dict[int, int] = {}
        if self.facts.kind is not GraphKind.FLAT:
            return held
        for row in range(self.length):
            if self.live[row] and self.facts.phases[row] != _BACKWARD:
                for source in self.facts.inputs[row]:
                    held[self.roots[source]] = row
        return held

    def _order(self) -> tuple[list[int], list[int]]:
        """The values in the order of execution, and for each the stretch of backward it lies in, 0 for the forward."""
        facts = self.facts
        calls = [row for row in range(self.length) if self.live[row] and facts.ops[row] == "call_function"]
        if facts.kind is not GraphKind.FLAT:
            calls.sort(key=lambda row: facts.phases[row] == _BACKWARD)  # stable
        order: list[int] = []
        stretches: list[int] = []
        done: set[int] = set()
        stretch, before = 0, _FORWARD
        ends = self._stretch_ends(calls)
        for row in calls:
            phase = facts.phases[row]
            if phase == _BACKWARD:
                stretch += before != _BACKWARD
                self._append_again(row, stretch, ends[stretch - 1], order, done)
                stretches.extend([stretch] * (len(order) - len(stretches)))
            order.append(row)
            stretches.append(stretch if phase == _BACKWARD else 0)
            before = phase
        return self._fetched_early(order, stretches), stretches

    def _fetched_early(self, order: list[int], stretches: Sequence[int]) -> list[int]:
        """The order with what is fetched from the host standing where its copy starts."""
        starts: dict[int, int] = {}  # stretch to the step with which it begins
        fetched: dict[int, list[int]] = {}  # stretch to the steps at which offloaded values are used first
        for step, value in enumerate(order):
            starts.setdefault(stretches[step], step)
            if value >= self.length and self.moved[value % self.length]:
                fetched.setdefault(stretches[step], []).append(step)
        if not fetched:
            return order
        earlier: dict[int, list[int]] = {}
        for stretch, steps in fetched.items():
            for number, step in enumerate(steps):
                place = starts[stretch] if number < IN_FLIGHT else steps[number - IN_FLIGHT]
                earlier.setdefault(place, []).append(order[step])
        found: list[int] = []
        for step, value in enumerate(order):
            found.extend(earlier.get(step, ()))
            if value < self.length or not self.moved[value % self.length]:
                found.append(value)
        return found

    def _stretch_ends(self, calls: Sequence[int]) -> list[int]:
        phases = self.facts.phases
        return [
            row
            for row, following in zip(calls, [*calls[1:], -1], strict=True)
            if phases[row] == _BACKWARD and (following < 0 or phases[following] != _BACKWARD)
        ]

    def _append_again(self, reader: int, stretch: int, end: int, order: list[int], done: set[int]) -> None:
        """What has to be computed again for a backward row, in graph order, each once a stretch."""
        found: list[int] = []
        pending = [reader]
        while pending:
            for source in self.facts.inputs[pending.pop()]:
                value = source + stretch * self.length
                if self.again[source] and value not in done and not self._outlives(source, end):
                    done.add(value)
                    found.append(value)
                    if not self.moved[source]:
                        pending.append(source)
        order.extend(sorted(found))

    def _outlives(self, row: int, end: int) -> bool:
        """Whether the rest of the forward keeps a value beyond a stretch of backward anyway, which then reads it."""
        return bool(self.live[row]) and self.held_until.get(self.roots[row], -1) > end

    # --- what is allocated, and until when ----------------------------------------------------------------------

    def _resident(self) -> int:
        facts = self.facts
        return sum(size for row, size in enumerate(facts.bytes) if self._is_input(row) and not self._is_tangent(row))

    def _tangents(self, order: Sequence[int]) -> int:
        """Bytes that come with the first step of the backward."""
        return sum(self.facts.bytes[row] for row in range(self.length) if self._is_tangent(row)) if order else 0

    def _is_input(self, row: int) -> bool:
        return self.facts.ops[row] in ("placeholder", "get_attr")

    def _is_tangent(self, row: int) -> bool:
        return self.facts.input_kinds[row] == InputKind.TANGENT

    def _allocations(self, order: Sequence[int], stretches: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
        """By value what running it allocates, and by step what is given back after it."""
        last = self._last_uses(order, stretches)
        sizes: dict[int, int] = {}
        freed: dict[int, int] = {}

        def give_back(storage: int, size: int, not_before: int = 0) -> None:
            step = max(last.get(storage, len(order)), not_before)
            freed[step] = freed.get(step, 0) + size

        pieces = self._pieces()
        # A tuple holds all its pieces until the last is taken: right away, but where a flat graph, as it was traced,
        # takes one late.
        as_traced = self.facts.kind is GraphKind.FLAT
        for value in order:
            row = value % self.length
            if value >= self.length and self.moved[row]:
                sizes[value] = self.facts.bytes[row]
                give_back(value, sizes[value])
                continue
            if self.roots[row] != row or (row in pieces.owner_of and value - row + pieces.owner_of[row] in sizes):
                continue
            sizes[value] = rest = self.facts.bytes[row]
            for piece in pieces.of.get(row, ()):
                if (storage := value - row + piece) in last:
                    give_back(storage, self.facts.bytes[piece], last[value] if as_traced else 0)
                    rest -= self.facts.bytes[piece]
            give_back(value, rest)
        for first, second in self._replays(order):
            state = self._state_bytes(order[first] % self.length)
            sizes[order[first]] = sizes.get(order[first], 0) + state
            freed[second] = freed.get(second, 0) + state
        for row in range(self.length):
            if self._is_tangent(row):
                give_back(row, self.facts.bytes[row])
        return sizes, freed

    def _replays(self, order: Sequence[int]) -> list[tuple[int, int]]:
        """The first and the last step of each random operator that runs again; in between its state is kept."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for step, value in enumerate(order):
            row = value % self.length
            if self.moved[row]:
                continue
            if self.again[row] and self.facts.flags[row] & _RANDOM and self.facts.owners[row] == row:
                first.setdefault(row, step)
                last[row] = step
        return [(step, last[row]) for row, step in first.items() if last[row] > step]

    def _state_bytes(self, row: int) -> int:
        """Of the generator of the device that a random operator runs on."""
        facts = self.facts
        around = (row, *facts.followers.get(row, ()), *facts.inputs[row])
        device = next((facts.devices[each] for each in around if facts.devices[each]), "")
        return _STATE_ON_CPU if device.startswith("cpu") else _STATE_ELSEWHERE

    def _pieces(self) -> _Pieces:
        """The ``getitem`` rows with memory of their own, which the operator that they read allocates."""
        owner_of: dict[int, int] = {}
        of: dict[int, list[int]] = {}
        for row in range(self.length):
            if self.facts.targets[row] == GETITEM and self.roots[row] == row and self.facts.inputs[row]:
                source = self.facts.inputs[row][0]
                if self.facts.ops[source] == "call_function":
                    owner_of[row] = owner_of.get(source, source)
                    of.setdefault(owner_of[row], []).append(row)
        return _Pieces(owner_of, of)

    def _last_uses(self, order: Sequence[int], stretches: Sequence[int]) -> dict[int, int]:
        """Storage → the step after which it is given back; past the end for what the graph returns."""
        facts, length, roots = self.facts, self.length, self.roots
        owner_of = self._pieces().owner_of
        last: dict[int, int] = {}
        storage: dict[int, int] = {}  # of every value that was computed; an input is its own

        def read(source: int, stretch: int) -> int:
            """The storage of what a step reads: in the backward the second copy, where there is one."""
            second = source + stretch * length
            return storage[second] if second in storage else storage.get(source, source)

        for step, value in enumerate(order):
            row, stretch = value % length, stretches[step]
            sources = facts.inputs[row]
            if value >= length and self.moved[row]:
                storage[value] = value
                last[value] = step
                continue
            storage[value] = value if roots[row] == row else read(sources[0], stretch)
            last[storage[value]] = step
            if value >= length and row in owner_of and sources[0] + stretch * length in storage:
                continue  # the pieces of what is computed again are taken right away
            for source in sources:
                last[read(source, stretch)] = step
        self._hold_while_copied(last, stretches)
        end = max(stretches, default=0)
        for row in range(length):
            if facts.phases[row] == Phase.OUTPUT:
                for source in facts.inputs[row]:
                    last[read(source, end if self._is_gradient(row, source) else 0)] = len(order)
        return last

    def _hold_while_copied(self, last: dict[int, int], stretches: Sequence[int]) -> None:
        """What is copied to the host is held until its copy is awaited."""
        moved = {self.roots[row] for row in range(self.length) if self.moved[row]}
        leaving = sorted((last[root], root) for root in moved if root in last)
        forward = next((step for step, stretch in enumerate(stretches) if stretch), len(stretches)) - 1
        for number, (_, root) in enumerate(leaving):
            behind = number + IN_FLIGHT
            last[root] = leaving[behind][0] if behind < len(leaving) else max(forward, last[root])


@frozen
class _Pieces:
    """``getitem`` row to the operator whose result it is a part of, and the other way round."""

    owner_of: dict[int, int]
    of: dict[int, list[int]]
