"""Whether what an earlier partition saved can be told in this graph, and is saved, where a policy asks for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Is, Policy, Reference, Selector, Where
from policylang.language.walk import predicates, selector_of, walk
from policylang.planning import refusals
from policylang.planning.decision import Decision, Why
from policylang.planning.liveness import Needs
from policylang.planning.plan import RuleOutcome

_ASKED = "recorded saved"


def records_lost(policy: Policy, facts: Facts) -> list[Diagnostic]:
    """An error for a policy that reads records of which some are lost: what is left would pass for the whole."""
    if not facts.lost_records:
        return []
    asking = _asking_lets(policy)
    for statement in (*policy.rules, *policy.expectations):
        selector = selector_of(statement)
        if selector is not None and _asks(selector, asking):
            return [refusals.records_lost(selector.span, facts.lost_records)]
    return []


def records_outranked(
    policy: Policy, facts: Facts, rules: Sequence[RuleOutcome], decisions: Sequence[Decision | None], needs: Needs
) -> list[Diagnostic]:
    """An error for a rule that is to keep what an earlier partition saved, where tags of the user's ``checkpoint``
    have some of it recomputed.

    The tags that the first compilation obeyed travel to the second one with the nodes, so this is no conflict of two
    wishes: what was recorded has the user's own word in it already.
    """
    recomputed = frozenset(facts.owners[row] for row in needs.recomputed)
    asking = _asking_lets(policy)
    found = []
    for outcome in rules:
        keeps = outcome.rule.action.saves or outcome.rule.action.offloads
        if not keeps or not _asks(outcome.rule.selector, asking):
            continue
        lost = [row for row in outcome.matched if row in recomputed and _is_users(decisions[row])]
        if lost:
            found.append(refusals.records_outranked(outcome, lost, facts))
    return found


def _is_users(decision: Decision | None) -> bool:
    return decision is not None and decision.why is Why.USER


def _asking_lets(policy: Policy) -> set[str]:
    asking: set[str] = set()
    for let in policy.lets.values():  # each refers to earlier ones only
        if _asks(let.selector, asking):
            asking.add(let.name)
    return asking


def _asks(selector: Selector, lets: Collection[str]) -> bool:
    return any(
        part.name in lets
        if isinstance(part, Reference)
        else isinstance(part, Where) and any(_is_asked(test) for test in predicates(part.predicate))
        for part in walk(selector)
    )


def _is_asked(test: object) -> bool:
    return isinstance(test, Is) and test.name == _ASKED
