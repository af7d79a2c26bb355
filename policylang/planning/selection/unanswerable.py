"""Predicates that the facts of an older snapshot cannot answer: refused by name."""

from __future__ import annotations

from collections.abc import Iterator

from policylang.graph.facts import LATER_COLUMNS, Facts
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.predicates import format_predicate
from policylang.language.syntax import Policy
from policylang.language.walk import tests_of
from policylang.planning.selection.predicates import column_of

OLDER = "APL358"


def unanswerable(policy: Policy, facts: Facts) -> Iterator[Diagnostic]:
    """An error for each test that asks for a column which the facts lack."""
    missing = {column for column in LATER_COLUMNS if len(getattr(facts, column)) != len(facts)}
    if not missing:
        return
    for test in dict.fromkeys(test for test in tests_of(policy, *policy.statements) if column_of(test) in missing):
        yield diagnose(
            OLDER,
            f"`{format_predicate(test)}` has no answer: the snapshot is older than that, and does not say the "
            f"{column_of(test)} of its nodes",
            test.span,
            help="write the snapshot again with this policylang",
        )
