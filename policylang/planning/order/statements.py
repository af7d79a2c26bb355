"""Plans the scheduling lines of a policy: buckets, then prefetch and delay, then overlap, on the graph as it runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import assert_never

from policylang.graph.blocks import BlockTable, blocks_of
from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule, StepKind
from policylang.language.cancellation import check_cancelled
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic
from policylang.language.globs import PathGlob
from policylang.language.syntax import Bucket, Delay, KeepOrder, Overlap, Policy, Prefetch
from policylang.planning import refusals
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.other_ranks import Ranks
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.graph_edit import Edits
from policylang.planning.order.dependencies import ComputeProgress, dependencies, held_rows, unknown_operators
from policylang.planning.order.moves import MoveRequest, Moves, move_collectives
from policylang.planning.order.order_errors import OrderErrors
from policylang.planning.order.overlap import OverlapLines, TooTight
from policylang.planning.order.rematerialised import RematerialisedGraph, rematerialised
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
    """The scheduling lines of a policy, refused if the path applies none."""
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
    """Plan the scheduling lines on a graph whose values are decided; None for a policy without any.

    ``facts`` and ``schedule`` are of the graph as its decisions leave it; ``blocks`` are its blocks as the policy names
    them, if known. Lines that do not fit the graph are reported in ``OrderPlan.diagnostics``, never raised. Linear but
    for the order itself, which is O((nodes + edges) log nodes).
    """
    if not policy.orders:
        return None
    graph = rematerialised(facts, schedule)
    traced = graph.facts
    if blocks is None:
        blocks = blocks_of(facts, None if policy.blocks is None else PathGlob(policy.blocks.glob))
    labelled = {name: blocks.block_of[old] for name, old in zip(traced.names, graph.origin, strict=True)}
    recomputed = [traced.names[row] for row in graph.recomputed]
    check_cancelled()
    traced_times = None if device is None else node_times(traced, device)
    selections = WholeStepSelections(policy, labelled, blocks.names, recomputed, traced_times)
    errors = OrderErrors(policy, traced, selections)
    kept_by: dict[int, KeepOrder] = {}
    selected_names: list[list[str]] = []
    for scheduling in policy.scheduling:
        rows, others = selections.collectives(traced, scheduling.selector)
        errors.selection(scheduling, rows, others)
        if isinstance(scheduling, KeepOrder):
            kept_by.update(dict.fromkeys(rows, scheduling))
        selected_names.append([traced.names[row] for row in rows])
    check_cancelled()
    held = frozenset(traced.names[row] for row in held_rows(traced, kept_by))
    edits, edited = plan_edits(policy, traced, capabilities, ranks, selections.rows, held)
    check_cancelled()
    times = None if device is None else node_times(edited, device)
    check_cancelled()
    for number, statement in enumerate(policy.rewrites):
        if isinstance(statement, Bucket):
            errors.bucket(number, statement, edits, kept_by)
    selected = assigned(policy, [after_edits(names, edits, edited) for names in selected_names])
    kept = {row for each in selected if isinstance(each.statement, KeepOrder) for row in each.rows}
    before = dependencies(edited, kept)
    segments = selections.segments(edited)
    check_cancelled()
    prefetches, delays = _requests(selected, Prefetch), _requests(selected, Delay)
    found = move_collectives(edited, before, segments, prefetches, delays, kept, frozenset(unknown_operators(edited)))
    check_cancelled()
    order, too_tight = found.order, list[TooTight]()
    scheduled = partial(_scheduled, graph, edits, edited)
    if times is not None:
        overlap = OverlapLines(
            edited, before, times, selected, scheduled, lambda: estimate_peak(traced, graph.schedule).bytes
        )
        order = overlap.order(order)
        too_tight = overlap.too_tight
        for number, each in enumerate(selected):
            if isinstance(each.statement, Overlap):
                too_large = {row: why for row, why in overlap.too_large.items() if row in each.taken}
                found.left.setdefault(number, {}).update(too_large)
    check_cancelled()
    outcomes = _outcomes(edited, selected, found, order)
    errors.moves(selected, found, segments, edited)
    errors.limits(too_tight)
    return OrderPlan(
        traced=traced,
        traced_schedule=graph.schedule,
        edits=edits,
        facts=edited,
        schedule=scheduled(order),
        outcomes=outcomes,
        diagnostics=tuple(errors.found),
        times=times,
        traced_times=traced_times,
        barriers=before.barriers,
        block_of=selections.selections(edited).blocks.block_of,
        block_names=blocks.names,
    )


def _scheduled(graph: RematerialisedGraph, edits: Edits, facts: Facts, order: Sequence[int]) -> Schedule:
    """The steps of the calls in some order, with the copies to the host and back between them."""
    traced, schedule = graph.facts, graph.schedule
    if not edits and all(one < other for one, other in pairwise(order)):
        return schedule
    region_of = {traced.names[row]: region for kind, row, region in schedule if kind == _FIRST}
    regions: dict[int, int] = {}
    region = max(region_of.values(), default=0)
    for row in range(len(facts) - 1, -1, -1):  # a new node has the region of the next old one
        if facts.ops[row] == "call_function":
            region = regions[row] = region_of.get(facts.names[row], region)
    instead = {old: new for edit in edits.done for old, new in edit.replaced}
    copied: dict[int, StepKind] = {}
    for row, kind in schedule.moved.items():
        name = traced.names[row]
        while name in instead:
            name = instead[name]
        copied[facts.index[name]] = kind
    return Schedule.of(with_host_copies(facts, [(_FIRST, row, regions[row]) for row in order], copied))


def _outcomes(
    facts: Facts, selected: Sequence[SelectedCollectives], found: Moves, order: Sequence[int]
) -> tuple[SchedulingOutcome, ...]:
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    before, between, after = (ComputeProgress(facts, each) for each in (calls, found.order, order))
    names, outcomes = facts.names, []
    for number, each in enumerate(selected):
        match each.statement:
            case KeepOrder():
                shifted = []
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
