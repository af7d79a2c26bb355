"""What a cell with a policy shows: what is wrong, what each rule does on the graph, and what it comes to."""

from __future__ import annotations

from collections.abc import Sequence

from policylang.language.diagnostics import Diagnostic
from policylang.planning.inspection.breakdown import Breakdown, breakdown
from policylang.planning.plan import Plan
from policylang.report.diagnostics import render_text
from policylang.report.diagnostics.as_html import render_html
from policylang.report.notebook import rule_rows, table_html
from policylang.report.plan.as_text import plan_text
from policylang.report.width import table


def cell_html(diagnostics: Sequence[Diagnostic], plans: Sequence[Plan], summary: str) -> str:
    """For a notebook; all text is escaped."""
    shown = [table_html(str(plan), rule_rows(plan), _totals(breakdown(plan))) for plan in plans]
    return "".join([render_html(diagnostics), *shown, table_html(summary, (), "")])


def cell_text(diagnostics: Sequence[Diagnostic], plans: Sequence[Plan], summary: str) -> str:
    """For a terminal."""
    shown = (
        "\n\n".join((str(plan), table(rule_rows(plan), right=range(2, 4)), _totals(breakdown(plan)))) for plan in plans
    )
    return "\n\n".join(filter(None, (render_text(diagnostics), *shown, summary)))


def _totals(found: Breakdown) -> str:
    """Without the heading, which has the policy's name once more."""
    return plan_text(found, (), summary=True).partition("\n\n")[2]
