"""Dead rules: they decide values that the backward does not read, and change nothing.

A tag nobody consumes is the quietest way for a policy to fail. The usual case: a product is to be recomputed, a view of
it is saved by another line, and the saved view keeps all of its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from policylang.graph.facts import Facts, GraphKind, forward_users, mask_of
from policylang.language.diagnostics import Diagnostic
from policylang.planning import refusals
from policylang.planning.liveness import Needs
from policylang.planning.plan import RuleOutcome
from policylang.planning.value_decision import Decision, saves


def without_effect(
    rules: Sequence[RuleOutcome], facts: Facts, decisions: Sequence[Decision | None], needs: Needs
) -> list[Diagnostic]:
    """A warning for each rule that decides values of which the backward needs none. ``optional`` rules may do so."""
    if facts.kind not in (GraphKind.JOINT, GraphKind.FLAT):
        return []
    rows = chain(needs.saved, needs.offloaded, needs.recomputed, needs.undecided, needs.contingent)
    needed = mask_of((facts.owners[row] for row in rows), len(facts))
    return [
        refusals.no_effect(outcome, facts, _keeper(outcome.decided, facts, decisions))
        for outcome in rules
        if outcome.decided and not outcome.rule.optional and not any(needed[owner] for owner in outcome.decided)
    ]


def _keeper(owners: Sequence[int], facts: Facts, decisions: Sequence[Decision | None]) -> tuple[int, int] | None:
    """The first of the values that a saved value reads, and that saved value: it is what the backward reads instead."""
    for owner in owners:
        group = (owner, *facts.followers.get(owner, ()))
        for user in (user for row in group for user in forward_users(facts, row)):
            if user not in group and saves(decisions[user]):
                return owner, user
    return None
