"""The part of a plan's page about its order: totals, what each line did, the exposed collectives."""

from __future__ import annotations

from policylang.planning.inspection.communication import Communication
from policylang.report.device_times import seconds_text
from policylang.report.markup import Markup, element, joined, rows_table
from policylang.report.order.as_text import (
    bound_text,
    exposed_rows,
    hidden_text,
    line_notes,
    line_rows,
    total_rows,
)
from policylang.report.order.report_lines import barriers_text


def order_section(found: Communication | None) -> Markup:
    """Nothing of a plan without collectives that it orders or times."""
    if found is None:
        return Markup("")
    return element(
        "section",
        element("h2", "Compute and communication", id="order-title"),
        *(each for each in (_totals(found), _lines(found), _exposed(found)) if each),
        aria_labelledby="order-title",
    )


def _totals(found: Communication) -> Markup:
    if not found.orders:
        return Markup("")
    head = ("", "as traced", "as planned")
    said = [bound_text(found.bound or 0.0)] if seconds_text(found.bound) else []
    said += [barriers_text(found.barriers)] if found.barriers else []
    notes = (element("p", each, class_="hint") for each in said)
    return joined(rows_table(head, total_rows(found), range(1, 3), "before and after"), *notes)


def _lines(found: Communication) -> Markup:
    if not found.lines:
        return Markup("")
    head, *rows = line_rows(found.lines)
    notes = (element("p", text, class_="hint") for text in line_notes(found.lines))
    return joined(rows_table(head, rows, range(2, len(head)), "what each scheduling line did"), *notes)


def _exposed(found: Communication) -> Markup:
    rows, rest = exposed_rows(found), hidden_text(found)
    numbers = range(rows[0].index("collective")) if rows else range(0)
    shown = rows_table(rows[0], rows[1:], numbers, "the exposed collectives") if rows else ""
    return joined(shown, *([element("p", rest, class_="hint")] if rest else []))
