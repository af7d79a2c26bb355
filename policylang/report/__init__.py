"""Renderers: diagnostics, reports and plans as text, JSON, HTML, SARIF and Chrome traces.

Those of ``str()`` register themselves here.
"""

from __future__ import annotations

from policylang.audit.report import Report, RewriteReport
from policylang.errors import PolicyError
from policylang.language.shown import as_page, as_text
from policylang.planning.plan import Plan
from policylang.report.diagnostics import render_text
from policylang.report.report_text import plan_line, report_text, rewrite_lines

as_text.register(PolicyError, lambda error: render_text(error.diagnostics))
as_text.register(Report, report_text)


def _page(plan: Plan) -> str:
    """The margins of its rules are left out: they take a plan each."""
    from policylang.planning.inspection.breakdown import breakdown
    from policylang.report.plan_page import plan_page

    return plan_page(breakdown(plan), (), f"a {plan.facts.kind.value} graph")


as_page.register(Plan, _page)
as_text.register(Plan, plan_line)
as_text.register(RewriteReport, lambda account: "\n".join(rewrite_lines(account)))
