"""Warns of contradicting rules: one says ``must_…``, and a later one asks for the opposite on some of its nodes.

The last rule that matches a node decides, and most rules are exceptions to earlier ones; that is how a policy is
written. One case is probably not meant: a rule says ``must_…``, and a later rule that does not say ``must_…`` asks for
the opposite on some of its nodes. Where it does on all of them, the rule is overridden (APL303).
"""

from __future__ import annotations

import re

from policylang.language.codes import diagnose
from policylang.language.diagnostics import Diagnostic, Related
from policylang.language.syntax import Rule
from policylang.planning.plan import Plan

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
            found.append(_softened(outcome.rule, len(outcome.matched), takers))
    return tuple(found)


def _says_must(rule: Rule) -> bool:
    """By its own word: ``save`` means ``must_save`` too, and is what every ordinary exception is written with."""
    return bool(_MUST.search(rule.text))


def _contradicts(later: Rule, earlier: Rule) -> bool:
    opposite = later.action.saves or later.action.offloads if earlier.action.recomputes else not later.action.saves
    return opposite and not _says_must(later)


def _softened(rule: Rule, matched: int, takers: list[tuple[Rule, int]]) -> Diagnostic:
    lost = sum(count for _, count in takers)
    return diagnose(
        SOFTENED,
        f"`{rule.text}` loses {lost} of its {matched} nodes to later rules that ask for the opposite",
        rule.span,
        help="move it below them, or say there too what must be done",
        related=tuple(Related(f"`{later.text}` takes over {count}", later.span) for later, count in takers),
    )
