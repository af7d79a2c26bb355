"""What each line about collectives is worth, others standing: of a ``fuse`` or ``collapse`` line the step with it
less the step without it, of a scheduling line what would be exposed without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from attrs import evolve, frozen

from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, diagnose, removed
from policylang.language.syntax import Bucket, Policy
from policylang.language.wording import figure, first_lines, joined
from policylang.planning.capabilities import Capabilities
from policylang.planning.graph_edit import Edit
from policylang.planning.inspection.communication import Communication, bucket_statements
from policylang.planning.inspection.step_times import peak_of_plan, time_of_plan
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.order.statements import plan_order
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from policylang.simulation.step_time import StepTime, step_time

SLOWER = "APL380"
_NOTICED = 1e-3
"""The share of the step by which it has to be slower."""
_MOST_LINES = 8


def weighed(
    found: Communication,
    plan: Plan,
    capabilities: Capabilities,
    only: int | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Communication:
    """The same with :attr:`LineInOrder.exposed_without` of every line, or of ``only`` one. An order is planned for each
    line; without a device nothing is. ``progress`` is told after each how many of how many are done."""
    if found.planned.lanes is None:
        return found
    policies = list(_without_each(plan.policy))
    asked = range(len(found.lines)) if only is None else [only]
    without: dict[int, float | None] = {}
    for done, at in enumerate(asked, start=1):
        without[at] = _exposed(policies[at], plan, found, capabilities)
        progress(done, len(asked))
    return evolve(
        found, lines=tuple(evolve(line, exposed_without=without.get(at)) for at, line in enumerate(found.lines))
    )


def _without_each(policy: Policy) -> Iterator[Policy]:
    """In the order of :attr:`Communication.lines`."""
    for at in bucket_statements(policy):
        yield evolve(policy, rewrites=policy.rewrites[:at] + policy.rewrites[at + 1 :])
    for at in range(len(policy.scheduling)):
        yield evolve(policy, scheduling=policy.scheduling[:at] + policy.scheduling[at + 1 :])


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
    """Those of the step without the line."""

    @property
    def step_seconds(self) -> float | None:
        return None if self.under is None or self.without is None else self.under.step - self.without.step

    @property
    def exposed_seconds(self) -> float | None:
        return None if self.under is None or self.without is None else self.under.exposed - self.without.exposed

    @property
    def slows(self) -> bool:
        """Whether the step takes longer because of it."""
        return self.under is not None and (self.step_seconds or 0.0) > _NOTICED * self.under.step


def worth_of_edits(plan: Plan, capabilities: Capabilities) -> tuple[EditWorth, ...]:
    """Of every ``fuse`` and ``collapse`` line that rewrites something, in the order of the policy; a ``bucket`` line is
    weighed as a scheduling line. A plan and a simulation for each."""
    policy, device = plan.policy, None if plan.times is None else plan.times.device
    found: list[EditWorth] = []
    for at, statement in enumerate(policy.rewrites):
        done = plan.edits.of(at).done
        if isinstance(statement, Bucket) or not done:
            continue
        rest = evolve(policy, rewrites=policy.rewrites[:at] + policy.rewrites[at + 1 :], expectations=())
        other = make_plan(rest, plan.before, capabilities, device=device)
        saved, peak, under = _cost(plan)
        other_saved, other_peak, without = _cost(other)
        fewer = sum(edit.fewer_collectives for edit in done)
        found.append(EditWorth(at, fewer, saved - other_saved, peak - other_peak, under, without))
    return tuple(found)


def _cost(plan: Plan) -> tuple[int, int, StepTime | None]:
    return saved_and_recomputed(plan).saved_bytes, peak_of_plan(plan).bytes, time_of_plan(plan)


def slowing_edits(plan: Plan, capabilities: Capabilities) -> Iterator[Diagnostic]:
    """A warning for each line that slows the step on the device that times are worked out for; none without one."""
    for each in worth_of_edits(plan, capabilities) if plan.shown_times is not None else ():
        if each.slows and each.under is not None and each.without is not None and plan.times is not None:
            span = plan.policy.rewrites[each.statement].span
            step, exposed = (
                tuple(figure(getattr(times, name), "seconds") for times in (each.without, each.under))
                for name in ("step", "exposed")
            )
            yield diagnose(
                SLOWER,
                f"`{span.one_line}` slows the step on {plan.times.device.name}, from {step[0]} to {step[1]}: "
                f"{exposed[1]} of it waits for collectives, without the line {exposed[0]}",
                span,
                help="leave it out where its collectives would leave a fast network for a slow one",
                details=first_lines(_groups(plan.edits.of(each.statement).done, plan.before), _MOST_LINES),
                mends=[removed(span)],
            )


def _groups(done: tuple[Edit, ...], before: Facts) -> list[str]:
    """``75 over 64 ranks, in place of 8 and 8``."""
    found: Counter[str] = Counter()
    for edit in done:
        named = (before.group_names[before.index[name]] for name in edit.collectives if name in before.index)
        old = [f"{before.groups[name].size:,}" for name in named if name in before.groups]
        new = [f"{len(group.ranks):,}" for group in edit.groups]
        found[f"over {joined(new)} ranks, in place of {joined(old)}" if new else f"in place of {joined(old)}"] += 1
    return [f"{count:,} {how}" for how, count in found.items()]
