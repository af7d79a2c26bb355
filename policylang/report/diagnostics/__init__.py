"""Diagnostics for people and for machines, one form a file."""

from __future__ import annotations

from policylang.report.diagnostics.as_json import render_json
from policylang.report.diagnostics.concise import render_concise
from policylang.report.diagnostics.github import render_github
from policylang.report.diagnostics.sarif import render_sarif
from policylang.report.diagnostics.text import render_text

RENDERERS = {
    "text": render_text,
    "concise": render_concise,
    "json": render_json,
    "github": render_github,
    "sarif": render_sarif,
}
"""By the name of the form, as ``--output-format`` takes it."""

__all__ = ["RENDERERS", "render_concise", "render_github", "render_json", "render_sarif", "render_text"]
