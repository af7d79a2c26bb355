"""Errors of single statements on a graph: rules that decide nothing, expectations that do not hold, blocks
that are not there. Each error says what it comes from where that is known, so that one cause can be one error."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import floor

from attrs import evolve

from policylang.graph.blocks import BlockTable
from policylang.graph.facts import LATER_COLUMNS, Facts, InputKind
from policylang.graph.traced_device import OTHER_KERNELS
from policylang.language.devices.reading import bundled_devices
from policylang.language.diagnostics import Diagnostic, Fix, Span, diagnose, prefixed, put_before, written
from policylang.language.globs import PathGlob
from policylang.language.predicates import format_predicate
from policylang.language.selectors import own_words
from policylang.language.shown import counted, first_lines
from policylang.language.syntax import (
    Expectation,
    ExpectCount,
    ExpectTotal,
    InBlock,
    Is,
    Operator,
    Overlap,
    Policy,
    Rule,
    Scope,
    Statement,
)
from policylang.language.walk import selector_of, selectors_of, tests_of, walk, with_lets
from policylang.operators.names import STAND_INS, is_all_gather
from policylang.planning import refusals
from policylang.planning.checkpoints import AroundBlocks
from policylang.planning.decisions.rule_warnings import origins_asked
from policylang.planning.digest import timed_tests
from policylang.planning.plan import RuleOutcome
from policylang.planning.selection.selectors import Selections, column_of, operator_matcher, selections_for
from policylang.simulation.node_times import NodeTimes, lacking

OLDER, SHARE_OF_NONE, NO_DEVICE = "APL358", "APL369", "APL370"
_MOST_NAMES = 8


def speaks_of_blocks(statement: Rule | Expectation, policy: Policy) -> bool:
    """True if a sentence says `in block`, `per block`, `crosses block`, or uses a name that does."""
    if isinstance(statement, ExpectTotal):
        return statement.per_block
    if isinstance(statement, ExpectCount) and statement.scope is Scope.BLOCK:
        return True
    parts = with_lets(policy, *selectors_of([statement]))
    scoped = any(isinstance(part, InBlock) or getattr(part, "scope", None) is Scope.BLOCK for part in parts)
    return scoped or any(isinstance(test, Is) and test.name == "crosses block" for test in tests_of(policy, statement))


def _name_of_a_block(policy: Policy) -> str:
    """A path that the policy's ``blocks`` would match: of `{layers,h}.*` it is `layers.0`."""
    if policy.blocks is None:
        return "layers.0"
    name = re.sub(r"\{([^,}]*)[^}]*\}", r"\1", policy.blocks.glob.strip("/"))
    name = re.sub(r"\[(.)[^\]]*\]", r"\1", name).replace("*", "0").replace("?", "0")
    return name if PathGlob(policy.blocks.glob).outermost(name) == name else "layers.0"


_SHARE = re.compile(r"\b(?:first|last)\s+\S+(?:\s*%)?\s+of\s+blocks?$")


def empty_shares(policy: Policy, selections: Selections) -> Iterator[Diagnostic]:
    """An error for each statement that speaks of such a share; a line that is ``optional`` may."""
    count = len(selections.blocks.names)
    for statement in policy.statements:
        if not isinstance(statement, Expectation) and statement.optional:
            continue
        for part in with_lets(policy, *selectors_of([statement])):
            if not isinstance(part, InBlock) or (share := part.which.share) is None or floor(share * count):
                continue
            words = own_words(part).partition(" ")[2]
            has = f"has {counted(count, 'block')}, and a share is rounded down" if count else "has no blocks"
            yield diagnose(
                SHARE_OF_NONE,
                f"`{words}` of `{statement.span.one_line}` is no block: this graph {has}",
                span=next(selectors_of([statement])).span,
                help=_help(statement, part, count),
                fixes=_fixes(statement, part, count),
            )
            break


def _fixes(statement: Statement, part: InBlock, count: int) -> list[Fix]:
    share = _SHARE.search(part.span.text)
    found: list[Fix] = []
    if count and share is not None and statement.span.start <= part.span.start < statement.span.end:
        span = Span(part.span.source, part.span.start + share.start(), part.span.end)
        found.extend(written(span, [f"{part.which.kind} block"]))
    return [*found, prefixed(statement.span, "optional")] if not isinstance(statement, Expectation) else found


def _help(statement: Statement, part: InBlock, count: int) -> str | None:
    if count:
        return f"write `{part.which.kind} block` for one of them"
    may_be = not isinstance(statement, Expectation)
    return f"if that is as it should be, write `optional {statement.span.one_line}`" if may_be else None


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


def named_alone(policy: Policy, facts: Facts) -> Iterator[Diagnostic]:
    """A warning for each rule that names what a graph made by a compiler has in place of an eager operator, or that
    operator, and not both, unless another rule with the same action names the other."""
    forms = {compiled: eager for compiled, eager in STAND_INS.items() if compiled in facts.by_target}
    if not forms:
        return
    named = [_names(rule, policy) for rule in policy.rules]
    for compiled, eager in forms.items():
        sides = [(any(each(compiled) for each in names), any(each(eager) for each in names)) for names in named]
        found = {(rule.action, *side) for rule, side in zip(policy.rules, sides, strict=True)}
        for rule, (in_graph, in_eager) in zip(policy.rules, sides, strict=True):
            if in_graph != in_eager and (rule.action, in_eager, in_graph) not in found:
                yield diagnose(
                    OTHER_KERNELS,
                    f"`{rule.text}` names one of two forms: the graph, made under a compiler, has `{compiled}` where "
                    f"the model most likely runs `{eager}` in eager",
                    rule.span,
                    help=f"name both, `{_bare(eager)}, {_bare(compiled)}`, or say `matmul`",
                    fixes=_both(rule, eager, compiled),
                )


def _both(rule: Rule, *forms: str) -> tuple[Fix, ...]:
    """The fixes that name both in place of the one that the rule itself names."""
    named = [part for part in walk(rule.selector) if isinstance(part, Operator)]
    alone = [part.span for part in named if any(map(operator_matcher(part), forms))]
    return written(alone[0], [f"({', '.join(map(_bare, forms))})", "matmul"], is_choice=True) if len(alone) == 1 else ()


def _names(rule: Rule, policy: Policy) -> list[Callable[[str], bool]]:
    return [operator_matcher(part) for part in with_lets(policy, rule.selector) if isinstance(part, Operator)]


def _bare(target: str) -> str:
    return target.rpartition(".")[0]


def times_asked(policy: Policy) -> Iterator[tuple[str, Span]]:
    """The phrases of a policy about time, and where they are: tests of its statements, and expectations about it."""
    for statement in policy.statements:
        if isinstance(statement, Overlap) or (isinstance(statement, ExpectTotal) and statement.of_time):
            yield statement.span.one_line, statement.span
        yield from ((format_predicate(test), test.span) for test in timed_tests(policy, statement))


def speaks_of_time(statement: Rule | Expectation, policy: Policy) -> bool:
    """True if a sentence does, or a name that it uses."""
    timed = isinstance(statement, ExpectTotal) and statement.of_time
    return timed or any(True for _ in timed_tests(policy, statement))


def time_errors(policy: Policy, times: NodeTimes | None, *, asked_for: bool, copies: bool) -> Iterator[Diagnostic]:
    """Why times that are asked for are not known: nobody named a device, or its profile lacks a figure.

    ``asked_for``: whether somebody named the device for this plan, who then wants to see times. ``copies``: whether
    the plan moves values to the host.
    """
    asked = list(dict.fromkeys(times_asked(policy)))
    if times is None:
        if asked:
            yield _no_device(policy, asked)
    elif (asked or asked_for) and (found := lacking(times, asked[0][1] if asked else None, copies=copies)):
        yield found


def _no_device(policy: Policy, asked: list[tuple[str, Span]]) -> Diagnostic:
    (words, span), *others = asked
    own = [each.span for each in policy.statements if policy.included_by(each.span) is None]
    first = min(own, key=lambda each: each.start, default=span)
    more = f", as {counted(len(others), 'other phrase is', 'other phrases are')}" if others else ""
    return diagnose(
        NO_DEVICE,
        f"`{words}` is about time{more}, and no device says how long anything takes",
        span,
        help="write `device h100-sxm` into the policy, or plan it with `--device h100-sxm`, in Python with `device=`; "
        f'bundled are {", ".join(bundled_devices())}, and a profile of your own is `device "cluster.toml"`',
        details=first_lines([f"{where.location}: {phrase}" for phrase, where in others], _MOST_NAMES),
        fixes=[put_before(first, f"device {name}") for name in bundled_devices()],
    )


class StatementErrors:
    """Those of one policy on one graph. ``with_shares``: whether the graph has all blocks that a share is one of."""

    def __init__(self, policy: Policy, selections: Selections, *, with_shares: bool) -> None:
        self._policy = policy
        self._selections = selections
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
        """Shares that are no block."""
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
        """True if rules of another file take over from a rule that is included: a file is included to be amended."""
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
        return evolve(found, cause=refusals.NO_SUCH_BLOCKS) if self._lacks_blocks(statement) else found

    def _lacks_blocks(self, statement: Rule | Expectation) -> bool:
        """True if a statement that fails would not if the graph had blocks."""
        if self._selections.blocks.names or not speaks_of_blocks(statement, self._policy):
            return False
        selector = selector_of(statement)
        return selector is None or bool(self._as_one_block.rows(selector))

    @cached_property
    def _as_one_block(self) -> Selections:
        """The selections on a graph without blocks, as if all of it were one."""
        name, facts = _name_of_a_block(self._policy), self._selections.facts
        inside = [f"{name}.{path}" if path else name for path in facts.modules]
        table = BlockTable(array("i", bytes(4 * len(facts))), (name,), alone=0)
        return selections_for(self._policy, evolve(facts, modules=inside), table, times=self._selections.times)
