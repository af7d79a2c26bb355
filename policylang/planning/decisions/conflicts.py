"""Warns of contradicting rules: one says ``must_…``, and a later one asks for the opposite on some of its nodes.

The last rule that matches a node decides, and most rules are exceptions to earlier ones; that is how a policy is
written. One case is probably not meant: a rule says ``must_…``, and a later rule that does not say ``must_…`` asks for
the opposite on some of its nodes. Where it does on all of them, the rule is overridden (APL303).
"""

from __future__ import annotations

import re

from policylang.language.diagnostics import Diagnostic, Related, diagnose
from policylang.language.syntax import Rule
from policylang.planning.plan import Plan
from policylang.planning.refusals import moved_below

SOFTENED = "APL314"
_MUST = re.compile(r"\bmust_(save|recompute)\b")  # a keyword: no name is spelled so


def conflicts(plan: Plan) -> tuple[Diagnostic, ...]:
    """A warning for each rule that says ``must`` and loses some of its nodes to later ones that do not."""
    found = []
    for outcome in plan.rules:
        if not outcome.decided or not _says_must(outcome.rule):
            continue
        later = ((plan.policy.rules[index], count) for index, count in outcome.overridden_by.items())
        takers = [(rule, count) for rule, count in later if _contradicts(rule, outcome.rule)]
        if takers:
            lost = sum(count for _, count in takers)
            message = f"loses {lost:,} of its {len(outcome.matched):,} nodes to later rules that ask for the opposite"
            found.append(
                diagnose(
                    SOFTENED,
                    f"`{outcome.rule.text}` {message}",
                    outcome.rule.span,
                    help="move it below them, or say there too what must be done",
                    related=tuple(Related(f"`{rule.text}` takes over {count:,}", rule.span) for rule, count in takers),
                    mends=moved_below(outcome, plan.rules),
                )
            )
    return tuple(found)


def _says_must(rule: Rule) -> bool:
    """By its own word: ``save`` means ``must_save`` too, and is what every ordinary exception is written with."""
    return bool(_MUST.search(rule.text))


def _contradicts(later: Rule, earlier: Rule) -> bool:
    opposite = later.action.saves or later.action.offloads if earlier.action.recomputes else not later.action.saves
    return opposite and not _says_must(later)
