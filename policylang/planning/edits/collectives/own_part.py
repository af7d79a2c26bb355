"""A rank's own part of a gathered value: the slice on every rank, and the readers inside a fused chain that take it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag, Phase
from policylang.operators.layouts import DigitLayout, contiguous, is_contiguous
from policylang.operators.moves import Part
from policylang.operators.names import GATHER, SLICE
from policylang.planning.edits.collectives.chain_fusion import CollectiveChain
from policylang.planning.edits.collectives.lines import phase
from policylang.planning.edits.edit_planner import NewNodes, RefusedError
from policylang.planning.edits.grids import Grid, ravel
from policylang.planning.edits.proof.calls import ChainCall
from policylang.planning.edits.proof.canonical import LayoutSteps, steps_to
from policylang.planning.graph_edit import FusedGroup, Node


@frozen
class Derived:
    """A chain as the layout algebra sees it."""

    layouts: Mapping[int, DigitLayout] = field(repr=False)
    """Of every row whose value is one tensor that is all of the chain's."""
    order: tuple[int, ...]
    """The gathers, that of the slowest rank digit first."""
    steps: LayoutSteps
    """From the gathered shards to the chain's result."""
    group: FusedGroup


def slice_on_ranks(
    name: str,
    source: Node,
    dim: int,
    count: int,
    shape: tuple[int, ...] | None,
    grid: Grid,
    part_at: Callable[[Sequence[int]], int],
) -> ChainCall:
    """A slice as every rank of the grid has it: the part, of ``count``, that its positions in the groups give."""
    part = Part(tuple((rank, part_at(grid.position(rank))) for rank in grid.ranks), count)
    return ChainCall(name, SLICE, (source, dim, part), shape)


class MiddleReaders:
    """Who reads a chain of gathers before its result. They can have this rank's part of the fused value.

    Only in the backward, where nothing is kept for later: a part that is saved would keep the whole alive.
    """

    def __init__(self, facts: Facts, chain: CollectiveChain) -> None:
        self.facts, self.chain = facts, chain
        inside = set(chain.rows)
        readers = {
            row: [user for user in facts.users[row] if user not in inside] for row in chain.rows if row != chain.result
        }
        self.readers = {row: users for row, users in readers.items() if users}
        """By row of the chain that is read, in graph order."""

    def check(self) -> None:
        """Raises :class:`RefusedError` for a reader that needs the value as it is."""
        facts = self.facts
        for row, users in self.readers.items():
            for user in users:
                if not self._may_read_part(row, user):
                    raise RefusedError(f"other consumer: {facts.names[user]}")
        for user in facts.users[self.chain.result] if self.readers else ():
            if facts.flags[user] & Flag.WRITES:
                first = facts.names[next(iter(self.readers))]
                raise RefusedError(f"other consumer: {first}", f"`{facts.names[user]}` writes")

    def first(self, *rows: int) -> int:
        """The first to read the chain, among these."""
        return min([*rows, *(user for users in self.readers.values() for user in users)])

    def hand_parts(
        self, new: NewNodes, gathered: Node, derived: Derived, grid: Grid
    ) -> tuple[ChainCall, dict[int, str]]:
        """Add nodes that give each reader its value; the slice among them as all ranks have it, and what is read in
        place of which row."""
        count, order = len(derived.order), derived.order
        # which gathers a value in the middle lacks is the same for all: the outermost ones, from the first reader on
        first = min(self._lacking(row, derived) for row in self.readers)
        lacking = tuple(range(first, count))
        fixed = order[: len(lacking)]
        if set(fixed) != set(lacking):
            raise RefusedError("parts do not lie side by side")

        sizes = [grid.shape[place] for place in fixed]
        parts = prod(sizes)

        def part_at(positions: Sequence[int]) -> int:
            return ravel([positions[place] for place in fixed], sizes)

        whole, index = new.made[0].shape, part_at(grid.here)
        length = whole[0] // parts
        shape = (length, *whole[1:])
        arguments = (gathered, 0, index * length, (index + 1) * length)
        part = new.add(SLICE, arguments, shape, contiguous(shape), self.chain.waits[first - 1], per_rank=True)
        call = slice_on_ranks(part.name, gathered, 0, parts, shape, grid, part_at)
        replaced = {}
        for row in self.readers:
            if self._lacking(row, derived) != first:
                raise self._refused(row)
            steps = steps_to(derived.layouts[row], order[len(lacking) :], shape)
            if steps.copies or not self._lies_as(row, steps.stride):
                raise self._refused(row)
            replaced[row] = new.follow(part, steps, row).name
        return call, replaced

    def _may_read_part(self, row: int, user: int) -> bool:
        facts = self.facts
        if facts.ops[user] != "call_function" or {phase(facts, row), phase(facts, user)} != {int(Phase.BACKWARD)}:
            return False
        return facts.targets[row] != GATHER and not facts.flags[user] & (Flag.WRITES | Flag.EFFECTFUL)

    def _lacking(self, row: int, derived: Derived) -> int:
        """The number of the first gather that a value has not been through; a piece of a fan has no layout."""
        if row not in derived.layouts:
            raise self._refused(row)
        return sum(gather <= row for gather in self.chain.collectives)

    def _refused(self, row: int) -> RefusedError:
        return RefusedError(f"other consumer: {self.facts.names[self.readers[row][0]]}")

    def _lies_as(self, row: int, stride: Sequence[int]) -> bool:
        shape, traced = self.facts.shapes[row], self.facts.strides[row]
        if shape is None or traced is None:
            return False
        return tuple(stride) == traced or (is_contiguous(shape, stride) and is_contiguous(shape, traced))
