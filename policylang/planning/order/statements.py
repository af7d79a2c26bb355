"""Plans the scheduling lines of a policy: buckets, then prefetch and delay, then overlap, on the graph as it runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import assert_never

from policylang.graph.blocks import BlockTable, blocks_of
from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule, ScheduleStep, StepKind
from policylang.language.cancellation import check_cancelled
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic
from policylang.language.globs import PathGlob
from policylang.language.syntax import Bucket, Delay, KeepOrder, Overlap, Policy, Prefetch, Scheduling
from policylang.planning import refusals
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.other_ranks import Ranks
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.order.dependencies import ComputeProgress, dependencies, held_rows, unknown_operators
from policylang.planning.order.moves import MoveRequest, Moves, move_collectives
from policylang.planning.order.order_errors import OrderErrors
from policylang.planning.order.overlap import OverlapLines, TooTight
from policylang.planning.order.rematerialised import rematerialised
from policylang.planning.order.selected_collectives import (
    SelectedCollectives,
    WholeStepSelections,
    after_edits,
    assigned,
)
from policylang.planning.plan import OrderPlan, SchedulingOutcome
from policylang.planning.schedule import with_host_copies
from policylang.simulation.memory import estimate_peak
from policylang.simulation.node_times import node_times

_FIRST = int(StepKind.FIRST_RUN)


def cannot_order(policy: Policy, capabilities: Capabilities) -> list[Diagnostic]:
    """The scheduling lines of a policy, refused where the path carries none out."""
    if capabilities.orders:
        return []
    lines = [
        each
        for each in (*policy.buckets, *policy.scheduling)
        if not (capabilities.orders_weights and isinstance(each, Prefetch))
    ]
    return [refusals.cannot_order(statement, capabilities) for statement in lines if not statement.optional]


def plan_order(
    policy: Policy,
    facts: Facts,
    schedule: Schedule,
    capabilities: Capabilities,
    *,
    ranks: Ranks | None = None,
    device: DeviceProfile | None = None,
    blocks: BlockTable | None = None,
) -> OrderPlan | None:
    """What the scheduling lines come to on a graph whose values are decided; None for a policy without any.

    ``facts`` and ``schedule`` are of the graph as its decisions leave it; ``blocks`` are its blocks as the policy names
    them, where they are known already. What is wrong between policy and graph is in ``OrderPlan.diagnostics``, never
    raised. Linear but for the order itself, which is O((nodes + edges) log nodes).
    """
    if not policy.orders:
        return None
    return _OrderPlanner(policy, facts, schedule, capabilities, ranks, device, blocks).plan()


class _OrderPlanner:
    def __init__(
        self,
        policy: Policy,
        facts: Facts,
        schedule: Schedule,
        capabilities: Capabilities,
        ranks: Ranks | None,
        device: DeviceProfile | None,
        blocks: BlockTable | None,
    ) -> None:
        self.policy = policy
        self.graph = rematerialised(facts, schedule)
        self.traced = traced = self.graph.facts
        if blocks is None:
            blocks = blocks_of(facts, None if policy.blocks is None else PathGlob(policy.blocks.glob))
        self.block_names = blocks.names
        labelled = {name: blocks.block_of[old] for name, old in zip(traced.names, self.graph.origin, strict=True)}
        recomputed = [traced.names[row] for row in self.graph.recomputed]
        check_cancelled()
        self.traced_times = None if device is None else node_times(traced, device)
        self.selections = WholeStepSelections(policy, labelled, blocks.names, recomputed, self.traced_times)
        self.errors = OrderErrors(policy, traced, self.selections)
        self.kept: dict[int, KeepOrder] = {}
        """The collectives that a statement keeps in order, in the graph as traced."""
        self.names = [self._selected(statement) for statement in policy.scheduling]
        check_cancelled()
        held = frozenset(traced.names[row] for row in held_rows(traced, self.kept))
        self.edits, self.facts = plan_edits(policy, traced, capabilities, ranks, self.selections.rows, held)
        check_cancelled()
        self.times = None if device is None else node_times(self.facts, device)

    def _selected(self, statement: Scheduling) -> list[str]:
        rows, others = self.selections.collectives(self.traced, statement.selector)
        self.errors.selection(statement, rows, others)
        if isinstance(statement, KeepOrder):
            self.kept.update(dict.fromkeys(rows, statement))
        return [self.traced.names[row] for row in rows]

    def plan(self) -> OrderPlan:
        policy, facts, errors = self.policy, self.facts, self.errors
        check_cancelled()
        for number, statement in enumerate(policy.rewrites):
            if isinstance(statement, Bucket):
                errors.bucket(number, statement, self.edits, self.kept)
        selected = assigned(policy, [after_edits(names, self.edits, facts) for names in self.names])
        kept = {row for each in selected if isinstance(each.statement, KeepOrder) for row in each.rows}
        before = dependencies(facts, kept)
        segments = self.selections.segments(facts)
        check_cancelled()
        prefetches, delays = _requests(selected, Prefetch), _requests(selected, Delay)
        found = move_collectives(facts, before, segments, prefetches, delays, kept, frozenset(unknown_operators(facts)))
        check_cancelled()
        order = found.order
        too_tight: list[TooTight] = []
        if self.times is not None:
            overlap = OverlapLines(facts, before, self.times, selected, self.schedule, self._traced_peak)
            order, too_tight = overlap.order(order), overlap.too_tight
            for number, each in enumerate(selected):
                if isinstance(each.statement, Overlap):
                    too_large = {row: why for row, why in overlap.too_large.items() if row in each.taken}
                    found.left.setdefault(number, {}).update(too_large)
        check_cancelled()
        outcomes = self._outcomes(selected, found, order)
        for number, each in enumerate(selected):
            errors.statement(number, each, found, segments, facts)
        errors.kept(selected, found, facts)
        errors.crossings(selected, found, facts)
        errors.limits(too_tight)
        return OrderPlan(
            traced=self.traced,
            traced_schedule=self.graph.schedule,
            edits=self.edits,
            facts=facts,
            schedule=self.schedule(order),
            outcomes=outcomes,
            diagnostics=tuple(errors.found),
            times=self.times,
            traced_times=self.traced_times,
            barriers=before.barriers,
            block_of=self.selections.selections(facts).blocks.block_of,
            block_names=self.block_names,
        )

    def _traced_peak(self) -> int:
        return estimate_peak(self.traced, self.graph.schedule).bytes

    def schedule(self, order: Sequence[int]) -> Schedule:
        """The steps of the calls in some order, with the copies to the host and back between them."""
        traced, schedule = self.traced, self.graph.schedule
        if not self.edits and all(one < other for one, other in pairwise(order)):
            return schedule
        regions = self._regions()
        steps: list[ScheduleStep] = [(_FIRST, row, regions[row]) for row in order]
        instead = {old: new for edit in self.edits.done for old, new in edit.replaced}
        copied = bytearray(len(self.facts))
        for row in schedule.rows_of(StepKind.COPY_TO_HOST):
            name = traced.names[row]
            while name in instead:
                name = instead[name]
            copied[self.facts.index[name]] = 1
        return Schedule.of(with_host_copies(self.facts, steps, copied))

    def _regions(self) -> dict[int, int]:
        """The region of each call; a new node has that of the next old one."""
        of_name = {self.traced.names[row]: region for kind, row, region in self.graph.schedule if kind == _FIRST}
        found: dict[int, int] = {}
        region = max(of_name.values(), default=0)
        for row in range(len(self.facts) - 1, -1, -1):
            if self.facts.ops[row] == "call_function":
                region = found[row] = of_name.get(self.facts.names[row], region)
        return found

    def _outcomes(
        self, selected: Sequence[SelectedCollectives], found: Moves, order: Sequence[int]
    ) -> tuple[SchedulingOutcome, ...]:
        calls = [row for row, op in enumerate(self.facts.ops) if op == "call_function"]
        before, between, after = (ComputeProgress(self.facts, each) for each in (calls, found.order, order))
        names, outcomes = self.facts.names, []
        for number, each in enumerate(selected):
            shifted: list[int] = []
            match each.statement:
                case KeepOrder():
                    pass
                case Overlap():
                    shifted = [row for row in each.taken if after.shifted(row, between)]
                case Prefetch() | Delay():
                    shifted = [row for row in each.taken if between.shifted(row, before)]
                case _:
                    assert_never(each.statement)
            outcomes.append(
                SchedulingOutcome(
                    statement=each.statement,
                    matched=tuple(names[row] for row in each.rows),
                    moved=tuple(names[row] for row in shifted),
                    left={names[row]: why for row, why in found.left.get(number, {}).items()},
                )
            )
        return tuple(outcomes)


def _requests(selected: Sequence[SelectedCollectives], kind: type[Prefetch] | type[Delay]) -> list[MoveRequest]:
    return [
        MoveRequest(row, number, each.statement.blocks)
        for number, each in enumerate(selected)
        if isinstance(each.statement, kind)
        for row in each.taken
    ]
