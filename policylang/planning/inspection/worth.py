"""The worth of each line: the step with it less the step without it, all other lines as they are.

For a rule the policy is planned again without it, on the same graph: another rule, the user's checkpoint or ``undecided
-> …`` then decides its values. Values left to PyTorch count as saved on both sides. The difference is the rule's
*margin*. Margins do not add up: two rules may each be enough to keep a value. A rule that keeps more and recomputes
less buys FLOPs with memory, one that recomputes more buys memory with FLOPs; either has a *price*, FLOPs a GiB of saved
values (the peak is what no single rule may move). On a device the price is time a GiB, which counts collectives and
moved bytes too. A ``bucket`` or scheduling line is worth what would be exposed without it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from math import isclose
from typing import TypeVar

from attrs import evolve, frozen

from policylang.graph.facts import Facts, Schedule
from policylang.language.diagnostics import Diagnostic, diagnose, removed
from policylang.language.selectors import names_in
from policylang.language.shown import beside, first_lines, format_quantity, joined
from policylang.language.syntax import Action, Bucket, Chunk, Policy, Statement
from policylang.planning.capabilities import Capabilities
from policylang.planning.graph_edit import Edit
from policylang.planning.inspection.communication import Communication, LineStanding, bucket_statements
from policylang.planning.liveness import BackwardCost, saved_and_recomputed
from policylang.planning.order.statements import plan_order
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from policylang.planning.selection.no_match import why_not
from policylang.planning.selection.selectors import selections_for
from policylang.planning.value_outcome import Decision, Why, is_open
from policylang.simulation.memory import estimate_peak
from policylang.simulation.streams import StepTime, step_time

_T = TypeVar("_T")
_SAME = 1e-12  # the relative rounding error of a sum of thousands of times


def same_time(one: float, other: float) -> bool:
    """Compare two sums of times, in seconds, up to rounding."""
    return isclose(one, other, rel_tol=_SAME)


def time_difference(one: float, other: float) -> float:
    """Seconds, exactly 0 where the two are the same but for their rounding."""
    return 0.0 if same_time(one, other) else one - other


def a_gib(amount: float, size: int) -> float:
    """An amount for so many bytes, per GiB."""
    return abs(amount) / (abs(size) / 2**30)


def time_of_step(plan: Plan, schedule: Schedule) -> StepTime | None:
    """The times of a schedule on the graph of a plan; None without a device."""
    return None if plan.shown_times is None else step_time(plan.facts, schedule, plan.shown_times)


SAVED = Decision(Action.SAVE, None, Why.UNDECIDED)


def as_counted(decisions: Sequence[Decision | None]) -> list[Decision | None]:
    """Decisions with all saved that is left to PyTorch."""
    return [SAVED if is_open(decision) else decision for decision in decisions]


MOST_RULES = 100
"""The worth of so many deciding rules is worked out, the first in the policy: each takes a plan."""

_VERDICTS: dict[tuple[int, int], str] = {
    (1, -1): "buys {}",
    (-1, 1): "buys memory",
    (-1, 0): "frees memory",
    (1, 0): "costs memory",
    (0, -1): "saves {}",
    (0, 1): "costs {}",
    (-1, -1): "gains both",
    (1, 1): "costs both",
    (0, 0): "changes nothing",
}
"""By the signs of a rule's bytes and FLOPs, or of its bytes and time. Traffic, to memory or to other ranks, is in the
time and in no other of them."""


@frozen
class Worth:
    """The margin of one rule: with it minus without it."""

    rule: int
    """Its place in ``Policy.rules``."""
    saved_bytes: int
    """Kept for the backward; negative where the rule frees memory."""
    recomputed_flops: int
    """Recomputed; negative where the rule saves work."""
    peak_bytes: int
    recomputed_seconds: float | None = None
    """Recomputed; None without a device."""
    step_seconds: float | None = None
    """Seconds of the whole step, in which other work may hide the cost of the rule; None without a device."""

    @property
    def verdict(self) -> str:
        """With a device it is about time, without one about FLOPs."""
        if self.recomputed_seconds is None:
            return _VERDICTS[_sign(self.saved_bytes), _sign(self.recomputed_flops)].format("FLOPs")
        return _VERDICTS[_sign(self.saved_bytes), _sign(self.recomputed_seconds)].format("time")

    @property
    def flops_per_gib(self) -> float | None:
        """The price; None where the rule does not exchange one for the other."""
        return self._per_gib(self.recomputed_flops)

    @property
    def seconds_per_gib(self) -> float | None:
        """The price in time; None without a device, and where the rule does not exchange one for the other."""
        return None if self.recomputed_seconds is None else self._per_gib(self.recomputed_seconds)

    def _per_gib(self, amount: float) -> float | None:
        exchanges = _sign(self.saved_bytes) * _sign(amount) < 0
        return a_gib(amount, self.saved_bytes) if exchanges else None


def worth_of_rules(
    plan: Plan, capabilities: Capabilities, progress: Callable[[int, int], None] = lambda done, of: None
) -> tuple[Worth, ...]:
    """The worth of every rule that decides something, in the order of the policy, at most of ``MOST_RULES``.
    ``progress`` is called after each rule with the numbers done and in all. A plan and a simulation for each rule."""
    deciding = [index for index, outcome in enumerate(plan.rules) if outcome.decided][:MOST_RULES]
    device = None if plan.times is None else plan.times.device
    cost, peak, time = _cost(plan)
    found: list[Worth] = []
    for done, index in enumerate(deciding, start=1):
        rules = _without(plan.policy.rules, index)
        policy = evolve(plan.policy, rules=rules, rewrites=(), scheduling=(), expectations=())
        other_cost, other_peak, other_time = _cost(make_plan(policy, plan.facts, capabilities, device=device))
        saved_bytes = cost.saved_bytes - other_cost.saved_bytes
        recomputed_flops = cost.recomputed_flops - other_cost.recomputed_flops
        peak_bytes = peak - other_peak
        worth = Worth(rule=index, saved_bytes=saved_bytes, recomputed_flops=recomputed_flops, peak_bytes=peak_bytes)
        if time is not None and other_time is not None:
            again = time_difference(time.recomputed, other_time.recomputed)
            step = time_difference(time.step, other_time.step)
            worth = evolve(worth, recomputed_seconds=again, step_seconds=step)
        found.append(worth)
        progress(done, len(deciding))
    return tuple(found)


def _without(those: tuple[_T, ...], index: int) -> tuple[_T, ...]:
    return those[:index] + those[index + 1 :]


def _sign(amount: float) -> int:
    return (amount > 0) - (amount < 0)


def _cost(plan: Plan) -> tuple[BackwardCost, int, StepTime | None]:
    cost = saved_and_recomputed(plan, as_counted(plan.decisions))
    return cost, estimate_peak(plan.facts, plan.schedule).bytes, time_of_step(plan, plan.schedule)


SLOWER = "APL380"
_NOTICED = 1e-3  # the share of the step by which it has to be slower
_MOST_LINES = 8


def weighed(
    found: Communication,
    plan: Plan,
    capabilities: Capabilities,
    only: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Communication:
    """Fill in :attr:`LineInOrder.exposed_without` of every line, or of ``only`` one. An order is planned for each line;
    without a device nothing is. ``progress`` is called after each with the numbers done and in all."""
    if found.planned.lanes is None:
        return found
    policy = plan.policy
    policies = [evolve(policy, rewrites=_without(policy.rewrites, at)) for at in bucket_statements(policy)]
    policies += [evolve(policy, scheduling=_without(policy.scheduling, at)) for at in range(len(policy.scheduling))]
    asked = range(len(found.lines)) if only is None else [only]
    lines = list(found.lines)
    for done, at in enumerate(asked, start=1):
        lines[at] = evolve(lines[at], exposed_without=_exposed(policies[at], plan, found, capabilities))
        progress(done, len(asked))
    return evolve(found, lines=tuple(lines))


def _exposed(policy: Policy, plan: Plan, found: Communication, capabilities: Capabilities) -> float | None:
    assert plan.times is not None
    order = plan_order(policy, plan.facts, plan.schedule, capabilities, device=plan.times.device)
    if order is None:
        return None if found.traced.lanes is None else found.traced.lanes.exposed
    return None if order.times is None else step_time(order.facts, order.schedule, order.times).exposed


# --- fuse and collapse ---


@frozen
class EditWorth:
    """The margin of one ``fuse`` or ``collapse`` line: with it minus without it."""

    statement: int
    """Indexes ``Policy.rewrites``."""
    fewer_collectives: int
    saved_bytes: int
    peak_bytes: int
    under: StepTime | None
    """The times of the step; None without a device."""
    without: StepTime | None
    """The times of the step without the line."""

    @property
    def step_seconds(self) -> float | None:
        return None if self.under is None or self.without is None else self.under.step - self.without.step

    @property
    def exposed_seconds(self) -> float | None:
        return None if self.under is None or self.without is None else self.under.exposed - self.without.exposed

    @property
    def slows(self) -> bool:
        """True if the step takes longer because of it."""
        return self.under is not None and (self.step_seconds or 0.0) > _NOTICED * self.under.step


def worth_of_edits(plan: Plan, capabilities: Capabilities) -> tuple[EditWorth, ...]:
    """The margins of the ``fuse`` and ``collapse`` lines that rewrite something, in the order of the policy; a
    ``bucket`` line is weighed as a scheduling line. A plan and a simulation for each."""
    policy, device = plan.policy, None if plan.times is None else plan.times.device
    found: list[EditWorth] = []
    for at, statement in enumerate(policy.rewrites):
        done = plan.edits.of(at).done
        if isinstance(statement, Bucket) or not done:
            continue
        rest = evolve(policy, rewrites=_without(policy.rewrites, at), expectations=())
        other = make_plan(rest, plan.before, capabilities, device=device)
        worth = EditWorth(
            statement=at,
            fewer_collectives=sum(edit.fewer_collectives for edit in done),
            saved_bytes=saved_and_recomputed(plan).saved_bytes - saved_and_recomputed(other).saved_bytes,
            peak_bytes=plan.peak.bytes - other.peak.bytes,
            under=plan.shown_step_time,
            without=other.shown_step_time,
        )
        found.append(worth)
    return tuple(found)


def slowing_edits(plan: Plan, capabilities: Capabilities) -> Iterator[Diagnostic]:
    """A warning for each line that slows the step on the device that times are worked out for; none without one. A
    ``chunk`` line that buys memory with the time of smaller kernels is none, one whose slices wait is."""
    for each in worth_of_edits(plan, capabilities) if plan.shown_times is not None else ():
        if each.slows and each.under is not None and each.without is not None and plan.times is not None:
            statement = plan.policy.rewrites[each.statement]
            span, cuts = statement.span, isinstance(statement, Chunk)
            waits = (each.exposed_seconds or 0.0) > _NOTICED * each.under.step
            if cuts and each.peak_bytes < 0 and not waits:
                continue
            times = (each.without, each.under), (each.under, each.without)
            before, after = (beside(one.step, other.step, "seconds") for one, other in times)
            message = f"`{span.one_line}` slows the step on {plan.times.device.name}, from {before} to {after}"
            before, after = (format_quantity(one.exposed, "seconds") for one, _ in times)
            message += (
                f": {after} of it waits for collectives, without the line {before}"
                if waits or not cuts
                else ", and does not lower the peak"
            )
            help = "leave it out if its collectives would move from a fast network to a slow one"
            done = plan.edits.of(each.statement).done
            details = first_lines(_edited_groups(done, plan.before), _MOST_LINES)
            if cuts:
                help = "cut into fewer slices" if waits else "remove the line"
                details = tuple(edit.note for edit in done if edit.note)
            yield diagnose(SLOWER, message, span, help=help, details=details, fixes=[removed(span)])


def _edited_groups(done: tuple[Edit, ...], before: Facts) -> list[str]:
    """``75 over 64 ranks, in place of 8 and 8``."""
    found: Counter[str] = Counter()
    for edit in done:
        named = (before.group_names[before.index[name]] for name in edit.collectives if name in before.index)
        old = [f"{before.groups[name].size:,}" for name in named if name in before.groups]
        new = [f"{len(group.ranks):,}" for group in edit.groups]
        found[f"over {joined(new)} ranks, in place of {joined(old)}" if new else f"in place of {joined(old)}"] += 1
    return [f"{count:,} {how}" for how, count in found.items()]


@frozen(slots=False)
class PolicyIndex:
    """Looks up the lines of a policy by the span of a statement."""

    policy: Policy

    def number(self, statement: Statement) -> int | None:
        """The number of a rule among the rules, of an expectation or rewrite among theirs; by its place in the text."""
        return self._numbers.get((statement.span.source.name, statement.span.start))

    @cached_property
    def _numbers(self) -> Mapping[tuple[str, int], int]:
        policy = self.policy
        return {
            (each.span.source.name, each.span.start): number
            for statements in (policy.rules, policy.expectations, policy.rewrites)
            for number, each in enumerate(statements)
        }

    @cached_property
    def named_by_rules(self) -> frozenset[str]:
        """The names whose nodes rules and expectations are about, and not scheduling lines alone."""
        return names_in(self.policy, (*self.policy.rules, *self.policy.expectations))

    @cached_property
    def shared_lines(self) -> frozenset[str]:
        """The lines, ``file:line``, in which several rules begin."""
        counts = Counter(rule.source for rule in self.policy.rules)
        return frozenset(source for source, count in counts.items() if count > 1)


def rules_on(plan: Plan, row: int, *, reasons: bool = True) -> tuple[LineStanding, ...]:
    """Every rule of the policy, in order, and what it does to a node. Without ``reasons``, which may each take a pass
    over the graph, no reason is given for a rule that does not match.

    A rule matches a node if it matches any node of its group: a ``getitem`` and the operator that it reads share a
    decision. Raises ``ValueError`` for a node that no rule can range over: an input, a backward node.
    """
    decision = plan.decisions[row]
    if decision is None:
        raise ValueError(f"no rule ranges over {plan.facts.names[row]}: it is not a forward call")
    owner = plan.facts.owners[row]
    selections = selections_for(plan.policy, plan.facts, times=plan.times) if reasons else None
    found: list[LineStanding] = []
    for index, outcome in enumerate(plan.rules):
        rule, at = outcome.rule, bisect_left(outcome.matched, owner)  # in graph order
        standing, why = "decided", ""
        if outcome.matched[at : at + 1] != (owner,):
            standing, why = "no match", why_not(rule.selector, owner, selections) if selections else ""
        elif decision.rule != index and decision.why is Why.ALWAYS:
            standing = "always saved"
        elif decision.rule is None:
            standing = "kept by the user"
        elif decision.rule != index:
            by = plan.rules[decision.rule].rule
            standing, why = "overridden", f"by {by.source}: {by.text}"
        found.append(LineStanding(rule.source, rule.text, standing, why))
    return tuple(found)
