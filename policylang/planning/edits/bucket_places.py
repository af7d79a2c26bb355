"""Where one collective can replace several, and which block a collective serves.

A graph's order is one of many. Shards are cast and gathered one by one, each where it is used, so the last shard of a
block comes after the first gather's reader; gradients are scattered one by one as they are made. One collective needs
all its inputs before it and all readers after it. Nodes on the wrong side are moved if that is cheap and safe: layout
operators, casts and pointwise operators, of memory that nobody writes in between. Collectives, random draws, writes and
products stay where they are. Places are settled one after the other, each in the order that the earlier ones leave.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import cached_property

from attrs import frozen

from policylang.graph.blocks import has_no_modules
from policylang.graph.facts import Facts, Flag
from policylang.operators.moves import MOVERS
from policylang.operators.names import GATHER, WAITS
from policylang.planning.edits.edit_planner import RefusedError, ReplacedMemory

_STAYS = Flag.WRITES | Flag.RANDOM | Flag.SEED | Flag.EFFECTFUL | Flag.COLLECTIVE | Flag.COMPUTE
_NAMESPACES = ("aten", "prims", "builtin", "math")
"""Namespaces of operators that only compute their result."""
DEPENDS = "reads what another one of the bucket gives"
_LAST = 1 << 60
_NO_BLOCK = -1


class _Side(IntEnum):
    AHEAD = 0
    NEW = 1
    BEHIND = 2


Slot = tuple[int, int, int]
"""When a node runs: before which node, with which of the placements there, and on which side of it. An unmoved node
runs where it was, after all that was placed before it."""


@frozen
class Placement:
    """A place for a collective, and the nodes that move for it."""

    before: int
    """The node before which it is placed."""
    ahead: tuple[int, ...]
    behind: tuple[int, ...]


class Places:
    """The order of one graph while collectives are being joined."""

    def __init__(self, facts: Facts, held: Sequence[int] = ()) -> None:
        """``held``: nodes, in order, that no collective and no wait crosses."""
        self.facts = facts
        self.held = held
        self.memory = ReplacedMemory(facts)
        self._slots: dict[int, Slot] = {}
        self._count = 0

    def place(self, sources: Sequence[int], results: Sequence[int], starts: Sequence[int], *, late: bool) -> Placement:
        """A place before the first reader of any result, so that nobody waits longer; or, ``late``, where the last of
        several collectives starts.

        Args:
            sources: what is read.
            results: what is replaced.
            starts: the collectives.
            late: whether results are moved behind the last source, not sources ahead of the first reader.

        Raises:
            RefusedError: if an input cannot be ready by then.
        """
        inputs, users = self.facts.inputs, self.facts.users
        if late:
            before = max(*starts, *(self._slot(row)[0] for row in sources))
        else:
            before = min(map(self._first_reader, results))
        self._check(sources, results, starts, before)
        place = before, self._count + 1, _Side.NEW
        if late:
            readers = (user for row in results for user in users[row])
            moved = self._moved(readers, users, before, lambda row: self._slot(row) < place)
            apart = set(moved).isdisjoint(sources)
        else:
            moved = self._moved(sources, inputs, before, lambda row: self._slot(row) > place)
            apart = {source for row in moved for source in inputs[row]}.union(sources).isdisjoint(results)
        if not apart:
            raise RefusedError(DEPENDS)
        return Placement(before, (), moved) if late else Placement(before, moved, ())

    def settle(self, placement: Placement, replaced: Iterable[int]) -> int:
        """Make a placement final. ``replaced``: nodes whose values are made there. Returns a number that orders the
        placements before one node."""
        self._count += 1
        place = placement.before, self._count
        for side, rows in ((_Side.AHEAD, placement.ahead), (_Side.NEW, replaced), (_Side.BEHIND, placement.behind)):
            self._slots.update(dict.fromkeys(rows, (*place, side)))
        return self._count

    def _slot(self, row: int) -> Slot:
        return self._slots.get(row) or (row, _LAST, _LAST)

    def _first_reader(self, result: int) -> int:
        """The node before which a result has to be ready; a reader that has moved runs no later than the result did."""
        first = min((self._slot(user) for user in self.facts.users[result]), default=(result, _LAST, _LAST))
        return first[0] if first[1] == _LAST else result

    def _moved(
        self, rows: Iterable[int], edges: Sequence[Sequence[int]], before: int, is_wrong: Callable[[int], bool]
    ) -> tuple[int, ...]:
        """The nodes on the wrong side of a place, among some nodes and what they reach along edges."""
        found: set[int] = set()
        facts, pending = self.facts, [row for row in rows if is_wrong(row)]
        while pending:
            row = pending.pop()
            if row in found:
                continue
            name, target = facts.names[row], facts.targets[row]
            if row in self._slots:
                raise RefusedError(f"{name} is bound to another bucket")
            known = facts.ops[row] == "call_function" and target.partition(".")[0] in _NAMESPACES
            if not known or facts.flags[row] & _STAYS or facts.flops[row] or target in WAITS:
                raise RefusedError(f"{name} is in between")
            self._check_unwritten((row, *facts.inputs[row]), min(row, before), max(row, before))
            found.add(row)
            pending += [each for each in edges[row] if is_wrong(each)]
        return tuple(sorted(found))

    def _check(self, sources: Sequence[int], results: Sequence[int], starts: Sequence[int], before: int) -> None:
        """Check that collectives may move to a place: past no held node, and past no write to their inputs."""
        for row in (*starts, *results):
            first = bisect_left(self.held, min(row, before))
            if first < len(self.held) and self.held[first] < max(row, before):
                raise RefusedError(f"{self.facts.names[self.held[first]]} is in between")
        for source, start in zip(sources, starts, strict=True):
            self._check_unwritten((source,), min(start, before), max(start, before))

    def _check_unwritten(self, rows: Iterable[int], first: int, last: int) -> None:
        """Check that nobody writes to the memory of some nodes in ``[first, last)``."""
        for row in rows:
            for writer in self.memory.written.get(self.memory.roots[row], ()):
                if first <= writer < last:
                    raise RefusedError(f"memory is written: {self.facts.names[writer]}")


class Serving:
    """Which block each collective of a graph serves: that of the computation which it feeds, or which feeds it.

    Its position tells little: shards may be gathered under another module path, whole blocks before their use, and
    nodes of a backward may carry no module path. Products and norms have their block; a node without one, in a graph
    that names blocks, belongs to the latest block among its inputs.
    """

    def __init__(self, facts: Facts, block_of: Sequence[int]) -> None:
        self.facts = facts
        self.block_of = block_of

    def block(self, collective: int) -> int:
        """The block of the first computation that uses what is gathered, or of the last that makes what is reduced; -1
        outside the blocks."""
        facts, gather = self.facts, self.facts.targets[collective] == GATHER
        edges = facts.users if gather else facts.inputs
        computed: list[int] = []
        seen, pending = {collective}, [collective]
        while pending:
            for each in edges[pending.pop()]:
                if facts.ops[each] == "call_function" and each not in seen:
                    seen.add(each)
                    (pending if self._passes[each] else computed).append(each)
        if not computed:
            return self.block_of[collective]
        return self.blocks[min(computed) if gather else max(computed)]

    @cached_property
    def blocks(self) -> Sequence[int]:
        """Node to block, for nodes that compute."""
        facts, passes = self.facts, self._passes
        if has_no_modules(facts):
            return self.block_of
        found, kept = array("l", self.block_of), bytearray(len(facts))
        order: dict[int, int] = {_NO_BLOCK: _NO_BLOCK}
        for row, owner in enumerate(facts.owners):
            kept[row] = facts.ops[row] != "call_function" or (
                passes[row] and all(kept[source] for source in facts.inputs[row])
            )
            if kept[row]:  # an input, mostly a parameter, or what only passes inputs on: it belongs to no block
                found[row] = _NO_BLOCK
                continue
            is_named = facts.modules[row] or facts.modules[owner] or facts.ac_regions[owner] is not None
            if found[row] == _NO_BLOCK and not is_named:
                found[row] = max(
                    (found[source] for source in facts.inputs[row]), key=order.__getitem__, default=_NO_BLOCK
                )
            order.setdefault(found[row], len(order))
        return found

    @cached_property
    def _passes(self) -> bytearray:
        """The nodes that compute nothing: layout operators, casts, collectives and their waits, one byte each."""
        flags, targets = self.facts.flags, self.facts.targets
        return bytearray(
            targets[row] in MOVERS or targets[row] in WAITS or bool(flags[row] & (Flag.COLLECTIVE | Flag.VIEW))
            for row in range(len(self.facts))
        )
