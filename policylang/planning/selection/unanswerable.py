"""Questions that the facts of an older snapshot cannot answer: refused by name, since no answer is not a no."""

from __future__ import annotations

from collections.abc import Iterator

from policylang.graph.facts import Facts
from policylang.language.codes import diagnose
from policylang.language.diagnostics import Diagnostic
from policylang.language.formatting.unparse_predicates import format_predicate
from policylang.language.syntax import Annotated, Policy, Predicate
from policylang.language.walk import tests_of

OLDER = "APL358"

_COLUMNS: dict[type, str] = {Annotated: "annotations"}
"""By test, the column that answers it, of those that came after the first snapshots."""


def unanswerable(policy: Policy, facts: Facts) -> Iterator[Diagnostic]:
    """An error for each test that asks for a column which the facts lack."""
    missing = {test: column for test, column in _COLUMNS.items() if len(getattr(facts, column)) != len(facts)}
    if not missing:
        return
    asked: dict[Predicate, None] = {}
    for statement in (*policy.rules, *policy.expectations):
        asked.update((test, None) for test in tests_of(statement, policy) if type(test) in missing)
    for test in asked:
        yield diagnose(
            OLDER,
            f"`{format_predicate(test)}` has no answer: the snapshot is older than that, and does not say the "
            f"{missing[type(test)]} of its nodes",
            test.span,
            help="write the snapshot again with this policylang",
        )
