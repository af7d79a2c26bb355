"""The part of a plan's page about its order: the step over time, what each line did, the exposed collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from policylang.report.order.lane_chart import LaneScale, lane_chart, lane_columns
from policylang.report.order.lane_data import DrawnStep, drawn_steps
from policylang.report.order.report_lines import barriers_text


def order_section(found: Communication | None, block_names: Sequence[str]) -> tuple[Markup, dict[str, Any] | None]:
    """The section, and what its script needs; nothing of a plan that has no order to speak of."""
    if found is None:
        return Markup(""), None
    steps = drawn_steps(found, block_names)
    scale = LaneScale.of(steps)
    section = element(
        "section",
        element("h2", "Compute and communication", id="order-title"),
        *_pictures(steps, scale),
        *(each for each in (_totals(found), _lines(found), _exposed(found)) if each),
        aria_labelledby="order-title",
    )
    return section, lane_columns(steps, scale) if steps else None


def _pictures(steps: Sequence[DrawnStep], scale: LaneScale) -> list[Markup]:
    if not steps:
        return []
    hint = element(
        "p",
        "The step over time. A lane for what computes and one for each process group; what is marked on all of them is "
        "time in which nothing computes, and the collectives it waits for are marked where they are awaited. ",
        element("span", "Point at a bar, or walk along a lane with the arrow keys.", class_="scripted"),
        class_="hint",
    )
    legend = element(
        "div",
        *(
            element("span", element("i", class_=f"key {kind}"), words)
            for kind, words in (
                ("compute", "computes"),
                ("sent", "is sent beside it"),
                ("exposed", "is waited for"),
                ("wait", "nothing computes"),
            )
        ),
        element("span", class_="told", role="status"),
        class_="legend",
    )
    choices = [part for at, step in enumerate(steps) for part in _choice(at, step)] if len(steps) > 1 else []
    views = [element("div", lane_chart(step, scale, at), class_=f"view view-{at}") for at, step in enumerate(steps)]
    return [hint, element("div", *choices, *views, id="order", role="group", aria_label="the step over time"), legend]


def _choice(at: int, step: DrawnStep) -> tuple[Markup, Markup]:
    """A radio button before the pictures: it shows one and hides the others, without a script."""
    name = f"order-{at}"
    button = Markup(f'<input type="radio" name="order" id="{name}" value="{at}"{" checked" if not at else ""}>')
    return button, element("label", step.name, for_=name)


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
