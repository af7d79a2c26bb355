"""The plan: the decision on every forward value, the line that made it, graph edits, and the schedule that follows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Literal

from attrs import evolve, field, frozen

from policylang.graph.blocks import BlockTable
from policylang.graph.facts import Facts, Flag, Schedule, StepKind
from policylang.language.cancellation import collector_paused
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic
from policylang.language.selectors import tests_of
from policylang.language.shown import as_text
from policylang.language.syntax import TIMES, Compare, Overlap, Policy, Rule, Scheduling, Statement
from policylang.operators.names import WAITS
from policylang.planning.graph_edit import Edits, common_names
from policylang.planning.schedule import (
    BLOCKS_AHEAD,
    Ahead,
    Checkpoints,
    build_checkpointed_schedule,
    build_schedule,
    held_and_rerun,
    host_memory,
)
from policylang.planning.value_outcome import Decision, Default, offloads

if TYPE_CHECKING:
    from policylang.planning.pipelines import PipelineFigures, StageCosts
    from policylang.simulation.memory import Peak
    from policylang.simulation.node_times import NodeTimes
    from policylang.simulation.streams import StepTime


@frozen
class SchedulingOutcome:
    """The effect of one scheduling statement."""

    statement: Scheduling
    matched: tuple[str, ...]
    """The collectives that it picks, in the order of the graph."""
    moved: tuple[str, ...]
    """Collectives that start earlier, or are awaited later, because of it."""
    left: Mapping[str, str] = field(factory=dict)
    """Collectives that could not be moved, and why, as a phrase."""


@frozen(eq=False)
class OrderPlan:
    """Plain data, in terms of the names of nodes."""

    traced: Facts
    """The graph as it runs without any scheduling line."""
    traced_schedule: Schedule
    """Its order, copies to the host and back included."""
    edits: Edits
    """The buckets; a statement is numbered as in ``Policy.rewrites``."""
    facts: Facts
    """The graph as it runs once they are applied, its nodes still in traced order."""
    schedule: Schedule
    """The steps in the order that is applied, on the nodes of :attr:`facts`."""
    outcomes: tuple[SchedulingOutcome, ...]
    """One for each of ``Policy.scheduling``."""
    diagnostics: tuple[Diagnostic, ...]
    times: NodeTimes | None = field(default=None, repr=False)
    """The times of :attr:`facts`, where there is a device."""
    traced_times: NodeTimes | None = field(default=None, repr=False)
    """The times of :attr:`traced`."""
    barriers: Mapping[str, int] = field(factory=dict)
    """Operators that nothing was moved across because nobody knows what they do, and how many calls."""
    block_of: Sequence[int] = field(factory=tuple, repr=False)
    """Node of :attr:`facts` to block number, -1 outside every block."""
    block_names: tuple[str, ...] = field(factory=tuple, repr=False)

    @property
    def moves(self) -> bool:
        """True if anything runs elsewhere than it was traced."""
        return bool(self.edits) or any(each.moved for each in self.outcomes)

    def words(self) -> Iterator[str]:
        """The part of the order that is equal on every rank: the buckets, and the order in which collectives start and
        are awaited."""
        yield from self.edits.words()
        yield from self.communication()

    def communication(self) -> Iterator[str]:
        """The starts and waits in order, without the names of nodes and groups, which may be each rank's own."""
        facts, numbers = self.facts, dict[str, int]()
        for kind, row, _ in self.schedule:
            if kind <= StepKind.SECOND_RUN and (group := facts.group_names[row]):
                number = numbers.setdefault(group, len(numbers))
                shape = "" if facts.flags[row] & Flag.DATA_DEPENDENT else facts.shapes[row]
                yield f"{facts.targets[row]} {shape} {facts.dtypes[row]} over group {number}"
            elif kind <= StepKind.SECOND_RUN and facts.targets[row] in WAITS:
                yield "wait"


@frozen
class RuleOutcome:
    """The matches and decisions of one rule on one graph. Nodes are producers, in graph order."""

    rule: Rule
    matched: tuple[int, ...]
    decided: tuple[int, ...]
    overridden_by: dict[int, int]
    """Later rule to the number of this rule's nodes that it overrides."""
    kept_by_user: int
    """The number of matches that kept the tag of the user's own ``checkpoint``."""


@frozen
class ExpectationOutcome:
    """The result of an ``expect`` line."""

    text: str
    source: str
    status: Literal["held", "failed", "deferred"]
    """``deferred``: depends on what ``undecided -> auto`` leaves to the partitioner; checked after partitioning."""
    found: str
    """The figure, as printed: ``219.5 MiB in block 3``."""
    margin: float | None = None
    """The distance from the limit, in bytes, FLOPs, a fraction or nodes: negative where it fails; None without one."""


@frozen(eq=False)
class Plan:
    """Policy × facts. ``decisions`` has an entry for every node of ``facts``; None for nodes no rule can range over."""

    policy: Policy
    before: Facts
    """The graph as it is."""
    facts: Facts
    """The graph as it will be once :attr:`edits` are applied; the same object where there are none."""
    decisions: Sequence[Decision | None]
    """Decisions are shared objects: there are few distinct ones."""
    rules: tuple[RuleOutcome, ...]
    edits: Edits
    """The changes of the graph's structure; rules are planned on what they leave."""
    expectations: tuple[ExpectationOutcome, ...]
    diagnostics: tuple[Diagnostic, ...]
    """Errors and warnings. A caller that acts on the plan raises the errors first."""
    undecided: Default
    digest: str
    """Hex SHA-256 over policy, node names, operators and decisions: equal plans, equal digests, on every rank."""
    order: OrderPlan | None = field(default=None, repr=False)
    """The order of the scheduling lines; None where the policy has none, or the path cannot keep any."""
    times: NodeTimes | None = field(default=None, repr=False)
    """The times of :attr:`facts` on a device, where one is given."""
    block_of: Sequence[int] = field(factory=tuple, repr=False)
    """Node to block number, 0-based, -1 outside every block."""
    block_names: tuple[str, ...] = field(factory=tuple, repr=False)

    checkpoints: Checkpoints | None = field(default=None, repr=False)
    """In eager: those around the blocks of a whole model, or that of the one block that the graph is."""

    def __str__(self) -> str:
        return as_text(self)

    def __repr__(self) -> str:
        return f"<policylang.Plan: {self}>"

    @cached_property
    @collector_paused()
    def schedule(self) -> Schedule:
        """The steps of the plan, on the nodes of :attr:`facts`. What is left to PyTorch's partitioner is kept."""
        if self.checkpoints is not None:
            kept = held_and_rerun(self.facts, self.decisions, self.checkpoints)
            ahead = BLOCKS_AHEAD if self.ahead is None else self.ahead.blocks
            inner, decisions = self.checkpoints.inner, self.decisions
            decided = {row: by for row in kept[0] if (by := decisions[inner.get(row, row)]) is not None}
            forms = {row: by.form for row, by in decided.items() if by.form is not None}
            return build_checkpointed_schedule(self.facts, self.checkpoints, *kept, ahead, forms)
        return schedule_of(self.facts, self.decisions, self.ahead)

    @property
    def ahead(self) -> Ahead | None:
        """The distance by which copies back start ahead; None where the policy does not say it."""
        line = self.policy.prefetch_offloaded
        return None if line is None else Ahead(line.blocks, self.block_of)

    @cached_property
    def host_memory(self) -> int:
        """The most bytes that the pool of host memory gives out to offloaded values, in the order that runs."""
        order = self if self.order is None else self.order
        return max(host_memory(order.facts, order.schedule), default=0)

    @cached_property
    @collector_paused()
    def peak(self) -> Peak:
        """The peak of the step that runs, in the order of the scheduling lines."""
        from policylang.simulation.memory import estimate_peak

        order = self if self.order is None else self.order
        return estimate_peak(order.facts, order.schedule)

    @cached_property
    @collector_paused()
    def stage_costs(self) -> Sequence[StageCosts] | None:
        """The costs of one microbatch in each stage of the policy's pipeline, where the graph is whole."""
        from policylang.planning.pipelines import stage_costs

        made = self if self.order is None else self.order
        times = made.times if self.shown_times is not None else None
        blocks = BlockTable(made.block_of, self.block_names)
        return stage_costs(self.policy.pipeline, made.facts, made.schedule, times, blocks)

    @cached_property
    def pipeline(self) -> PipelineFigures | None:
        """The bytes and seconds of each stage over the schedule of the policy's pipeline, where the graph is whole."""
        from policylang.planning.pipelines import pipeline_figures

        said, costs = self.policy.pipeline, self.stage_costs
        if said is None or costs is None:
            return None
        made = self if self.order is None else self.order
        timed = made.times is not None and self.shown_times is not None
        return pipeline_figures(said, costs, timed=timed)

    @cached_property
    @collector_paused()
    def step_time(self) -> StepTime | None:
        """The times of the step that runs, in the order of the scheduling lines; None without a device."""
        from policylang.simulation.streams import step_time

        if self.times is None:
            return None
        found, order = step_time(self.facts, self.schedule, self.times), self.order
        if order is None or order.times is None:
            return found
        ordered = step_time(order.facts, order.schedule, order.times)
        return evolve(found, step=ordered.step, exposed=ordered.exposed)

    @property
    def shown_step_time(self) -> StepTime | None:
        """:attr:`step_time` that may be printed."""
        return None if self.untold is not None else self.step_time

    @cached_property
    def untold(self) -> Diagnostic | None:
        """The error of a device's profile that lacks a figure for something that the plan does."""
        from policylang.simulation.node_times import lacking

        return None if self.times is None else lacking(self.times, copies=any(map(offloads, self.decisions)))

    @property
    def shown_times(self) -> NodeTimes | None:
        """:attr:`times` that may be printed: none where the profile lacks a figure, since no time is made up."""
        return None if self.untold is not None else self.times

    def rule_of(self, row: int) -> Rule | None:
        """The rule that decided a node, if one did."""
        decision = self.decisions[row]
        return None if decision is None or decision.rule is None else self.policy.rules[decision.rule]


def schedule_of(facts: Facts, decisions: Sequence[Decision | None], ahead: Ahead | None = None) -> Schedule:
    """The steps under some decisions."""
    decided = [(row, each) for row, each in enumerate(decisions) if each is not None and each.outcome.steps]
    again = (row for row, each in decided if StepKind.SECOND_RUN in each.outcome.steps)
    return build_schedule(facts, again, {row: each.form for row, each in decided if each.outcome.moves}, ahead)


_CHUNK = 1 << 14
NO_EDITS = Edits()


def plan_digest(
    policy: Policy,
    facts: Facts,
    decisions: Sequence[Decision | None],
    edits: Edits = NO_EDITS,
    device: DeviceProfile | None = None,
    order: OrderPlan | None = None,
) -> str:
    """Hex SHA-256 over the policy's resolved text, the node names, the operators, the decisions and the edits, and over
    the figures of a device that the policy decides by and does not name itself.

    An edit contributes what all ranks share: names and sizes, not the ranks of its group. A refused edit contributes
    nothing: it changes nothing, whatever the reason.
    """
    words: dict[int, str] = {}  # decisions are few shared objects, so each is spelled once
    decided = (words.get(id(d)) or words.setdefault(id(d), _word(d)) for d in decisions)
    columns = [[policy_text(policy)], common_names(facts), facts.targets, decided, edits.words()]
    if order is not None:
        columns.append(order.words())
    return digest_of((*map(digest_of, columns), *deciding_device(policy, device)))


def deciding_device(policy: Policy, device: DeviceProfile | None) -> tuple[str, ...]:
    """The figures of a device that is not in the policy's text, where a rule or an order goes by them."""
    if device is None or (policy.device is not None and policy.device.canonical == device.canonical):
        return ()
    timed = any(True for _ in timed_tests(policy, *policy.deciding))
    decides = timed or any(isinstance(each, Overlap) for each in policy.scheduling)
    return (device.canonical,) if decides else ()


def timed_tests(policy: Policy, *statements: Statement) -> Iterator[Compare]:
    for test in tests_of(policy, *statements):
        if isinstance(test, Compare) and test.quantity in TIMES:
            yield test


def policy_text(policy: Policy) -> str:
    """The canonical text; for a tree built by hand, which has none, its fields (spans take no part in a repr)."""
    if policy.canonical:
        return policy.canonical
    device = policy.device and policy.device.canonical
    statements = (policy.lets, policy.blocks, policy.rules, policy.undecided, policy.rewrites, policy.expectations)
    later = filter(None, (policy.scheduling, policy.prefetch_offloaded, device))
    return repr((*statements, *later))


def _word(decision: Decision | None) -> str:
    if decision is None:
        return "-"
    action = "auto" if decision.action is None else decision.action.name
    form = "" if decision.form is None else f" as {decision.form.text}"
    return f"{action}{form} {decision.rule} {decision.why.name}"


def digest_of(words: Iterable[str]) -> str:
    """Hex SHA-256 over some words. None of them holds a NUL, so that they cannot run together."""
    digest, pending = hashlib.sha256(), iter(words)
    while chunk := list(islice(pending, _CHUNK)):
        digest.update("\0".join(chunk).encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()
