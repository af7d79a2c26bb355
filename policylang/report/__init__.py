"""Renderers: diagnostics, reports and plans as text, JSON, HTML and SARIF. Those of ``str()`` enter themselves here."""

from __future__ import annotations

from policylang.audit.summary.report import Report, RewriteReport
from policylang.errors import PolicyError
from policylang.language.shown import as_text
from policylang.report.diagnostics import render_text
from policylang.report.report_text import report_text, rewrite_lines

as_text.register(PolicyError, lambda error: render_text(error.diagnostics))
as_text.register(Report, report_text)
as_text.register(RewriteReport, lambda account: "\n".join(rewrite_lines(account)))
