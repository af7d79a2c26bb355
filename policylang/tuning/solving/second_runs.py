"""What the backward of a graph reads, and what of it the schedule makes again (:mod:`policylang.planning.schedule`)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from policylang.graph.facts import Facts, Flag, GraphKind, Phase, is_gradient

NONE = -1
"""In a clause no such column; else no such row."""


class SecondRuns:
    """Which reads of the backward have a value that is decided *recompute* run again.

    In a flat graph a value that the forward still holds at the end of a region is read there as it is. Whether it does
    depends on all decisions; here it is taken to do so wherever it can, which leaves the price a lower bound.
    """

    def __init__(self, facts: Facts, roots: Sequence[int]) -> None:
        self.facts = facts
        self.roots = roots
        self.flat = facts.kind is GraphKind.FLAT
        self.first_end = array("i", [len(facts)]) * len(facts)
        """By row: the end of the first region that may make it again."""
        self.held_until = array("i", [NONE]) * len(facts)
        self.live = bytearray(len(facts))
        self.ends = array("i", [NONE]) * len(facts)
        if self.flat:
            self._read_flat()
        else:
            self._read_joint()

    def _read_flat(self) -> None:
        facts, end = self.facts, NONE
        for row in range(len(facts) - 1, -1, -1):
            if facts.phases[row] == Phase.BACKWARD:
                end = row if end == NONE else end
                self.ends[row] = end
                self.live[row] = 1
                continue
            if facts.phases[row] == Phase.FORWARD and facts.ops[row] == "call_function":
                end = NONE
            for source in facts.inputs[row]:
                root = self.roots[source]
                if self.held_until[root] == NONE:
                    self.held_until[root] = row

    def _read_joint(self) -> None:
        facts = self.facts
        effect = Flag.RANDOM | Flag.EFFECTFUL
        for row in range(len(facts) - 1, -1, -1):
            flags, phase = facts.flags[row], facts.phases[row]
            if phase == Phase.BACKWARD and (flags & effect or flags & (Flag.WRITES | Flag.REPEATABLE) == Flag.WRITES):
                self.live[row] = 1
            if phase == Phase.OUTPUT or (phase == Phase.BACKWARD and self.live[row]):
                for source in facts.inputs[row]:
                    self.live[source] = 1
                self.live[row] = 1

    def reads(self) -> list[tuple[int, int]]:
        """``(reader, forward row)``: what planning takes the backward to read."""
        facts, forward = self.facts, self.facts.forward_mask
        found: list[tuple[int, int]] = []
        for row, phase in enumerate(facts.phases):
            if phase == Phase.BACKWARD:
                found += [(row, source) for source in facts.inputs[row] if forward[source]]
            elif phase == Phase.OUTPUT and facts.kind is GraphKind.JOINT:
                found += [
                    (row, source) for source in facts.inputs[row] if forward[source] and is_gradient(facts, source)
                ]
        return found

    def end_of(self, reader: int) -> int:
        return self.ends[reader] if self.flat else len(self.facts)

    def reached(self, row: int, end: int) -> None:
        self.first_end[row] = min(self.first_end[row], end)

    def makes_again(self, reader: int, row: int) -> bool:
        """Whether a value that is decided *recompute* runs again for a reader in the backward."""
        return bool(self.live[reader]) and self.held_until[self.roots[row]] <= self.ends[reader]

    def makes_again_for(self, row: int, read: int) -> bool:
        """The same for an operator that runs again."""
        return not self.flat or self.held_until[self.roots[read]] <= self.first_end[row]
