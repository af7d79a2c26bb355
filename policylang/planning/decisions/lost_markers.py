"""Errors of a policy that asks for the saved markers of an earlier partition, where some are lost or outranked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Is, Policy, Statement
from policylang.language.walk import selectors_of, tests_of
from policylang.planning import refusals
from policylang.planning.liveness import SavedForBackward
from policylang.planning.plan import RuleOutcome
from policylang.planning.value_outcome import Decision, Why, outcome_of

_ASKED = "recorded saved"


def markers_lost(policy: Policy, facts: Facts) -> list[Diagnostic]:
    """An error for a policy that asks for saved markers some of which are lost: the rest would pass for the whole."""
    if not facts.lost_records:
        return []
    asking = selectors_of(each for each in policy.statements if _asks(each, policy))
    return [refusals.markers_lost(selector.span, facts.lost_records) for selector in islice(asking, 1)]


def markers_outranked(
    policy: Policy,
    facts: Facts,
    rules: Sequence[RuleOutcome],
    decisions: Sequence[Decision | None],
    needs: SavedForBackward,
) -> list[Diagnostic]:
    """An error for a rule that is to keep what an earlier partition saved, where tags of the user's ``checkpoint``
    have some of it recomputed.

    The tags that the first compilation obeyed travel to the second one with the nodes, so this is no conflict of two
    wishes: what was saved has the user's own word in it already.
    """
    recomputed = frozenset(facts.owners[row] for row in needs.recomputed)
    found = []
    for outcome in rules:
        keeps = outcome_of(outcome.rule.action).is_held
        if not keeps or not _asks(outcome.rule, policy):
            continue
        again = [(row, decisions[row]) for row in outcome.matched if row in recomputed]
        lost = [row for row, decision in again if decision is not None and decision.why is Why.USER]
        if lost:
            found.append(refusals.markers_outranked(outcome, lost, facts))
    return found


def _asks(statement: Statement, policy: Policy) -> bool:
    return any(isinstance(test, Is) and test.name == _ASKED for test in tests_of(policy, statement))
