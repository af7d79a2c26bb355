"""What is wrong with single statements on a graph: rules that decide nothing, expectations that do not hold, blocks
that are not there. Each error says what it comes from where that is known, so that one cause can be one error."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from attrs import evolve

from policylang.graph.facts import InputKind
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Expectation, Policy, Rule
from policylang.operators.names import is_all_gather
from policylang.planning import refusals
from policylang.planning.block_graph import AroundBlocks
from policylang.planning.decisions.contracts import origins_asked
from policylang.planning.plan import RuleOutcome
from policylang.planning.selection.empty_shares import empty_shares
from policylang.planning.selection.one_block import AsOneBlock, speaks_of_blocks
from policylang.planning.selection.selectors import Selections
from policylang.planning.time_errors import NO_DEVICE, speaks_of_time


class StatementErrors:
    """Those of one policy on one graph. ``with_shares``: whether the graph has all blocks that a share is one of."""

    def __init__(self, policy: Policy, selections: Selections, *, with_shares: bool) -> None:
        self._policy = policy
        self._selections = selections
        self._as_one = AsOneBlock(policy, selections)
        self._shares = tuple(empty_shares(policy, selections)) if with_shares else ()
        self._of_no_share = {each.span for each in self._shares}

    def no_blocks(self, rules: Collection[RuleOutcome]) -> Iterator[Diagnostic]:
        """An error where the policy names blocks that the graph has not, or speaks of blocks and the graph has none."""
        policy, selections = self._policy, self._selections
        if selections.blocks.names:
            return
        if policy.blocks is not None:
            found = refusals.no_such_blocks(policy.blocks, selections.facts)
            yield evolve(found, include=policy.included_by(policy.blocks.span))
            return
        wanting = (each.rule for each in rules if not each.matched and not each.rule.optional)
        first = next((rule for rule in wanting if speaks_of_blocks(rule, policy)), None)
        if first is not None:
            yield refusals.no_blocks(first, selections.facts)

    def shares(self) -> Iterator[Diagnostic]:
        """Shares of the blocks that come to none."""
        for each in self._shares:
            yield each if self._selections.blocks.names else evolve(each, cause=refusals.NO_SUCH_BLOCKS)

    def of_rules(
        self, rules: Sequence[RuleOutcome], by_fsdp: Collection[int], around: AroundBlocks
    ) -> Iterator[Diagnostic]:
        """Rules that match nothing, or that decide nothing. ``by_fsdp``: the rules that FSDP answers."""
        gathers = any(map(is_all_gather, self._selections.facts.by_target))
        for index, outcome in enumerate(rules):
            rule = outcome.rule
            if not outcome.matched:
                if not rule.optional and index not in by_fsdp and rule.selector.span not in self._of_no_share:
                    yield self._matches_nothing(rule, around, gathers)
            elif outcome.decided or self._is_amended(outcome):
                continue
            elif outcome.overridden_by:
                yield refusals.overridden(self._policy, outcome, rules)
            elif outcome.kept_by_user:
                yield refusals.kept_by_user(outcome)

    def _is_amended(self, outcome: RuleOutcome) -> bool:
        """Whether rules of another file take over from a rule that is included: a file is included to be amended."""
        own = outcome.rule.span
        takers = (self._policy.rules[index].span.source for index in outcome.overridden_by)
        return self._policy.included_by(own) is not None and any(taker != own.source for taker in takers)

    def of_expectations(self, failures: Mapping[int, Diagnostic]) -> Iterator[Diagnostic]:
        """``failures``: what was found wrong, by the expectation's number."""
        for at, failure in failures.items():
            if not self._is_of_no_share(failure):
                yield self._of_cause(failure, self._policy.expectations[at])

    def of_order(self, found: Iterable[Diagnostic]) -> Iterator[Diagnostic]:
        """``found``: what is wrong with scheduling lines."""
        return (each for each in found if not self._is_of_no_share(each))

    def _is_of_no_share(self, found: Diagnostic) -> bool:
        return found.code == refusals.MATCHES_NOTHING and found.span in self._of_no_share

    def _matches_nothing(self, rule: Rule, around: AroundBlocks, gathers: bool) -> Diagnostic:
        of_weights = not gathers and InputKind.PARAMETER in origins_asked(rule, self._policy)
        found = refusals.matches_nothing(rule, self._selections, of_weights=of_weights)
        if around.outside and self._selections.rows(rule.selector):
            found = refusals.outside_checkpoints(found)
        return self._of_cause(evolve(found, include=self._policy.included_by(rule.span)), rule)

    def _of_cause(self, found: Diagnostic, statement: Rule | Expectation) -> Diagnostic:
        if self._selections.times is None and speaks_of_time(statement, self._policy):
            return evolve(found, cause=NO_DEVICE)
        return evolve(found, cause=refusals.NO_SUCH_BLOCKS) if self._as_one.explains(statement) else found
