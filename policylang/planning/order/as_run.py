"""The graph as it runs under a plan's decisions: each recomputation a node of its own, in the order of the schedule.

Without torch, so that scheduling lines are planned on a snapshot as they will be on the graph. The names of second runs
are those that the flat path gives its copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

from attrs import frozen

from policylang.graph.facts import (
    Facts,
    Flag,
    GraphKind,
    Phase,
    Ref,
    is_gradient,
)
from policylang.graph.schedule import Schedule, ScheduleStep, StepKind
from policylang.language.interruption.wanted import check_cancelled
from policylang.operators.names import GETITEM, RUNS_WITH_RANDOM_STATE, SAVES_RANDOM_STATE
from policylang.planning.order.reading.run_columns import RunColumns, RunRow, statistics_left_out
from policylang.planning.order.run_names import RunNames

_FIRST, _SECOND = int(StepKind.FIRST_RUN), int(StepKind.SECOND_RUN)
_FORWARD, _BACKWARD, _OUTPUT = int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.OUTPUT)
_NOT_OF_A_SECOND_RUN = Flag.RECORDED_SAVED | Flag.FORWARD_OUTPUT | Flag.GRADIENT | Flag.BACKWARD_HOOK
_SAVES, _REPEATS = f"higher_order.{SAVES_RANDOM_STATE}", f"higher_order.{RUNS_WITH_RANDOM_STATE[0]}"
_Value = TypeVar("_Value")


@frozen(eq=False)
class AsRun:
    """A graph as it runs."""

    facts: Facts
    schedule: Schedule
    """Its steps, first runs all of them but for copies to the host and back."""
    origin: Sequence[int]
    """Row to the row of the graph that was planned: the node that it is a run of."""
    again: Collection[int] = ()
    """The rows that run a second time, in order."""


def as_run(facts: Facts, schedule: Schedule) -> Facts:
    """The facts of the graph that runs this schedule: one row for each run of a node, in its order. Copies to the host
    and back are no rows. A half that runs as it is gives itself."""
    return run(facts, schedule).facts


def run(facts: Facts, schedule: Schedule) -> AsRun:
    """The same, with its schedule. Linear in nodes, edges and steps."""
    if facts.kind not in (GraphKind.JOINT, GraphKind.FLAT):
        return AsRun(facts, schedule, range(len(facts)))
    return _Runs(facts, schedule).as_run()


class _Runs:
    def __init__(self, facts: Facts, schedule: Schedule) -> None:
        self.old = facts
        self.flat = facts.kind is GraphKind.FLAT
        self.names = RunNames(facts.names)
        self.rows: list[RunRow] = []
        self.inputs: list[tuple[int, ...]] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.steps: list[ScheduleStep] = []
        self.value: dict[int, int] = {}  # what a first run, an input or a constant makes
        self.first: dict[int, int] = {}
        self.copies: dict[int, dict[int, int]] = {}  # by region
        self.drawing = self._drawing(schedule)
        self.drawn = {
            row: (self.names.drawn(facts.names[row]), self.names.state(facts.names[row])) for row in self.drawing
        }
        self._run(schedule)

    def _drawing(self, schedule: Schedule) -> list[int]:
        """The random operators of a flat graph that run again: they keep the state that they start from."""
        flags, owners, targets = self.old.flags, self.old.owners, self.old.targets
        return [
            row
            for row in sorted(set(schedule.rows_of(StepKind.SECOND_RUN)) if self.flat else ())
            if flags[row] & Flag.RANDOM
            and targets[row] != GETITEM
            and (owners[row] == row or flags[row] & Flag.REPEATABLE)
        ]

    # --- rows ---

    def _run(self, schedule: Schedule) -> None:
        """In a flat graph inputs and constants stay where they are; a partition has them before all that runs."""
        ops, names, steps = self.old.ops, self.old.names, list(schedule)
        place = {row: at for at, (kind, row, _) in enumerate(steps) if kind == _FIRST}
        taken = 0
        for row, op in enumerate(ops):
            if op in ("placeholder", "get_attr"):
                self.value[row] = self._add(RunRow(row, names[row]), ())
            elif self.flat and place.get(row, -1) >= taken:
                self._take(steps[taken : place[row] + 1])
                taken = place[row] + 1
        self._take(steps[taken:])
        for row, op in enumerate(ops):
            if op == "output":
                self._add(RunRow(row, names[row]), self._returned(row))

    def _take(self, steps: Iterable[ScheduleStep]) -> None:
        for kind, row, region in steps:
            check_cancelled()
            if kind == _FIRST:
                self._first_run(row, region)
            elif kind == _SECOND:
                self._second_run(row, region)
            else:
                self.steps.append((kind, self.value[row], region))

    def _first_run(self, row: int, region: int) -> None:
        reads_copies = region > 0 and (not self.flat or self.old.phases[row] == _BACKWARD)
        copies = self.copies.get(region, {}) if reads_copies else {}
        found = self._add(RunRow(row, self.old.names[row], region), self._reads(row, copies), copies)
        self.first[row] = self.value[row] = found
        self.steps.append((_FIRST, found, region))
        if row in self.drawn:
            drawn, state = self.drawn[row]
            for name, part in ((state, 0), (drawn, 1)):
                self.value[row] = self._add(RunRow(row, name, region, part=part), (found,))
                self.steps.append((_FIRST, self.value[row], region))

    def _second_run(self, row: int, region: int) -> None:
        old, copies = self.old, self.copies.setdefault(region, {})
        reads = [
            self._own_subgraph(source) if source not in copies and self._is_subgraph(row, source) else None
            for source in self.old.inputs[row]
        ]
        left_out = statistics_left_out(old, row)
        inputs = [
            self._read(source, copies) if own is None else own
            for source, own in zip(old.inputs[row], reads, strict=True)
            if source not in left_out
        ]
        if row in self.drawn:
            inputs.insert(0, self.value[row] - 1)  # the state stands before what was drawn
        name = self.names.second_run(old.names[row])
        copies[row] = self._add(RunRow(row, name, region, again=True), tuple(dict.fromkeys(inputs)), copies)
        self.steps.append((_FIRST, copies[row], region))

    def _is_subgraph(self, reader: int, source: int) -> bool:
        old = self.old
        is_module = old.ops[source] == "get_attr" and not old.dtypes[source]
        return self.flat and is_module and old.targets[reader].startswith("higher_order.")

    def _own_subgraph(self, source: int) -> int:
        """A higher-order operator that runs again has its own reference to the graph that it runs."""
        return self._add(RunRow(source, self.names.second_run(self.old.names[source])), ())

    def _add(self, row: RunRow, inputs: tuple[int, ...], copies: dict[int, int] | None = None) -> int:
        arguments = self.old.arguments[row.old]
        if row.part >= 0:
            self.arguments.append((Ref(inputs[0]), row.part))
        else:
            self.arguments.append(self._mapped(arguments, copies or {}) if arguments else ())
        self.rows.append(row)
        self.inputs.append(inputs)
        return len(self.rows) - 1

    def _reads(self, row: int, copies: dict[int, int]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._read(source, copies) for source in self.old.inputs[row]))

    def _read(self, source: int, copies: dict[int, int]) -> int:
        found = copies.get(source)
        return self.value[source] if found is None else found

    def _mapped(self, value: Any, copies: dict[int, int]) -> Any:
        if isinstance(value, Ref):
            return Ref(self._read(value.row, copies))
        return tuple([self._mapped(part, copies) for part in value]) if isinstance(value, tuple) else value

    def _returned(self, row: int) -> tuple[int, ...]:
        """Of a joint graph the backward returns the second run of a gradient, the forward the first."""
        old, found = self.old, dict[int, None]()
        last = {} if self.flat else {source: made for region in self.copies.values() for source, made in region.items()}
        for source in old.inputs[row]:
            late = source in last and (old.phases[source] == _BACKWARD or is_gradient(old, source))
            if late or source not in self.value:
                found[last[source]] = None
            if not late or (source in self.value and old.flags[source] & Flag.FORWARD_OUTPUT):
                found[self.value[source]] = None
        return tuple(found)

    def as_run(self) -> AsRun:
        columns = RunColumns(
            self.old, self.flat, self.drawn, self.rows, self.inputs, self.arguments, self.first, self.copies
        )
        origin = array("i", [row.old for row in self.rows])
        again = [at for at, row in enumerate(self.rows) if row.again]
        return AsRun(columns.facts(), Schedule.of(self.steps), origin, again)
