"""The columns of a graph as it runs, from those of the graph that was planned."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from attrs import field, frozen

from policylang.graph.facts import Derivation, Facts, Flag, Phase, rewritten
from policylang.operators.names import GETITEM, RUNS_WITH_RANDOM_STATE, SAVES_RANDOM_STATE
from policylang.simulation.memory import generator_state_bytes

_FORWARD, _BACKWARD, _OUTPUT = int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.OUTPUT)
_NOT_OF_A_SECOND_RUN = Flag.RECORDED_SAVED | Flag.FORWARD_OUTPUT | Flag.GRADIENT | Flag.BACKWARD_HOOK
_SAVES, _REPEATS = f"higher_order.{SAVES_RANDOM_STATE}", f"higher_order.{RUNS_WITH_RANDOM_STATE[0]}"
_Value = TypeVar("_Value")


@frozen
class RunRow:
    """A row of the graph as it runs."""

    old: int
    name: str
    region: int = 0
    again: bool = False
    part: int = -1
    """Of a random operator that keeps the state it starts from: 0 that state, 1 what it drew."""

    @property
    def derivation(self) -> Derivation:
        if self.again:
            return Derivation.RECOMPUTED
        return Derivation.SAME if self.part < 0 else Derivation.PART


@frozen(eq=False)
class RunColumns:
    """One entry a row of the graph as it runs."""

    old: Facts
    flat: bool
    drawn: Collection[int]
    """The random operators, by their rows in :attr:`old`, that keep the state they start from."""
    rows: Sequence[RunRow]
    inputs: Sequence[tuple[int, ...]]
    arguments: Sequence[tuple[Any, ...]]
    first: Mapping[int, int] = field(repr=False)
    copies: Mapping[int, Mapping[int, int]] = field(repr=False)
    """By region, old row to that of its second run."""

    def facts(self) -> Facts:
        old, column = self.old, self._column
        state = {row: generator_state_bytes(old, row) for row in self.drawn}

        def amount(values: Sequence[int]) -> array[int]:
            """Of what a random operator returns that keeps its state: the state comes on top."""
            return array("q", column(values, lambda row: state[row.old] + (values[row.old] if row.part < 0 else 0)))

        return rewritten(
            old,
            [(row.old, row.derivation) for row in self.rows],
            names=[row.name for row in self.rows],
            targets=[self._target(row) for row in self.rows],
            phases=bytearray(self._phase(row) for row in self.rows),
            flags=[self._flags(row) for row in self.rows],
            bytes=amount(old.bytes),
            numel=amount(old.numel),
            shapes=column(old.shapes, lambda row: None if row.part < 0 else (state[row.old],)),
            strides=column(old.strides, lambda row: None if row.part < 0 else (1,)),
            dtypes=column(old.dtypes, lambda row: "" if row.part < 0 else "uint8"),
            devices=column(old.devices, lambda row: "" if row.part < 0 else "cpu"),
            inputs=self.inputs,
            owners=self._owners(),
            arguments=self.arguments,
        )

    def _column(self, values: Sequence[_Value], of_state: Callable[[RunRow], _Value]) -> list[_Value]:
        """What was drawn is as the result of the operator was; the operator itself and the state are not."""
        drawn = self.drawn
        return [
            of_state(row) if row.old in drawn and not row.again and row.part < 1 else values[row.old]
            for row in self.rows
        ]

    def _target(self, row: RunRow) -> str:
        if row.old not in self.drawn:
            return self.old.targets[row.old]
        return _REPEATS if row.again else _SAVES if row.part < 0 else GETITEM

    def _phase(self, row: RunRow) -> int:
        phase = self.old.phases[row.old]
        if row.again:
            return _BACKWARD
        if self.flat or self.old.ops[row.old] != "call_function" or phase == _OUTPUT:
            return phase
        return _BACKWARD if row.region else _FORWARD

    def _flags(self, row: RunRow) -> int:
        flags = self.old.flags[row.old]
        if row.again:
            flags &= ~(_NOT_OF_A_SECOND_RUN | (Flag.RANDOM if row.old in self.drawn else 0))
            return flags & ~(Flag.WRITES | Flag.REPEATABLE) if statistics_left_out(self.old, row.old) else flags
        if row.old not in self.drawn:
            return flags
        kept = flags & (Flag.RECORDED_SAVED | Flag.BACKWARD_HOOK)
        if row.part < 0:
            return (flags & (Flag.RANDOM | Flag.WRITES | Flag.REPEATABLE)) | kept | Flag.MULTI_OUTPUT
        return kept if row.part == 0 else kept | (flags & (Flag.FORWARD_OUTPUT | Flag.REPEATABLE))

    def _owners(self) -> array[int]:
        owners = array("i", range(len(self.rows)))
        old = self.old
        for at, row in enumerate(self.rows):
            owner = old.owners[row.old]
            if row.part >= 0:
                owners[at] = owners[self.inputs[at][0]]
            elif owner == row.old:
                continue
            elif old.flags[row.old] & Flag.REPEATABLE and old.targets[row.old] != GETITEM:
                owners[at] = self.copies[row.region].get(owner, at) if row.again else self.first.get(owner, at)
            elif self.inputs[at]:
                owners[at] = owners[self.inputs[at][0]]
        return owners


def statistics_left_out(facts: Facts, row: int) -> frozenset[int]:
    """What a normalisation that runs again leaves out: the running statistics, the last two tensors that it is given
    but for counts."""
    flags, target = facts.flags[row], facts.targets[row]
    if "batch_norm" not in target or not flags & Flag.WRITES or not flags & Flag.REPEATABLE:
        return frozenset()
    inputs = facts.inputs[row]
    return frozenset(inputs[-3:-1] if "_with_counts" in target else inputs[-2:])
