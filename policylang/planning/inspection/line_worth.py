"""What each scheduling line is worth: what would be exposed without it, all others standing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attrs import evolve

from policylang.language.syntax import Policy
from policylang.planning.capabilities import Capabilities
from policylang.planning.inspection.communication import Communication, bucket_statements
from policylang.planning.order.statements import plan_order
from policylang.planning.plan import Plan
from policylang.simulation.step_time import step_time


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
