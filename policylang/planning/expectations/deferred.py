"""Expectations once more, when PyTorch's partitioner has decided what was left to it."""

from __future__ import annotations

from attrs import evolve

from policylang.graph.chains import Chains
from policylang.language.diagnostics import Diagnostic
from policylang.planning.expectations.check import check_expectations
from policylang.planning.expectations.fates import Fates
from policylang.planning.liveness import Needs, with_cost
from policylang.planning.plan import Plan
from policylang.planning.selection.selectors import Selections, blocks_for


def settle_expectations(plan: Plan, settled: Plan, needs: Needs) -> tuple[Plan, tuple[Diagnostic, ...]]:
    """The plan with its deferred expectations held or failed, and an error for each that failed.

    ``settled`` has the rows of ``plan`` with every decision taken, and ``needs`` is what follows from it. Selectors
    range over the graph as it was planned; what became of a node is looked up where it stands now.
    """
    waiting = [index for index, outcome in enumerate(plan.expectations) if outcome.status == "deferred"]
    if not waiting:
        return plan, ()
    policy, facts = plan.policy, plan.facts
    selections = Selections(facts, policy.lets, blocks_for(policy, facts), Chains(facts))
    outcome = with_cost(needs, settled.facts, plan.block_of, len(plan.block_names))
    fates = Fates(settled.facts, settled.decisions, outcome)
    expectations = [policy.expectations[index] for index in waiting]
    found, failures = check_expectations(expectations, selections, settled.decisions, outcome, fates)
    outcomes = list(plan.expectations)
    for index, settled_outcome in zip(waiting, found, strict=True):
        outcomes[index] = settled_outcome
    return evolve(plan, expectations=tuple(outcomes)), failures
