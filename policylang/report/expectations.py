"""What came of the expectations of a policy, with the figures found, as text."""

from __future__ import annotations

from collections.abc import Sequence

from policylang.language.wording import file_name
from policylang.planning.plan import ExpectationOutcome
from policylang.report.width import table

_SAID = {"held": "holds", "failed": "does not hold", "deferred": "cannot be told yet"}


def expectation_table(outcomes: Sequence[ExpectationOutcome]) -> str:
    """Every expectation of a plan; empty where there is none."""
    if not outcomes:
        return ""
    rows = [("line", "expectation", "", "found"), *map(_row, outcomes)]
    return table(rows, right=range(0), ends=(0,))


def held_table(outcomes: Sequence[tuple[str, ExpectationOutcome]]) -> str:
    """The expectations that hold, on the graphs that are named; of the others there are diagnostics."""
    held = [(graph, outcome) for graph, outcome in outcomes if outcome.status == "held"]
    if not held:
        return ""
    several = len({graph for graph, _ in outcomes}) > 1
    rows: list[tuple[str, ...]] = [("line", "expectation", "", "found", "on")[: 5 if several else 4]]
    rows += [(*_row(outcome), *([file_name(graph)] if several else ())) for graph, outcome in held]
    return table(rows, right=range(0), ends=(0,))


def compared_table(old: Sequence[ExpectationOutcome], new: Sequence[ExpectationOutcome]) -> str:
    """The expectations of two plans of one graph, those of the same words side by side."""
    rows = compared_rows(old, new)
    return table([("expectation", "before", "after"), *rows], right=range(0)) if rows else ""


def compared_rows(old: Sequence[ExpectationOutcome], new: Sequence[ExpectationOutcome]) -> list[tuple[str, str, str]]:
    """What is expected, and what came of it before and after; empty where a policy does not expect it."""
    before, after = ({each.text: each for each in side} for side in (old, new))
    return [
        (_words(text), _result(before.get(text)), _result(after.get(text))) for text in dict.fromkeys((*before, *after))
    ]


def _row(outcome: ExpectationOutcome) -> tuple[str, ...]:
    return file_name(outcome.source), _words(outcome.text), _SAID[outcome.status], outcome.found


def _result(outcome: ExpectationOutcome | None) -> str:
    return "" if outcome is None else f"{_SAID[outcome.status]}: {outcome.found}"


def _words(text: str) -> str:
    return text.removeprefix("expect ")
