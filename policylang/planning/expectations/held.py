"""Checks a plan's expectations: each is held, failed with the figure found, or deferred until after partitioning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

from attrs import evolve

from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import COMPARISONS, Expectation, ExpectCount, ExpectFate, ExpectTotal, Scope
from policylang.language.wording import first_lines
from policylang.planning.block_graph import is_about_whole
from policylang.planning.checkpoints import Checkpoints
from policylang.planning.expectations.data_sizes import figure_by_data
from policylang.planning.expectations.fates import Fates, check_fate
from policylang.planning.expectations.simulated import Simulated
from policylang.planning.expectations.totals import Finding, Status, check_total, margin_of, numbers
from policylang.planning.liveness import CostedNeeds
from policylang.planning.plan import ExpectationOutcome
from policylang.planning.refusals import expectation_failed, expects_of_nothing
from policylang.planning.schedule.order_plan import OrderPlan
from policylang.planning.selection.empty_matches import part_counts
from policylang.planning.selection.ordinals import group_keys
from policylang.planning.selection.selectors import Selections
from policylang.planning.value_decision import Decision

_NOTHING = "no node matches"
_BOUNDS: dict[str, Literal["==", ">=", "<="]] = {"exactly": "==", "at least": ">=", "at most": "<="}
_MOST_PLACES = 9


def check_expectations(
    expectations: Sequence[Expectation],
    selections: Selections,
    decisions: Sequence[Decision | None],
    outcome: CostedNeeds,
    fates: Fates | None = None,
    *,
    checkpoints: Checkpoints | None = None,
    order: OrderPlan | None = None,
) -> tuple[tuple[ExpectationOutcome, ...], tuple[Diagnostic, ...]]:
    """The result of each expectation, and an error for each that failed, both in order.

    ``fates`` are those of ``decisions`` unless given. ``checkpoints``: in eager. ``order``: what the scheduling lines
    come to, whose peak and times are the step's.
    """
    fates = fates or Fates(selections.facts, decisions, outcome)
    simulated = Simulated(selections, decisions, outcome, checkpoints=checkpoints, order=order)
    outcomes: list[ExpectationOutcome] = []
    failures: list[Diagnostic] = []
    for expectation in expectations:
        finding = _check(expectation, selections, fates, outcome, simulated)
        text = expectation.span.one_line
        outcomes.append(
            ExpectationOutcome(text, expectation.span.location, finding.status, finding.found, finding.margin)
        )
        if finding.status == "failed":
            if by_data := figure_by_data(expectation, selections.facts, outcome):
                finding = evolve(finding, details=(*finding.details, f"the figure counts {by_data}"))
            failures.append(_failure(expectation, text, finding))
    return tuple(outcomes), tuple(failures)


def _failure(expectation: Expectation, text: str, finding: Finding) -> Diagnostic:
    if finding.found == _NOTHING and not isinstance(expectation, ExpectTotal):
        return expects_of_nothing(text, expectation.selector, finding.details)
    return expectation_failed(expectation, text, finding.found, finding.details)


def _check(
    expectation: Expectation,
    selections: Selections,
    fates: Fates,
    outcome: CostedNeeds,
    simulated: Simulated,
) -> Finding:
    if selections.blocks.alone is not None and is_about_whole(expectation):
        return Finding("deferred", "it is about a whole graph, of which this is one block")
    match expectation:
        case ExpectTotal():
            return check_total(expectation, outcome, selections.blocks, simulated)
        case ExpectCount():
            rows = selections.rows(expectation.selector)
            finding = _check_count(expectation, rows, selections)
            nothing = not rows and finding.status == "failed"
        case ExpectFate():
            rows = selections.rows(expectation.selector)
            finding = check_fate(expectation, rows, fates, selections.facts)
            nothing = not rows and expectation.quantifier == "every"
        case _:
            assert_never(expectation)
    if nothing:
        return Finding("failed", _NOTHING, part_counts(expectation.selector, selections))
    return finding


def _check_count(expectation: ExpectCount, rows: list[int], selections: Selections) -> Finding:
    scope = expectation.scope or Scope.GRAPH
    if scope is Scope.GRAPH:
        status: Status = "held" if _counts(expectation, len(rows)) else "failed"
        return Finding(status, str(len(rows)), margin=_margin(expectation, [len(rows)]))
    # All blocks; of modules and chains, those that hold one at least.
    totals: dict[object, int] = dict.fromkeys(numbers(selections.blocks) if scope is Scope.BLOCK else (), 0)
    if scope is Scope.BLOCK and not totals:
        return Finding("failed", "the graph has no blocks")
    for key in group_keys(scope, rows, selections.facts, selections.blocks, selections.chains):
        if key is not None:
            totals[key] = totals.get(key, 0) + 1
    block_names = selections.blocks.names
    wrong = [(key, count) for key, count in totals.items() if not _counts(expectation, count)]
    if not wrong:
        counts = sorted(set(totals.values()))
        each = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "0"
        return Finding("held", f"{each} in each {scope.value}", margin=_margin(expectation, counts))
    details = [f"{_place(scope, key, block_names)}: {count}" for key, count in wrong]
    key, count = wrong[0]
    place = f"block {key}" if scope is Scope.BLOCK else _place(scope, key, block_names)
    margin = _margin(expectation, [count])
    return Finding("failed", f"{count} in {place}", first_lines(details, _MOST_PLACES), margin)


def _margin(expectation: ExpectCount, counts: Sequence[int]) -> float:
    """Of the worst of several."""
    return min((margin_of(_BOUNDS[expectation.bound], count, expectation.n) for count in counts), default=0.0)


def _place(scope: Scope, key: object, block_names: Sequence[str]) -> str:
    if scope is Scope.BLOCK and isinstance(key, int):
        return f"block {key}, {block_names[key]}"
    if scope is Scope.CHAIN:
        return f"the chain from `{key}`"
    return str(key) or "the root module"


def _counts(expectation: ExpectCount, count: int) -> bool:
    return COMPARISONS[_BOUNDS[expectation.bound]](count, expectation.n)
