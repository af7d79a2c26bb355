"""Which statement of a policy stands at which place: looked up, so that a policy of many lines stays quick to show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property

from attrs import frozen

from policylang.language.diagnostics import Span
from policylang.language.syntax import Policy
from policylang.language.walk import names_in

Beginning = tuple[str, int]
"""A file by its name, and where a statement begins in it."""


def beginning_of(span: Span) -> Beginning:
    return span.source.name, span.start


@frozen(slots=False)
class PolicyIndex:
    """Of one policy: by place, the numbers of its rules, expectations and rewrites."""

    policy: Policy

    @cached_property
    def rules(self) -> Mapping[Beginning, int]:
        return _numbers(each.span for each in self.policy.rules)

    @cached_property
    def expectations(self) -> Mapping[Beginning, int]:
        return _numbers(each.span for each in self.policy.expectations)

    @cached_property
    def rewrites(self) -> Mapping[Beginning, int]:
        return _numbers(each.span for each in self.policy.rewrites)

    @cached_property
    def named_by_rules(self) -> frozenset[str]:
        """The names whose nodes rules and expectations are about, and not scheduling lines alone."""
        return names_in(self.policy, (*self.policy.rules, *self.policy.expectations))

    @cached_property
    def shared_lines(self) -> frozenset[str]:
        """The lines, ``file:line``, in which several rules begin."""
        counts = Counter(rule.source for rule in self.policy.rules)
        return frozenset(source for source, count in counts.items() if count > 1)


def _numbers(spans: Iterable[Span]) -> dict[Beginning, int]:
    return {beginning_of(span): number for number, span in enumerate(spans)}
