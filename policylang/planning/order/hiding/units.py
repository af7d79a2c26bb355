"""What the list scheduler moves as one: the units of an order, and what has to run before what among them.

A collective that may move takes along what only it needs and what may stand anywhere before it, as the cast of a shard.
What takes neither time nor memory, views and the waits of collectives that may move, is no unit: it runs right before
the first that reads it. Pieces of a tuple are taken right behind the operator that returns it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from attrs import define, field

from policylang.graph.facts import Facts, Flag, returns_memory_of_input, storage_roots
from policylang.operators.names import GETITEM, WAITS
from policylang.planning.order.dependencies import Dependencies
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import streams_of

_SHARE = 0.1
"""Of a collective's time: what it takes along takes no longer."""


@define(eq=False)
class Units:
    """One entry a unit, in the order given."""

    rows: list[list[int]]
    """What runs one after the other."""
    before: list[list[int]]
    after: list[list[int]] = field(init=False)
    seconds: list[float]
    """Of its computation."""
    sent: list[int]
    """The row of the collective that it issues, -1 for none."""
    streams: list[str]
    """Of that collective."""
    lengths: list[float]
    """Seconds of that collective."""
    awaits: list[tuple[int, ...]]
    """The units whose collectives have to be over before it runs."""
    movable: bytearray
    """1 for a collective that may move."""
    passive: bytearray
    """By row, 1 for what runs right before the first unit that reads it."""
    inputs: Sequence[Sequence[int]]
    """By row, the passive rows among what it reads."""
    waits: list[list[int]]
    """The passive rows that await its collective."""

    def __len__(self) -> int:
        return len(self.rows)

    def in_rows(self, order: Iterable[int]) -> list[int]:
        """The rows of units that run in this order, all else between them; ``~unit`` awaits the unit's collective."""
        found: list[int] = []
        done = bytearray(len(self.passive))
        for unit in order:
            pending = [*reversed(self.waits[~unit] if unit < 0 else self.rows[unit])]
            while pending:
                row = pending[-1]
                missing = [each for each in self.inputs[row] if not done[each]]
                if missing:
                    pending.extend(reversed(missing))
                    continue
                pending.pop()
                if not done[row]:
                    done[row] = 1
                    found.append(row)
        return found


def units(
    facts: Facts, order: Sequence[int], dependencies: Dependencies, times: NodeTimes, movable: Collection[int]
) -> Units:
    """O(nodes + edges)."""
    return _Reading(facts, order, dependencies, times, movable).units()


class _Reading:
    def __init__(
        self,
        facts: Facts,
        order: Sequence[int],
        dependencies: Dependencies,
        times: NodeTimes,
        movable: Collection[int],
    ) -> None:
        self.facts, self.order, self.times = facts, order, times
        self.streams = streams_of(facts)
        self.roots = storage_roots(facts)
        self.movable = frozenset(row for row in movable if row in self.streams.started)
        runs = bytearray(len(facts))
        for row in order:
            runs[row] = 1
        self.before: list[list[int]] = [[] for _ in range(len(facts))]
        self.after: list[list[int]] = [[] for _ in range(len(facts))]
        stays = -1  # the last collective that keeps its place among those that do
        for row in order:
            before = dict.fromkeys(each for each in dependencies.before[row] if runs[each])
            if row in self.streams.started and row not in self.movable:
                if stays >= 0:
                    before[stays] = None
                stays = row
            self.before[row] = [*before]
            for each in before:
                self.after[each].append(row)
        self.runs = runs

    def units(self) -> Units:
        facts, order = self.facts, self.order
        passive = self._passive()
        behind = self._behind(passive)
        reads, waits = self._past_passive(passive)
        taken = self._taken_along(passive, reads)
        members: dict[int, list[int]] = {}
        for row in order:
            if not passive[row]:
                members.setdefault(taken.get(row, behind.get(row, row)), []).append(row)
        mains = [row for row in order if row in members]
        unit_of = {row: at for at, main in enumerate(mains) for row in members[main]}
        before, awaits, seconds = list[list[int]](), list[tuple[int, ...]](), list[float]()
        for at, main in enumerate(mains):
            rows = members[main]
            before.append([*dict.fromkeys(unit_of[each] for row in rows for each in reads[row] if unit_of[each] != at)])
            awaited = (unit_of[each] for row in rows for each in waits[row] if self.runs[each])
            awaits.append(tuple(each for each in dict.fromkeys(awaited) if each != at))
            seconds.append(sum(self.times.seconds[row] for row in rows if row not in self.streams.started))
        started = self.streams.started
        sent = [main if main in started else -1 for main in mains]
        found = Units(
            rows=[members[main] for main in mains],
            before=before,
            seconds=seconds,
            sent=sent,
            streams=[started.get(main, "") for main in mains],
            lengths=[self.times.seconds[main] if main in started else 0.0 for main in mains],
            awaits=awaits,
            movable=bytearray(main in self.movable for main in mains),
            passive=passive,
            inputs=[[each for each in facts.inputs[row] if passive[each]] for row in range(len(facts))],
            waits=[[each for each in self._waits_of(main) if passive[each]] for main in mains],
        )
        found.after = [[] for _ in mains]
        for at, each in enumerate(before):
            for earlier in each:
                found.after[earlier].append(at)
        return found

    def _waits_of(self, row: int) -> list[int]:
        """The waits of a collective, or of the pieces that it returns."""
        facts, found = self.facts, list[int]()
        if row in self.streams.started:
            for each in facts.users[row]:
                pieces = facts.users[each] if facts.targets[each] == GETITEM else (each,)
                found += (piece for piece in pieces if facts.targets[piece] in WAITS)
        return found

    def _passive(self) -> bytearray:
        """Views and waits that only data ties, whose memory somebody reads after them."""
        facts, roots = self.facts, self.roots
        passive = bytearray(len(facts))
        for row in self.order:
            inputs, target = facts.inputs[row], facts.targets[row]
            if not inputs or not self.after[row] or self.times.seconds[row] or row in self.streams.started:
                continue
            if roots[row] == row or any(roots[each] != roots[row] for each in inputs if self.runs[each]):
                continue
            if target in WAITS:
                awaited = self.streams.awaited.get(row, ())
                if any(each not in self.movable for each in awaited):
                    continue
            elif target != GETITEM and not returns_memory_of_input(facts, row):
                continue
            if facts.flags[row] & (Flag.WRITES | Flag.EFFECTFUL | Flag.RANDOM):
                continue
            data = set(inputs)
            if all(each in data for each in self.before[row]) and all(
                row in facts.inputs[each] for each in self.after[row]
            ):
                passive[row] = 1
        return passive

    def _behind(self, passive: bytearray) -> dict[int, int]:
        """Pieces of a tuple, and the operator that returns it."""
        found: dict[int, int] = {}
        for row in self.order:
            if self.facts.targets[row] == GETITEM and not passive[row] and len(self.before[row]) == 1:
                source = self.before[row][0]
                if not passive[source]:
                    found[row] = found.get(source, source)
        return found

    def _past_passive(self, passive: bytearray) -> tuple[list[list[int]], list[tuple[int, ...]]]:
        """By row, what else than passive rows has to run before it, and the collectives that it awaits."""
        reads: list[list[int]] = [[] for _ in passive]
        waits: list[tuple[int, ...]] = [()] * len(passive)
        awaited = self.streams.awaited
        for row in self.order:
            found: dict[int, None] = {}
            over = dict.fromkeys(awaited.get(row, ()))
            for each in self.before[row]:
                if passive[each]:
                    found.update(dict.fromkeys(reads[each]))
                    over.update(dict.fromkeys(waits[each]))
                else:
                    found[each] = None
            reads[row], waits[row] = [*found], tuple(over)
        return reads, waits

    def _taken_along(self, passive: bytearray, reads: list[list[int]]) -> dict[int, int]:
        """What only a collective that may move needs, which costs no memory and hardly time to be run right before."""
        facts, seconds = self.facts, self.times.seconds
        readers: dict[int, set[int]] = {}
        for row in self.order:
            if not passive[row]:
                for each in reads[row]:
                    readers.setdefault(each, set()).add(row)
        taken: dict[int, int] = {}
        barred = Flag.WRITES | Flag.EFFECTFUL | Flag.RANDOM | Flag.MULTI_OUTPUT
        for row in reversed(self.order):
            into = {taken.get(each, each) for each in readers.get(row, ())}
            if passive[row] or row in self.streams.started or len(into) != 1 or facts.flags[row] & barred:
                continue
            (main,) = into
            if main not in self.movable or row in self.streams.awaited or seconds[row] > _SHARE * seconds[main]:
                continue
            data = set(facts.inputs[row])
            if any(each not in data for each in self.before[row]) or facts.targets[row] == GETITEM:
                continue
            held = sum(
                facts.bytes[each] for each in facts.inputs[row] if facts.ops[self.roots[each]] == "call_function"
            )
            if held <= facts.bytes[row] and all(row in facts.inputs[each] for each in self.after[row]):
                taken[row] = main
        return taken
