"""The ordered steps of a training step, as plain columns: what runs, what is recomputed, what is copied, and when.

The only order: :mod:`policylang.simulation` simulates it, every backend that changes a graph applies it, and tests read
it off the resulting graphs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from enum import IntEnum

from attrs import field, frozen

from policylang.graph.facts import Facts
from policylang.operators.names import OFFLOAD, RELOAD


class StepKind(IntEnum):
    FIRST_RUN = 0
    """A node runs. The run of a collective is its start; its wait is the run of the ``wait_tensor`` that reads it."""
    SECOND_RUN = 1
    """A forward node is recomputed for a backward region."""
    COPY_TO_HOST = 2
    """A copy of a value to the host starts."""
    WAIT_TO_HOST = 3
    """The copy is awaited; from here on the device does not hold the value."""
    COPY_FROM_HOST = 4
    """A copy back starts, for a backward region; from here on the device has memory for it."""
    WAIT_FROM_HOST = 5
    """The copy back is awaited; what follows in the region reads it."""


STARTS = {OFFLOAD: StepKind.COPY_TO_HOST, RELOAD: StepKind.COPY_FROM_HOST}
"""The operators that move a value away, or bring it back, and their steps."""
LEAVES = (StepKind.COPY_TO_HOST,)
"""The steps that replace a value by something else."""

ScheduleStep = tuple[int, int, int]
"""Kind, node and region."""


@frozen
class Schedule:
    """One entry a step, in the order of execution. Only operators are steps: inputs, constants and the output are not.

    A *region* is a run of backward steps that no forward step interrupts. They are numbered from 1; 0 is the forward.
    """

    kinds: bytes = field(repr=False)
    rows: array[int] = field(repr=False)
    regions: array[int] = field(repr=False)
    held: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    """Nodes whose values a checkpoint holds, and the step up to which it does."""

    @classmethod
    def of(cls, steps: Iterable[ScheduleStep], held: Iterable[tuple[int, int]] = ()) -> Schedule:
        kinds, rows, regions = tuple(zip(*steps, strict=True)) or ((), (), ())
        return cls(bytes(kinds), array("i", rows), array("i", regions), tuple(held))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ScheduleStep]:
        return zip(self.kinds, self.rows, self.regions, strict=True)

    def rows_of(self, kind: StepKind) -> list[int]:
        """The nodes of the steps of one kind, in order; a node recomputed for two regions is there twice."""
        return [row for found, row in zip(self.kinds, self.rows, strict=True) if found == kind]

    @property
    def moved(self) -> dict[int, StepKind]:
        """The nodes whose value is replaced until the backward, in order, and the step that replaces it."""
        return {row: StepKind(kind) for kind, row, _ in self if kind in LEAVES}

    def next_first_runs(self) -> list[int]:
        """For each step the node of the first run that comes next, itself included: a recomputation is before that
        run and for it. -1 where none comes."""
        found, coming = [-1] * len(self), -1
        for step in range(len(self) - 1, -1, -1):
            if self.kinds[step] == StepKind.FIRST_RUN:
                coming = self.rows[step]
            found[step] = coming
        return found

    def names(self, facts: Facts) -> list[tuple[StepKind, str, int]]:
        """The steps in the words of a graph: kind, node, region."""
        return [(StepKind(kind), facts.names[row], region) for kind, row, region in self]
