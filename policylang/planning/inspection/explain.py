"""Which rules of a policy match one node, and which one decides."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Literal

from attrs import frozen

from policylang.language.syntax import Policy, Rule, Statement
from policylang.language.walk import names_in
from policylang.planning.plan import Plan
from policylang.planning.selection.no_match import why_not
from policylang.planning.selection.selectors import selections_for
from policylang.planning.value_outcome import Why


@frozen(slots=False)
class PolicyIndex:
    """Looks up the lines of a policy by the span of a statement."""

    policy: Policy

    def number(self, statement: Statement) -> int | None:
        """The number of a rule among the rules, of an expectation or rewrite among theirs; by its place in the text."""
        return self._numbers.get((statement.span.source.name, statement.span.start))

    @cached_property
    def _numbers(self) -> Mapping[tuple[str, int], int]:
        policy = self.policy
        return {
            (each.span.source.name, each.span.start): number
            for statements in (policy.rules, policy.expectations, policy.rewrites)
            for number, each in enumerate(statements)
        }

    @cached_property
    def named_by_rules(self) -> frozenset[str]:
        """The names whose nodes rules and expectations are about, and not scheduling lines alone."""
        return names_in(self.policy, (*self.policy.rules, *self.policy.expectations))

    @cached_property
    def shared_lines(self) -> frozenset[str]:
        """The lines, ``file:line``, in which several rules begin."""
        counts = Counter(rule.source for rule in self.policy.rules)
        return frozenset(source for source, count in counts.items() if count > 1)


Standing = Literal["no match", "decided", "overridden", "kept by the user", "always saved"]


@frozen
class RuleOnNode:
    """One rule and one node. ``by`` is the rule that took the node over, where one did."""

    rule: Rule
    standing: Standing
    by: Rule | None = None
    why: str = ""
    """The part of a selector that does not match the node."""


def rules_on(plan: Plan, row: int, *, reasons: bool = True) -> tuple[RuleOnNode, ...]:
    """Every rule of the policy, in order, and what it does to a node. Without ``reasons``, which may each take a pass
    over the graph, no reason is given for a rule that does not match.

    A rule matches a node if it matches any node of its group: a ``getitem`` and the operator that it reads share a
    decision. Raises ``ValueError`` for a node that no rule can range over: an input, a backward node.
    """
    decision = plan.decisions[row]
    if decision is None:
        raise ValueError(f"no rule ranges over {plan.facts.names[row]}: it is not a forward call")
    owner = plan.facts.owners[row]
    selections = selections_for(plan.policy, plan.facts, times=plan.times) if reasons else None
    found: list[RuleOnNode] = []
    for index, outcome in enumerate(plan.rules):
        at = bisect_left(outcome.matched, owner)  # in graph order
        standing: Standing = "overridden"
        by, why = None, ""
        if outcome.matched[at : at + 1] != (owner,):
            standing, why = "no match", why_not(outcome.rule.selector, owner, selections) if selections else ""
        elif decision.rule == index:
            standing = "decided"
        elif decision.why is Why.ALWAYS:
            standing = "always saved"
        elif decision.rule is None:
            standing = "kept by the user"
        else:
            by = plan.rules[decision.rule].rule
        found.append(RuleOnNode(outcome.rule, standing, by, why))
    return tuple(found)
