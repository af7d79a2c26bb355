"""The graph under a plan's decisions: each recomputation a node of its own, in the order of the schedule.

Without torch, so that scheduling lines are planned on a snapshot as on the graph. Recomputations are named as the flat
path names its copies.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from attrs import frozen

from policylang.graph.facts import Facts, Flag, GraphKind, Phase, Ref, is_gradient
from policylang.graph.schedule import Schedule, ScheduleStep, StepKind
from policylang.language.cancellation import check_cancelled
from policylang.operators.names import GETITEM
from policylang.planning.order.reading.run_columns import RunColumns, RunRow, statistics_left_out


class RunNames:
    """Unused names after those of a graph's nodes: ``add_recomputed``, ``add_recomputed_1``, …"""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)
        self._counts: dict[str, int] = {}

    def second_run(self, name: str) -> str:
        return self._new(f"{name}_recomputed")

    def drawn(self, name: str) -> str:
        """For the result of a random operator that keeps the state it starts from."""
        return self._new(f"{name}_result")

    def state(self, name: str) -> str:
        """For that state."""
        return self._new(f"{name}_state")

    def _new(self, name: str) -> str:
        found, count = name, self._counts.get(name, 0)
        while found in self._taken:
            count += 1
            found = f"{name}_{count}"
        self._counts[name] = count
        self._taken.add(found)
        return found


_FIRST, _SECOND = int(StepKind.FIRST_RUN), int(StepKind.SECOND_RUN)
_BACKWARD = int(Phase.BACKWARD)


@frozen(eq=False)
class RematerialisedGraph:
    facts: Facts
    schedule: Schedule
    """Its steps: first runs, and copies to the host and back."""
    origin: Sequence[int]
    """Row to the row of the planned graph of which it is a run."""
    recomputed: Collection[int] = ()
    """The rows of recomputations, in order."""


def rematerialised(facts: Facts, schedule: Schedule) -> RematerialisedGraph:
    """One node for each run of a node, in the order of the schedule; copies to the host and back are no nodes. A half
    gives itself. Linear in nodes, edges and steps."""
    if facts.kind not in (GraphKind.JOINT, GraphKind.FLAT):
        return RematerialisedGraph(facts, schedule, range(len(facts)))
    return _Runs(facts, schedule).graph()


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
        flags, owners, targets = facts.flags, facts.owners, facts.targets
        self.drawn = {  # the random operators of a flat graph that are recomputed keep the state that they start from
            row: (self.names.drawn(facts.names[row]), self.names.state(facts.names[row]))
            for row in sorted(set(schedule.rows_of(StepKind.SECOND_RUN)) if self.flat else ())
            if flags[row] & Flag.RANDOM
            and targets[row] != GETITEM
            and (owners[row] == row or flags[row] & Flag.REPEATABLE)
        }
        self._run(schedule)

    def _run(self, schedule: Schedule) -> None:
        """In a flat graph inputs and constants keep their places; a partition has them first."""
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
        left_out, inputs = statistics_left_out(old, row), list[int]()
        for source in old.inputs[row]:
            if source not in copies and self._is_subgraph(row, source):
                # A higher-order operator that is recomputed has its own reference to the graph that it runs.
                found = self._add(RunRow(source, self.names.second_run(old.names[source])), ())
            else:
                found = self._read(source, copies)
            if source not in left_out:
                inputs.append(found)
        if row in self.drawn:
            inputs.insert(0, self.value[row] - 1)  # the state is the row before what was drawn
        name = self.names.second_run(old.names[row])
        copies[row] = self._add(RunRow(row, name, region, again=True), tuple(dict.fromkeys(inputs)), copies)
        self.steps.append((_FIRST, copies[row], region))

    def _is_subgraph(self, reader: int, source: int) -> bool:
        old = self.old
        is_module = old.ops[source] == "get_attr" and not old.dtypes[source]
        return self.flat and is_module and old.targets[reader].startswith("higher_order.")

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

    def graph(self) -> RematerialisedGraph:
        columns = RunColumns(
            self.old, self.flat, self.drawn, self.rows, self.inputs, self.arguments, self.first, self.copies
        )
        origin = array("i", [row.old for row in self.rows])
        recomputed = [at for at, row in enumerate(self.rows) if row.again]
        return RematerialisedGraph(columns.facts(), Schedule.of(self.steps), origin, recomputed)
