"""Plans the scheduling lines of a policy: buckets, then prefetch and delay, then overlap, on the graph as it runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import assert_never

from policylang.graph.blocks import BlockTable, blocks_of
from policylang.graph.facts import Facts
from policylang.graph.schedule import Schedule, ScheduleStep, StepKind
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic
from policylang.language.globs import PathGlob
from policylang.language.interruption.wanted import check_cancelled
from policylang.language.syntax import Bucket, Delay, KeepOrder, Overlap, Policy, Prefetch, Scheduling
from policylang.planning import refusals
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.offers import Ranks
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.order.as_run import run
from policylang.planning.order.dependencies import dependencies, held_rows, unknown_operators
from policylang.planning.order.lines.denoted import Picks
from policylang.planning.order.lines.limited import Limited, TooTight
from policylang.planning.order.lines.moves import Moves, Wish, moved
from policylang.planning.order.lines.named import Picked, after_edits, shared_out
from policylang.planning.order.lines.order_errors import OrderErrors
from policylang.planning.order.reading.roles import Progress
from policylang.planning.schedule.host_copy_steps import with_host_copies
from policylang.planning.schedule.order_plan import OrderPlan, SchedulingOutcome
from policylang.simulation.node_times import node_times
from policylang.simulation.peak import estimate_peak

_FIRST = int(StepKind.FIRST_RUN)


def cannot_order(policy: Policy, capabilities: Capabilities) -> list[Diagnostic]:
    """The scheduling lines of a policy, refused where the path carries none out."""
    if capabilities.orders:
        return []
    lines = [
        each
        for each in (*policy.buckets, *policy.scheduling)
        if not (capabilities.orders_weights and done_by_fsdp(each))
    ]
    return [refusals.cannot_order(statement, capabilities) for statement in lines if not statement.optional]


def done_by_fsdp(statement: Bucket | Scheduling) -> bool:
    """Whether ``fully_shard`` can gather weights as a line says: ahead, or those of one block together."""
    of_a_block = isinstance(statement, Bucket) and statement.blocks == 1 and statement.size is None
    return isinstance(statement, Prefetch) or of_a_block


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

    ``facts`` and ``schedule`` are of the graph as its decisions leave it, recomputations as second runs; ``blocks`` are
    its blocks as the policy names them, where they are worked out already. Never raises for what is wrong between
    policy and graph: that is in ``OrderPlan.diagnostics``. Linear but for the order itself, which is
    O((nodes + edges) log nodes).
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
        self.device = device
        self.as_run = run(facts, schedule)
        self.traced = traced = self.as_run.facts
        if blocks is None:
            blocks = blocks_of(facts, None if policy.blocks is None else PathGlob(policy.blocks.glob))
        self.block_names = blocks.names
        said = {name: blocks.block_of[old] for name, old in zip(traced.names, self.as_run.origin, strict=True)}
        again = frozenset(traced.names[row] for row in self.as_run.again)
        check_cancelled()
        self.traced_times = None if device is None else node_times(traced, device)
        self.picks = Picks(policy, said, blocks.names, again, self.traced_times)
        self.errors = OrderErrors(policy, traced, self.picks)
        self.named = [self._named(number) for number in range(len(policy.scheduling))]
        check_cancelled()
        held = frozenset(traced.names[row] for row in held_rows(traced, self._kept()))
        self.edits, self.facts = plan_edits(policy, traced, capabilities, ranks, self.picks.of, held)
        check_cancelled()
        self.times = None if device is None else node_times(self.facts, device)

    def _named(self, number: int) -> list[str]:
        rows, others = self.picks.collectives(self.traced, self.policy.scheduling[number].selector)
        self.errors.selection(self.policy.scheduling[number], rows, others)
        return [self.traced.names[row] for row in rows]

    def _kept(self) -> dict[int, KeepOrder]:
        """The collectives that a statement keeps in order, in the graph as traced."""
        statements = zip(self.policy.scheduling, self.named, strict=True)
        return {
            self.traced.index[name]: statement
            for statement, names in statements
            if isinstance(statement, KeepOrder)
            for name in names
        }

    def plan(self) -> OrderPlan:
        policy, facts, errors = self.policy, self.facts, self.errors
        check_cancelled()
        for number, statement in enumerate(policy.rewrites):
            if isinstance(statement, Bucket):
                errors.bucket(number, statement, self.edits, self._kept())
        picked = shared_out(policy, [after_edits(names, self.edits, facts) for names in self.named])
        kept = {row for each in picked if isinstance(each.statement, KeepOrder) for row in each.rows}
        needs = dependencies(facts, kept)
        self.stages = self.picks.stages(facts)
        calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
        check_cancelled()
        found = moved(
            facts,
            needs,
            self.stages,
            _wishes(picked, Prefetch),
            _wishes(picked, Delay),
            kept,
            frozenset(unknown_operators(facts)),
        )
        check_cancelled()
        order = found.order
        too_tight: list[TooTight] = []
        if self.times is not None:
            limited = Limited(facts, needs, self.times, picked, self.schedule, self._traced_peak)
            order, too_tight = limited.order(order), limited.too_tight
            for number, each in enumerate(picked):
                if isinstance(each.statement, Overlap):
                    too_large = {row: why for row, why in limited.too_large.items() if row in each.taken}
                    found.left.setdefault(number, {}).update(too_large)
        check_cancelled()
        outcomes = self._outcomes(picked, found, calls, order)
        for number, (each, outcome) in enumerate(zip(picked, outcomes, strict=True)):
            errors.statement(number, each, outcome, found, self.stages, facts)
        errors.kept(picked, found, facts)
        errors.crossings(picked, found, facts)
        errors.limits(too_tight)
        return OrderPlan(
            traced=self.traced,
            traced_schedule=self.as_run.schedule,
            edits=self.edits,
            facts=facts,
            schedule=self.schedule(order),
            outcomes=outcomes,
            diagnostics=tuple(errors.found),
            times=self.times,
            traced_times=self.traced_times,
            barriers=needs.barriers,
            block_of=self.picks.selections(facts).blocks.block_of,
            block_names=self.block_names,
        )

    def _traced_peak(self) -> int:
        return estimate_peak(self.traced, self.as_run.schedule).bytes

    # --- steps ---

    def schedule(self, order: Sequence[int]) -> Schedule:
        """The steps of the calls in some order, with the copies to the host and back between them."""
        traced, schedule = self.traced, self.as_run.schedule
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
        """Of each call; a new node has that of the old one before which it was put."""
        of_name = {self.traced.names[row]: region for kind, row, region in self.as_run.schedule if kind == _FIRST}
        found: dict[int, int] = {}
        region = max(of_name.values(), default=0)
        for row in range(len(self.facts) - 1, -1, -1):
            if self.facts.ops[row] == "call_function":
                region = found[row] = of_name.get(self.facts.names[row], region)
        return found

    # --- outcomes ---

    def _outcomes(
        self, picked: Sequence[Picked], found: Moves, calls: Sequence[int], order: Sequence[int]
    ) -> tuple[SchedulingOutcome, ...]:
        before = Progress(self.facts, calls)
        between, after = Progress(self.facts, found.order), Progress(self.facts, order)
        outcomes = []
        names = self.facts.names
        for number, each in enumerate(picked):
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
            left = found.left.get(number, {})
            outcomes.append(
                SchedulingOutcome(
                    statement=each.statement,
                    matched=tuple(names[row] for row in each.rows),
                    moved=tuple(names[row] for row in shifted),
                    left={names[row]: why for row, why in left.items()},
                )
            )
        return tuple(outcomes)


def _wishes(picked: Sequence[Picked], kind: type[Prefetch] | type[Delay]) -> list[Wish]:
    return [
        Wish(row, number, each.statement.blocks)
        for number, each in enumerate(picked)
        if isinstance(each.statement, kind)
        for row in each.taken
    ]
