"""What the list scheduler moves as one: the units of an order, and what has to run before what among them.

A collective that may move takes along what only it needs and what may stand anywhere before it, as the cast of a shard.
What takes neither time nor memory, views and the waits of collectives that may move, is no unit: it runs right before
the first that reads it. Pieces of a tuple are taken right behind the operator that returns it.


---

When the units of an order are due, and when its collectives have to start, if nothing is to be late for them.

Times are seconds of computation from the beginning: the place in a step that computes one unit after the other as given
and never waits. That is how far a step has come, whatever it waited for on the way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from attrs import define, field

from policylang.graph.facts import Facts, Flag
from policylang.graph.storage import returns_memory_of_input, storage_roots
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


_MARGIN = 1.2
"""A collective is started ahead as if it, and all before its deadline on its stream, took this much longer."""
_LOOSE = 0.25
"""A unit is loose whose longest path takes no more than this share of what is computed before it as given."""
_LIGHT = 0.5
"""Of a collective's time: its result does not make it urgent if the longest path of computation from there to the end
takes less. The path counts, not the first that reads: pieces are cut out of a bucket before anything computes."""


class LatestStarts:
    """O(units and their edges). ``close``: so far ahead of its reader, a share of all computation, what is loose is
    due; ``nearest``: a collective's result is urgent by what computes with it first, not by all that follows."""

    def __init__(self, units: Units, close: float, *, nearest: bool = False) -> None:
        count, self._close, self._nearest = len(units), close, nearest
        self.place: list[float] = []
        """Where a unit computes as given."""
        now = 0.0
        for seconds in units.seconds:
            self.place.append(now)
            now += seconds
        self.total = now
        self.loose = bytearray(count)
        """1 for what the rest of the step hardly leads to, as what is computed again from what is given: it could run
        long before its place."""
        self.at_end = bytearray(count)
        """1 for what nothing but the end of the step needs: gradients of weights, and what scatters and awaits them."""
        self.due = [0.0] * count
        """When a unit has to start, no later than as given, for the collectives that depend on it not to be late."""
        self.latest = [0.0] * count
        """Of a collective: when it has to start for those behind it on its stream not to be late either."""
        self.early = [0.0] * count
        """Of a collective: from when on it is started ahead."""
        self.read = [now] * count
        """Of a collective: where its first reader computes as given."""
        self._find(units)
        chained = (
            length for unit, length in enumerate(units.lengths) if not self.at_end[unit] and not self.loose[unit]
        )
        self.hole = max(chained, default=0.0)
        """Of the collectives that computation waits for between two of its own results, the longest: as those of tensor
        parallelism, which other computation has to hide."""

    def keys(self, lag: float) -> list[float]:
        """What computes goes in the order of these: when it is due, but what only the end of the step needs so much
        later than as given, to be there when there is something to hide."""
        return [
            min(due, place + lag) if at_end else due
            for due, place, at_end in zip(self.due, self.place, self.at_end, strict=True)
        ]

    def _find(self, units: Units) -> None:
        path = [0.0] * len(units)  # the longest that ends with a unit
        for unit, before in enumerate(units.before):
            head = max((path[each] for each in before), default=0.0)
            head = max((head, *(path[each] + units.lengths[each] for each in units.awaits[unit])))
            self.loose[unit] = head <= _LOOSE * self.place[unit]
            path[unit] = head + units.seconds[unit]
        awaited_by: list[list[int]] = [[] for _ in units.rows]
        for unit, awaited in enumerate(units.awaits):
            for each in awaited:
                awaited_by[each].append(unit)
        tail = [0.0] * len(units)  # the longest path of computation from a unit to the end
        free: dict[str, tuple[float, float]] = {}  # by stream, before when it has to be free for what is behind
        for unit in range(len(units) - 1, -1, -1):
            after = units.after[unit]
            tail[unit] = units.seconds[unit] + max((tail[each] for each in after), default=0.0)
            late = min((self._wanted(each, unit) for each in after), default=self.total)
            self.at_end[unit] = all(self.at_end[each] for each in after) and self._is_light(
                units, unit, units.seconds[unit] if self._nearest else tail[unit]
            )
            if not units.movable[unit]:
                due = late - units.seconds[unit]
                self.due[unit] = due if self.at_end[unit] else min(due, self.place[unit])
                continue
            length, readers = units.lengths[unit], awaited_by[unit]
            start = min(late, min((self._wanted(each, unit) for each in readers), default=self.total) - length)
            self.read[unit] = min((self.place[each] for each in readers), default=self.total)
            self.at_end[unit] = self.at_end[unit] and all(self.at_end[each] for each in readers)
            self.due[unit] = start - units.seconds[unit]
            self.latest[unit] = self.early[unit] = start
            if not self.at_end[unit]:
                last, early = free.get(units.streams[unit], (self.total, self.total))
                self.latest[unit] = min(start, last - length)
                self.early[unit] = min(start - length, early - _MARGIN * length)
                free[units.streams[unit]] = (self.latest[unit], self.early[unit])

    def _wanted(self, reader: int, unit: int) -> float:
        """When a unit has to be done for one that reads it. Where more is sent than computed, all that leads from one
        collective to the next is long overdue; what is loose is no more so than its readers are close."""
        due = self.due[reader]
        if self.loose[unit] and not self.loose[reader]:
            return max(due, self.place[reader] - self._close * self.total)
        return due

    def _is_light(self, units: Units, unit: int, tail: float) -> bool:
        awaited = units.awaits[unit]
        return not awaited or tail <= _LIGHT * sum(units.lengths[each] for each in awaited)


def announced(units: Units) -> tuple[list[list[int]], list[float]]:
    """For each unit the collectives whose longest path begins where its own collective ends; and for each collective
    how much computation that path still has: when one is on the way, it is known when the other can come."""
    done, announcer, computes = [0.0] * len(units), [-1] * len(units), [0.0] * len(units)
    for unit, before in enumerate(units.before):
        latest = 0.0
        for each in before:
            if done[each] > latest:
                latest, announcer[unit], computes[unit] = done[each], announcer[each], computes[each]
        for each in units.awaits[unit]:
            over = done[each] + units.lengths[each]
            if over >= latest:
                latest, announcer[unit], computes[unit] = over, each, 0.0
        done[unit] = latest + units.seconds[unit]
        computes[unit] += units.seconds[unit]
    found: list[list[int]] = [[] for _ in units.rows]
    for unit, each in enumerate(announcer):
        if units.movable[unit] and each >= 0:
            found[each].append(unit)
    return found, computes
