"""Where each recomputation of a flat graph goes: worked out on columns, before a single node is touched.

A *region* is a maximal run of backward nodes between forward nodes that stay; a step with a chunked loss or several
calls of ``grad`` has more than one. Going through a region's nodes in order, the first node that needs a value which
does not live until then gets, just before itself, everything that has to run again for it; later nodes of the region
share those copies. A value that the rest of the forward keeps alive beyond a region is read there: it costs nothing.

O(nodes + edges), each region's copies sorted into forward order.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag, Phase
from policylang.graph.reading.memory import GraphMemory
from policylang.planning.storage import storage_roots


@frozen
class Batch:
    """Rows to run again just before the backward row ``anchor``, in forward order."""

    anchor: int
    rows: tuple[int, ...]


@frozen
class Region:
    """One run of backward nodes: its rows and what is run again within it."""

    rows: tuple[int, ...] = field(repr=False)
    batches: tuple[Batch, ...]

    @property
    def recomputed(self) -> list[int]:
        return [row for batch in self.batches for row in batch.rows]


@frozen
class Schedule:
    regions: tuple[Region, ...]
    erased: tuple[int, ...]
    """Forward rows that nothing reads any more, last first."""
    borrowed: frozenset[int]
    """Rows decided ``recompute`` that some region reads as they are: the forward needs them for longer anyway."""


def schedule(facts: Facts, recompute: Sequence[bool] | bytearray, memory: GraphMemory) -> Schedule:
    """The regions of a flat graph and what each runs again, for the rows that are to be recomputed."""
    life = _forward_life(facts, recompute, memory)
    borrowed: set[int] = set()
    regions = tuple(
        Region(rows, _batches(facts, recompute, memory, rows, life, borrowed)) for rows in _regions(facts, life.kept)
    )
    erased = tuple(row for row in range(len(facts) - 1, -1, -1) if recompute[row] and not life.kept[row])
    return Schedule(regions, erased, frozenset(borrowed))


def _regions(facts: Facts, kept: bytearray) -> list[tuple[int, ...]]:
    """Forward nodes that will be gone part nothing."""
    regions: list[tuple[int, ...]] = []
    run: list[int] = []
    phases, ops = facts.phases, facts.ops
    for row in range(len(facts)):
        if phases[row] == Phase.BACKWARD:
            run.append(row)
        elif run and phases[row] == Phase.FORWARD and kept[row] and ops[row] == "call_function":
            regions.append(tuple(run))
            run = []
    if run:
        regions.append(tuple(run))
    return regions


@frozen(eq=False)
class _ForwardLife:
    """What of the forward runs whatever is recomputed, and for how long its values are held anyway.

    Counted without what the copies themselves will read, so a value is said to be alive only where it surely is.
    """

    kept: bytearray
    """By row: it runs."""
    held_until: dict[int, int]
    """By the row that allocated some memory: the last forward row that reads it."""
    roots: Sequence[int]

    def outlives(self, row: int, end: int) -> bool:
        return bool(self.kept[row]) and self.held_until.get(self.roots[row], -1) > end


def _forward_life(facts: Facts, recompute: Sequence[bool] | bytearray, memory: GraphMemory) -> _ForwardLife:
    kept = bytearray(len(facts))
    kept_units: set[int] = set()
    held_until: dict[int, int] = {}
    phases, inputs, flags, ops = facts.phases, facts.inputs, facts.flags, facts.ops
    units, roots = memory.units, storage_roots(facts)
    always = int(Flag.RANDOM | Flag.EFFECTFUL)  # a draw that does not happen would shift every later one
    writers = memory.written.union(memory.statistics)
    for row in range(len(facts) - 1, -1, -1):
        if phases[row] == Phase.BACKWARD:
            for read in inputs[row]:
                if not recompute[read]:
                    kept[read] = True
            continue
        unit = units[row]
        if ops[row] == "call_function" and not kept[row]:
            kept[row] = not recompute[row] or bool(flags[row] & always) or unit in kept_units or row in writers
        if ops[row] != "output" and not kept[row]:
            continue
        if unit >= 0:
            kept_units.add(unit)
        for read in inputs[row]:
            kept[read] = True
            held_until.setdefault(roots[read], row)
            if units[read] >= 0:
                kept_units.add(units[read])
    return _ForwardLife(kept, held_until, roots)


def _batches(
    facts: Facts,
    recompute: Sequence[bool] | bytearray,
    memory: GraphMemory,
    region: tuple[int, ...],
    life: _ForwardLife,
    borrowed: set[int],
) -> tuple[Batch, ...]:
    """What a region runs again. ``borrowed`` collects the values that outlive the region and are read as they are."""
    end, inputs, units = region[-1], facts.inputs, memory.units
    done: set[int] = set()
    batches = []
    for anchor in region:
        found: list[int] = []
        pending = [read for read in inputs[anchor] if recompute[read]]
        while pending:
            row = pending.pop()
            if row in done:
                continue
            if life.outlives(row, end):
                borrowed.add(row)
                continue
            rows = memory.members[units[row]] if units[row] >= 0 else (row,)
            done.update(rows)
            found.extend(rows)
            pending.extend(read for each in rows for read in inputs[each] if recompute[read] and read not in done)
        if found:
            batches.append(Batch(anchor, tuple(sorted(found))))
    return tuple(batches)
