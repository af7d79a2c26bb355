"""The nodes that take the place of chained gathers: a gather, its wait, views, and parts for readers in the middle."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen

from policylang.graph.facts import Facts
from policylang.operators.layouts import DigitLayout
from policylang.operators.moves import Part
from policylang.operators.names import GATHER, SLICE, WAIT
from policylang.operators.strides import contiguous, is_contiguous
from policylang.planning.edits.collectives.grids import Grid
from policylang.planning.edits.collectives.lines import ChainPath, Step, last_row
from policylang.planning.edits.data import FusedGroup, NewNode, Node
from policylang.planning.edits.naming import Names
from policylang.planning.edits.proof.calls import ChainCall
from policylang.planning.edits.proof.canonical import LayoutSteps, steps_to
from policylang.planning.edits.setting import RefusedError


@frozen
class Chain:
    """Gathers that read each other, the first to run first, and what lies between and after them."""

    gathers: tuple[int, ...]
    waits: tuple[int, ...]
    between: tuple[ChainPath, ...]
    """From each gather's wait to the input of the next."""
    tail: tuple[Step, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        found = [*self.gathers, *self.waits]
        for path in self.between:
            found.extend(path.rows)
        for step in self.tail:
            found.extend((step,) if isinstance(step, int) else step.rows)
        return tuple(sorted(found))

    @property
    def result(self) -> int:
        return last_row(self.tail[-1]) if self.tail else self.waits[-1]


@frozen
class Derived:
    """A chain as the layout algebra sees it."""

    layouts: dict[int, DigitLayout] = field(repr=False)
    """Of every row whose value is one tensor that is all of the chain's."""
    order: tuple[int, ...]
    """The gathers, that of the slowest rank digit first."""
    steps: LayoutSteps
    group: FusedGroup


@frozen
class OwnPart:
    """This rank's part of the fused value."""

    name: str
    shape: tuple[int, ...]
    fixed: int
    """How many of the slowest gathers it has one rank of."""


class Maker:
    """The new nodes of a chain, one after the other. Names are taken for good only by :meth:`settle`."""

    def __init__(self, facts: Facts, names: Names, chain: Chain, derived: Derived) -> None:
        self.facts, self.chain, self.derived = facts, chain, derived
        self.names = names.trial()
        self.nodes: list[NewNode] = []

    def settle(self) -> None:
        self.names.settle()

    def whole(self) -> str:
        """Gather, wait and the steps to the result."""
        chain, derived = self.chain, self.derived
        facts = self.facts
        source = facts.arguments[chain.gathers[0]][0].row
        shape = facts.shapes[source]
        assert shape is not None
        size = len(derived.group.ranks)
        start = (shape[0] * size, *shape[1:])
        stride = contiguous(start)
        source_name = Node(facts.names[source])
        gather = self._add(GATHER, (source_name, size, derived.group), start, stride, chain.gathers[-1])
        self.gathered = self._add(WAIT, (Node(gather),), start, stride, chain.waits[-1])
        self.start = start
        return self._steps(self.gathered, derived.steps, chain.result)

    def own_part(self, grid: Grid) -> OwnPart:
        """The part of the gathered shards that the first gathers alone would have brought to this rank."""
        order = self.derived.order
        count = len(order)
        # which gathers a value in the middle lacks is the same for all: the outermost ones, from the first reader on
        first = min(self._lacking(row) for row in self._middle_rows())
        lacking = tuple(range(first, count))
        if set(order[: len(lacking)]) != set(lacking):
            raise RefusedError("parts do not lie side by side")
        index, parts = 0, 1
        for place in order[: len(lacking)]:
            index = index * grid.shape[place] + grid.here[place]
            parts *= grid.shape[place]
        length = self.start[0] // parts
        shape = (length, *self.start[1:])
        arguments = (Node(self.gathered), 0, index * length, (index + 1) * length)
        wait = self.chain.waits[first - 1]
        name = self._add(SLICE, arguments, shape, contiguous(shape), wait, per_rank=True)
        return OwnPart(name, shape, len(lacking))

    def own(self, row: int, own: OwnPart) -> str:
        """A value in the middle, from this rank's part."""
        facts = self.facts
        if len(self.chain.gathers) - self._lacking(row) != own.fixed:
            raise RefusedError(f"other consumer: {self._reader(row)}")
        steps = steps_to(self.derived.layouts[row], self.derived.order[own.fixed :], own.shape)
        shape = facts.shapes[row]
        if steps.copies or shape is None or not _same_strides(shape, steps.stride, facts.strides[row]):
            raise RefusedError(f"other consumer: {self._reader(row)}")
        return self._steps(own.name, steps, row)

    def _steps(self, name: str, steps: LayoutSteps, like: int) -> str:
        for step in steps.steps:
            arguments = (Node(name),) if step.argument is None else (Node(name), step.argument)
            name = self._add(step.target, arguments, step.shape, step.stride, like)
        return name

    def _middle_rows(self) -> list[int]:
        facts, inside = self.facts, set(self.chain.rows)
        return [
            row
            for row in self.chain.rows
            if row != self.chain.result and any(user not in inside for user in facts.users[row])
        ]

    def _lacking(self, row: int) -> int:
        """The number of the first gather that a value has not been through; a piece of a fan has no layout."""
        layout = self.derived.layouts.get(row)
        if layout is None:
            raise RefusedError(f"other consumer: {self._reader(row)}")
        return sum(gather <= row for gather in self.chain.gathers)

    def _reader(self, row: int) -> str:
        inside = set(self.chain.rows)
        return self.facts.names[next(user for user in self.facts.users[row] if user not in inside)]

    def _add(
        self,
        target: str,
        arguments: tuple[object, ...],
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        like: int,
        *,
        per_rank: bool = False,
    ) -> str:
        facts = self.facts
        name = self.names.new(target)
        self.nodes.append(
            NewNode(
                name=name,
                target=target,
                arguments=arguments,
                shape=shape,
                stride=stride,
                dtype=facts.dtypes[like],
                device=facts.devices[like],
                module=facts.modules[like],
                like=facts.names[like],
                per_rank=per_rank,
            )
        )
        return name


def slice_of_rank(node: NewNode, grid: Grid, order: Sequence[int], fixed: int) -> ChainCall:
    """The slice of the own part as every rank of the grid has it."""
    count = 1
    for place in order[:fixed]:
        count *= grid.shape[place]
    index = []
    for rank in grid.ranks:
        at, part = grid.position(rank), 0
        for place in order[:fixed]:
            part = part * grid.shape[place] + at[place]
        index.append((rank, part))
    return ChainCall(node.name, node.target, (node.arguments[0], 0, Part(tuple(index), count)), node.shape)


def _same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int] | None) -> bool:
    return other is not None and (
        tuple(one) == tuple(other) or (is_contiguous(shape, one) and is_contiguous(shape, other))
    )
