"""Checks deferred expectations again, after PyTorch's partitioner has decided the values that were left to it."""

from __future__ import annotations

from attrs import evolve

from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import ExpectTotal
from policylang.planning.capabilities import JOINT
from policylang.planning.expectations.data_sizes import BY_DATA, by_data_in
from policylang.planning.expectations.fates import Fates
from policylang.planning.expectations.held import check_expectations
from policylang.planning.expectations.uncounted_work import UNCOUNTED, UNTIMED, uncounted_in
from policylang.planning.liveness import Needs, with_cost
from policylang.planning.order.statements import plan_order
from policylang.planning.plan import Plan, schedule_of
from policylang.planning.selection.selectors import selections_for


def check_deferred(plan: Plan, final: Plan, needs: Needs) -> tuple[Plan, tuple[Diagnostic, ...]]:
    """The plan with its deferred expectations held or failed, and an error for each that failed. What no FLOP formula
    counts is warned of again, now that it is known what is recomputed.

    ``final`` has the rows of ``plan`` with every decision taken, and ``needs`` is what follows from it. Selectors
    range over the graph as it was planned; the fate of a node is looked up in the final plan. Scheduling lines are
    planned anew on what is recomputed then, for the peak and the times of the step.
    """
    waiting = [index for index, outcome in enumerate(plan.expectations) if outcome.status == "deferred"]
    if not waiting:
        return plan, ()
    policy, facts = plan.policy, plan.facts
    selections = selections_for(policy, facts, times=plan.times)
    outcome = with_cost(needs, final.facts, plan.block_of, len(plan.block_names))
    fates = Fates(final.facts, final.decisions, outcome)
    expectations = [policy.expectations[index] for index in waiting]
    order = None
    if plan.order is not None and any(isinstance(each, ExpectTotal) for each in expectations):
        device = None if plan.times is None else plan.times.device
        order = plan_order(policy, facts, schedule_of(facts, final.decisions), JOINT, device=device)
    found, failures = check_expectations(expectations, selections, final.decisions, outcome, fates, order=order)
    outcomes = list(plan.expectations)
    for index, checked in zip(waiting, found, strict=True):
        outcomes[index] = checked
    others = tuple(each for each in plan.diagnostics if each.code not in (UNCOUNTED, UNTIMED, BY_DATA))
    uncounted = uncounted_in(policy.expectations, final.facts, needs.recomputed, plan.times)
    by_data = by_data_in(policy.expectations, final.facts, needs)
    return evolve(plan, expectations=tuple(outcomes), diagnostics=(*others, *uncounted, *by_data)), failures
