"""Whether what an earlier partition saved can be told in this graph, where a policy asks for it."""

from __future__ import annotations

from collections.abc import Collection

from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Is, Policy, Reference, Selector, Where
from policylang.language.walk import predicates, selector_of, walk
from policylang.planning import refusals

_ASKED = "recorded saved"


def records_lost(policy: Policy, facts: Facts) -> list[Diagnostic]:
    """An error for a policy that reads records of which some are lost: what is left would pass for the whole."""
    if not facts.lost_records:
        return []
    asking: set[str] = set()
    for let in policy.lets.values():  # each refers to earlier ones only
        if _asks(let.selector, asking):
            asking.add(let.name)
    for statement in (*policy.rules, *policy.expectations):
        selector = selector_of(statement)
        if selector is not None and _asks(selector, asking):
            return [refusals.records_lost(selector.span, facts.lost_records)]
    return []


def _asks(selector: Selector, lets: Collection[str]) -> bool:
    return any(
        part.name in lets
        if isinstance(part, Reference)
        else isinstance(part, Where) and any(_is_asked(test) for test in predicates(part.predicate))
        for part in walk(selector)
    )


def _is_asked(test: object) -> bool:
    return isinstance(test, Is) and test.name == _ASKED
