"""The graph under a plan's decisions: each recomputation a separate node, in the order of the schedule.

Without torch, so that scheduling lines are planned on a snapshot as on the graph. Recomputations are named as the flat
path names its copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from attrs import frozen

from policylang.graph.facts import (
    LEAVES,
    Derivation,
    Facts,
    Flag,
    GraphKind,
    Phase,
    Ref,
    Schedule,
    ScheduleStep,
    StepKind,
    is_gradient,
    replaced_in,
    rewritten,
)
from policylang.language.cancellation import check_cancelled
from policylang.language.syntax import NarrowForm
from policylang.operators.names import GETITEM, RUNS_WITH_RANDOM_STATE, SAVES_RANDOM_STATE
from policylang.simulation.memory import generator_state_bytes

_FIRST, _SECOND = int(StepKind.FIRST_RUN), int(StepKind.SECOND_RUN)
_FORWARD, _BACKWARD, _OUTPUT = int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.OUTPUT)
_NOT_RECOMPUTED = Flag.RECORDED_SAVED | Flag.FORWARD_OUTPUT | Flag.GRADIENT | Flag.BACKWARD_HOOK
_SAVES, _REPEATS = f"higher_order.{SAVES_RANDOM_STATE}", f"higher_order.{RUNS_WITH_RANDOM_STATE[0]}"
_STATE, _RESULT = 0, 1
_Value = TypeVar("_Value")


class RunNames:
    """Unused names after those of a graph's nodes: ``add_recomputed``, ``add_recomputed_1``, …"""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def new(self, name: str, made: str) -> str:
        """``made``: ``recomputed``; for a random operator that keeps its initial state, ``result`` and ``state``."""
        base = found = f"{name}_{made}"
        count = self._counts.get(base, 0)
        while found in self._taken:
            count += 1
            found = f"{base}_{count}"
        self._counts[base] = count
        self._taken.add(found)
        return found


@frozen(eq=False)
class RematerialisedGraph:
    facts: Facts
    schedule: Schedule
    """Its steps: first runs, and copies to the host and back."""
    origin: Sequence[int]
    """Node to the node of the planned graph of which it is a run."""
    recomputed: Collection[int] = ()
    """The nodes of recomputations, in order."""


def rematerialised(facts: Facts, schedule: Schedule) -> RematerialisedGraph:
    """One node for each run of a node, in the order of the schedule; copies to the host and back are no nodes. A
    forward or backward graph is returned unchanged. Linear in nodes, edges and steps."""
    if facts.kind not in (GraphKind.JOINT, GraphKind.FLAT):
        return RematerialisedGraph(facts, schedule, range(len(facts)))
    return _Runs(facts, schedule).graph()


@frozen
class _Run:
    old: int
    name: str
    region: int = 0
    recomputed: bool = False
    part: int = -1
    """:data:`_STATE` or :data:`_RESULT` of a random operator that keeps the state it starts from."""

    @property
    def derivation(self) -> Derivation:
        if self.recomputed:
            return Derivation.RECOMPUTED
        return Derivation.SAME if self.part < 0 else Derivation.PART


class _Runs:
    def __init__(self, facts: Facts, schedule: Schedule) -> None:
        self.old = facts
        self.flat = facts.kind is GraphKind.FLAT
        self.names = RunNames(facts.names)
        self.runs: list[_Run] = []
        self.inputs: list[tuple[int, ...]] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.steps: list[ScheduleStep] = []
        self.forms, self.moved = schedule.forms, dict[int, NarrowForm | None]()
        self.value: dict[int, int] = {}  # what a first run, an input or a constant makes
        self.first: dict[int, int] = {}
        self.copies: dict[int, dict[int, int]] = {}  # by region, old node to its recomputation
        flags, owners, targets = facts.flags, facts.owners, facts.targets
        self.drawn = {  # the random operators of a flat graph that are recomputed keep the state that they start from
            row: (self.names.new(facts.names[row], "result"), self.names.new(facts.names[row], "state"))
            for row in sorted(set(schedule.rows_of(StepKind.SECOND_RUN)) if self.flat else ())
            if flags[row] & Flag.RANDOM
            and targets[row] != GETITEM
            and (owners[row] == row or flags[row] & Flag.REPEATABLE)
        }
        self._run(list(schedule))

    def _run(self, steps: Sequence[ScheduleStep]) -> None:
        """In a flat graph inputs and constants keep their places; a partition has them first."""
        ops, names = self.old.ops, self.old.names
        place = {row: at for at, (kind, row, _) in enumerate(steps) if kind == _FIRST}
        taken = 0
        for row, op in enumerate(ops):
            if op in ("placeholder", "get_attr"):
                self.value[row] = self._add(_Run(row, names[row]), ())
            elif self.flat and place.get(row, -1) >= taken:
                self._take(steps[taken : place[row] + 1])
                taken = place[row] + 1
        self._take(steps[taken:])
        for row, op in enumerate(ops):
            if op == "output":
                self._add(_Run(row, names[row]), self._returned(row))

    def _take(self, steps: Iterable[ScheduleStep]) -> None:
        for kind, row, region in steps:
            check_cancelled()
            if kind == _FIRST:
                self._first_run(row, region)
            elif kind == _SECOND:
                self._recompute(row, region)
            else:
                self.steps.append((kind, self.value[row], region))
                if kind in LEAVES:
                    self.moved[self.value[row]] = self.forms.get(row)

    def _first_run(self, row: int, region: int) -> None:
        reads_copies = region > 0 and (not self.flat or self.old.phases[row] == _BACKWARD)
        copies = self.copies.get(region, {}) if reads_copies else {}
        inputs = tuple(dict.fromkeys(self._read(source, copies) for source in self.old.inputs[row]))
        found = self._add(_Run(row, self.old.names[row], region), inputs, copies)
        self.first[row] = self.value[row] = found
        self.steps.append((_FIRST, found, region))
        if row in self.drawn:
            drawn, state = self.drawn[row]
            for name, part in ((state, _STATE), (drawn, _RESULT)):
                self.value[row] = self._add(_Run(row, name, region, part=part), (found,))
                self.steps.append((_FIRST, self.value[row], region))

    def _recompute(self, row: int, region: int) -> None:
        old, copies = self.old, self.copies.setdefault(region, {})
        left_out, inputs = _statistics_left_out(old, row), list[int]()
        for source in old.inputs[row]:
            is_module = old.ops[source] == "get_attr" and not old.dtypes[source]
            if self.flat and is_module and source not in copies and old.targets[row].startswith("higher_order."):
                # A recomputed higher-order operator has a second reference to the graph that it runs.
                found = self._add(_Run(source, self.names.new(old.names[source], "recomputed")), ())
            else:
                found = self._read(source, copies)
            if source not in left_out:
                inputs.append(found)
        if row in self.drawn:
            inputs.insert(0, self.value[row] - 1)  # the state is the node before the drawn value
        run = _Run(row, self.names.new(old.names[row], "recomputed"), region, recomputed=True)
        copies[row] = self._add(run, tuple(dict.fromkeys(inputs)), copies)
        self.steps.append((_FIRST, copies[row], region))

    def _add(self, run: _Run, inputs: tuple[int, ...], copies: dict[int, int] | None = None) -> int:
        arguments = self.old.arguments[run.old]
        if run.part >= 0:
            self.arguments.append((Ref(inputs[0]), run.part))
        else:
            read = copies or {}
            self.arguments.append(replaced_in(arguments, Ref, lambda source: Ref(self._read(source.row, read))))
        self.runs.append(run)
        self.inputs.append(inputs)
        return len(self.runs) - 1

    def _read(self, source: int, copies: dict[int, int]) -> int:
        found = copies.get(source)
        return self.value[source] if found is None else found

    def _returned(self, row: int) -> tuple[int, ...]:
        """The backward of a joint graph returns the recomputation of a gradient, the forward its first run."""
        old, found = self.old, dict[int, None]()
        last = {} if self.flat else {source: made for region in self.copies.values() for source, made in region.items()}
        for source in old.inputs[row]:
            late = source in last and (old.phases[source] == _BACKWARD or is_gradient(old, source))
            if late or source not in self.value:
                found[last[source]] = None
            if not late or (source in self.value and old.flags[source] & Flag.FORWARD_OUTPUT):
                found[self.value[source]] = None
        return tuple(found)

    # --- the columns ---

    def graph(self) -> RematerialisedGraph:
        old, column = self.old, self._column
        state = {row: generator_state_bytes(old, row) for row in self.drawn}

        def amount(values: Sequence[int]) -> array[int]:
            """A random operator that keeps its state returns the state as well."""
            return array("q", column(values, lambda run: state[run.old] + (values[run.old] if run.part < 0 else 0)))

        facts = rewritten(
            old,
            [(run.old, run.derivation) for run in self.runs],
            names=[run.name for run in self.runs],
            targets=[self._target(run) for run in self.runs],
            phases=bytearray(map(self._phase, self.runs)),
            flags=[self._flags(run) for run in self.runs],
            bytes=amount(old.bytes),
            numel=amount(old.numel),
            shapes=column(old.shapes, lambda run: None if run.part < 0 else (state[run.old],)),
            strides=column(old.strides, lambda run: None if run.part < 0 else (1,)),
            dtypes=column(old.dtypes, lambda run: "" if run.part < 0 else "uint8"),
            devices=column(old.devices, lambda run: "" if run.part < 0 else "cpu"),
            inputs=self.inputs,
            owners=self._owners(),
            arguments=self.arguments,
        )
        recomputed = [row for row, run in enumerate(self.runs) if run.recomputed]
        first = array("i", [run.old for run in self.runs])
        return RematerialisedGraph(facts, Schedule.of(self.steps, moved=self.moved), first, recomputed)

    def _column(self, values: Sequence[_Value], of_state: Callable[[_Run], _Value]) -> list[_Value]:
        """A drawn value has what the operator's result had; the operator and the state have not."""
        drawn = self.drawn
        return [
            of_state(run) if run.old in drawn and not run.recomputed and run.part < _RESULT else values[run.old]
            for run in self.runs
        ]

    def _target(self, run: _Run) -> str:
        if run.old not in self.drawn:
            return self.old.targets[run.old]
        return _REPEATS if run.recomputed else _SAVES if run.part < 0 else GETITEM

    def _phase(self, run: _Run) -> int:
        phase = self.old.phases[run.old]
        if run.recomputed:
            return _BACKWARD
        if self.flat or self.old.ops[run.old] != "call_function" or phase == _OUTPUT:
            return phase
        return _BACKWARD if run.region else _FORWARD

    def _flags(self, run: _Run) -> int:
        flags = self.old.flags[run.old]
        if run.recomputed:
            flags &= ~(_NOT_RECOMPUTED | (Flag.RANDOM if run.old in self.drawn else 0))
            return flags & ~(Flag.WRITES | Flag.REPEATABLE) if _statistics_left_out(self.old, run.old) else flags
        if run.old not in self.drawn:
            return flags
        kept = flags & (Flag.RECORDED_SAVED | Flag.RECORDED_OFFLOADED | Flag.BACKWARD_HOOK)
        if run.part < 0:
            return (flags & (Flag.RANDOM | Flag.WRITES | Flag.REPEATABLE)) | kept | Flag.MULTI_OUTPUT
        return kept if run.part == _STATE else kept | (flags & (Flag.FORWARD_OUTPUT | Flag.REPEATABLE))

    def _owners(self) -> array[int]:
        old, owners = self.old, array("i", range(len(self.runs)))
        for row, run in enumerate(self.runs):
            owner = old.owners[run.old]
            if run.part >= 0:
                owners[row] = owners[self.inputs[row][0]]
            elif owner == run.old:
                continue
            elif old.flags[run.old] & Flag.REPEATABLE and old.targets[run.old] != GETITEM:
                made = self.copies[run.region] if run.recomputed else self.first
                owners[row] = made.get(owner, row)
            elif self.inputs[row]:
                owners[row] = owners[self.inputs[row][0]]
        return owners


def _statistics_left_out(facts: Facts, row: int) -> frozenset[int]:
    """The running statistics that a recomputed normalisation leaves out: its last two tensors but for counts."""
    flags, target = facts.flags[row], facts.targets[row]
    if "batch_norm" not in target or not flags & Flag.WRITES or not flags & Flag.REPEATABLE:
        return frozenset()
    inputs = facts.inputs[row]
    return frozenset(inputs[-3:-1] if "_with_counts" in target else inputs[-2:])
