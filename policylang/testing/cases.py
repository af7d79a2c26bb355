"""Runs one policy of a test file: loads it, plans it on its graph, compares the plan with its claims."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

from attrs import define, frozen

from policylang.api.load import operators_in
from policylang.api.planned_graphs import findings
from policylang.graph.facts import Facts
from policylang.language.diagnostics import Diagnostic, Severity, Source, diagnose, is_error
from policylang.language.loader import load_source
from policylang.language.operators import OperatorTable
from policylang.language.parser import parse_file
from policylang.language.syntax import Bucket, Include, Let, Policy, Rule, Scheduling, Statement
from policylang.language.wording import counted
from policylang.planning.capabilities import capabilities_for
from policylang.planning.graph_edit import Edit, Refusal
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import OrderPlan, Plan
from policylang.planning.planner import plan
from policylang.planning.selection.selectors import Selections, selections_for
from policylang.testing.claims import OF_DIAGNOSTICS, OF_POLICY, Claim, read_claims
from policylang.testing.fences import Fence, lifted, lowered_diagnostic

OTHERWISE, NOT_FOUND, NO_GRAPH = "APL510", "APL511", "APL513"
_UNUSED = "APL110"
_FIRST_ON_A_GRAPH = "APL3"
_MOST_NAMES = 8


@frozen
class CaseResult:
    """What came of one policy. ``diagnostics`` is empty if all is as it claims."""

    claims: int
    diagnostics: tuple[Diagnostic, ...]
    plan: Plan | None


def run_case(
    fence: Fence, file: Path, facts: Facts | None, *, planned: bool, allowed: Sequence[str] = ()
) -> CaseResult:
    """Test the policy of an ``apl`` block. ``planned`` says that it has a graph; without ``facts``, that the graph
    could not be read, and all that takes one is left out. Diagnostics of ``allowed`` codes need no claim."""
    source = lifted(fence)
    claims, problems = read_claims(source)
    # By the manifest and the graph alone: a test says the same whether torch is loaded or not.
    operators = OperatorTable.bundled(met=() if facts is None else operators_in(facts))
    loaded = load_source(source, file, operators=operators)
    made = None if facts is None or loaded.policy is None else plan(loaded.policy, facts, capabilities_for(facts.kind))
    found = (*loaded.diagnostics, *(() if made is None else findings(made)))
    case = _Case(source, claims, made, planned, planned and facts is None, frozenset(allowed))
    diagnostics = [*problems, *case.compare(found)]
    return CaseResult(len(claims), tuple(lowered_diagnostic(each, fence, source) for each in diagnostics), made)


@define(eq=False, slots=False)
class _Case:
    source: Source
    claims: Sequence[Claim]
    plan: Plan | None
    planned: bool
    graph_is_broken: bool
    allowed: frozenset[str]

    @cached_property
    def statements(self) -> tuple[Statement, ...]:
        return parse_file(self.source)[0].statements

    @cached_property
    def selections(self) -> Selections:
        assert self.plan is not None
        return selections_for(self.plan.policy, self.plan.facts, times=self.plan.times)

    def compare(self, found: Sequence[Diagnostic]) -> Iterable[Diagnostic]:
        """All that is not as it is claimed. Of a policy or graph that cannot be read, only why not."""
        unclaimed = list(self._unclaimed(found))
        yield from unclaimed
        unplanned = self.planned and self.plan is None and (self.graph_is_broken or any(map(is_error, unclaimed)))
        for claim in self.claims:
            if claim.word in OF_DIAGNOSTICS:
                yield from self._missing(claim, found, unplanned)
            elif self.plan is not None:
                yield from self._nodes(claim, self.plan)
            elif not self.planned:
                help = "name one behind the fence, `apl graph=NAME`, or put a `graph` block above"
                yield diagnose(NO_GRAPH, f"`{claim.word}:` needs a graph, and there is none", claim.span, help=help)
            elif not unplanned:
                yield diagnose(OTHERWISE, "a policy with errors matches nothing", claim.span)

    def _unclaimed(self, found: Iterable[Diagnostic]) -> Iterable[Diagnostic]:
        """Errors and warnings that the policy does not claim to get."""
        for each in found:
            if each.severity is Severity.NOTE or each.code in self.allowed:
                continue
            if each.code == _UNUSED and self._is_looked_at(each):
                continue
            if not any(each.code in claim.values and self._is_about(claim, each) for claim in self._claimed(each)):
                yield each

    def _claimed(self, diagnostic: Diagnostic) -> Iterable[Claim]:
        return (claim for claim in self.claims if claim.word == diagnostic.severity.value)

    def _is_about(self, claim: Claim, diagnostic: Diagnostic) -> bool:
        if claim.lines is None or diagnostic.span is None:
            return claim.lines is None
        if diagnostic.span.source != self.source:
            return self._includes(claim.lines)
        return claim.lines[0] <= diagnostic.span.line <= claim.lines[1]

    def _includes(self, lines: tuple[int, int]) -> bool:
        return any(isinstance(each, Include) and lines[0] <= each.span.line <= lines[1] for each in self.statements)

    def _is_looked_at(self, unused: Diagnostic) -> bool:
        """Whether an unused name is there to be claimed something of."""
        return any(claim.word == "matches" and self._is_about(claim, unused) for claim in self.claims)

    def _missing(self, claim: Claim, found: Sequence[Diagnostic], unplanned: bool) -> Iterable[Diagnostic]:
        there = [each for each in found if self._is_about(claim, each)]
        for code in claim.values:
            if unplanned and code >= _FIRST_ON_A_GRAPH:
                continue
            if not any(each.code == code and each.severity.value == claim.word for each in there):
                said = sorted({f"{each.severity.value} {each.code}" for each in there})
                help = f"found: {', '.join(said)}" if said else "nothing was found here"
                yield diagnose(NOT_FOUND, f"there is no {claim.word} {code} here", claim.span, help=help)

    def _nodes(self, claim: Claim, made: Plan) -> Iterable[Diagnostic]:
        names = self._names(claim, made)
        if names is None:
            about, help = _ABOUT.get(
                claim.word, ("rule", "it stands behind a rule or, with `matches:`, behind a `let`")
            )
            yield diagnose(OTHERWISE, f"`{claim.word}:` is about no {about}", claim.span, help=help)
            return
        if claim.count is not None:
            if claim.count != len(names):
                found = (f"found: {_listed(names)}",) if names else ()
                message = f"it {_SAYS[claim.word]} {counted(len(names), 'node')}, not {claim.count}"
                yield diagnose(OTHERWISE, message, claim.span, details=found)
            return
        there, said = set(names), set(claim.values)
        if there != said:
            missing = [name for name in claim.values if name not in there]
            beyond = [name for name in names if name not in said]
            message = f"it {_SAYS[claim.word]} {_listed(names)}"
            known = made.facts.index if made.order is None else {**made.facts.index, **made.order.facts.index}
            unknown = [name for name in missing if name not in known]
            evidence = {"not among them:": missing, "not expected:": beyond, "the graph has no node": unknown}
            details = tuple(f"{what} {_listed(which)}" for what, which in evidence.items() if which)
            yield diagnose(OTHERWISE, message, claim.span, details=details)

    def _names(self, claim: Claim, made: Plan) -> Sequence[str] | None:
        """The nodes that a claim is about, in graph order; None where there is nothing that it could be about."""
        statement = self._statement(claim)
        if isinstance(statement, Bucket | Scheduling) and claim.word not in OF_POLICY:
            return None if made.order is None else _ordered(statement, claim.word, made.policy, made.order)
        rows = self._rows(claim, made)
        return None if rows is None else [made.facts.names[row] for row in rows]

    def _rows(self, claim: Claim, made: Plan) -> Sequence[int] | None:
        """The rows that a claim is about: forward nodes, in graph order."""
        if claim.word in OF_POLICY:
            outcome = saved_and_recomputed(made)
            return outcome.saved if claim.word == "saved" else outcome.recomputed
        statement = self._statement(claim)
        if claim.word == "moves":
            return None
        if isinstance(statement, Let) and claim.word == "matches":
            return self.selections.rows(made.policy.lets[statement.name].selector)
        for account in made.rules:
            if isinstance(statement, Rule) and account.rule.span == statement.span:
                return self.selections.rows(account.rule.selector) if claim.word == "matches" else account.decided
        return None

    def _statement(self, claim: Claim) -> Rule | Let | Bucket | Scheduling | None:
        """The last rule, scheduling line or ``let`` on the lines that a claim is about."""
        first, last = claim.lines or (0, -1)
        kinds = Rule | Let | Bucket | Scheduling
        here = [each for each in self.statements if isinstance(each, kinds) and first <= each.span.line <= last]
        return here[-1] if here else None


def _ordered(statement: Bucket | Scheduling, word: str, policy: Policy, order: OrderPlan) -> Sequence[str] | None:
    """What a scheduling line picks, and what of it it moves: of a bucket the collectives that become one with others,
    with `matches:` those as well that were to."""
    if word == "decides":
        return None
    if isinstance(statement, Bucket):
        number = next(at for at, each in enumerate(policy.rewrites) if each.span == statement.span)
        left: Sequence[Refusal] = order.edits.refused if word == "matches" else ()
        found: list[Edit | Refusal] = [*order.edits.done, *left]
        return [name for each in found if each.statement == number for name in each.collectives]
    outcomes = (each for each in order.outcomes if each.statement.span == statement.span)
    return next((each.matched if word == "matches" else each.moved for each in outcomes), None)


_ABOUT = {
    "moves": ("scheduling line", "it stands behind `bucket`, `prefetch`, `delay` or `overlap`"),
}
_SAYS = {
    "matches": "matches",
    "decides": "decides",
    "moves": "moves",
    "saved": "saves",
    "recomputed": "recomputes",
}


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    shown = ", ".join(f"`{name}`" for name in names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"
