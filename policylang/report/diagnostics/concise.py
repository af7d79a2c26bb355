"""Diagnostics as text, one line each."""

from __future__ import annotations

from collections.abc import Iterable

from policylang.language.diagnostics import Diagnostic, Span
from policylang.report.diagnostics.text import plain


def render_concise(diagnostics: Iterable[Diagnostic]) -> str:
    """One line each: ``llama3.apl:9:6: error[APL101]: there is no operator, group or name `mn```."""
    return "\n".join(
        f"{_place(each.span)}{each.severity.value}[{each.code}]: {plain(each.message)}" for each in diagnostics
    )


def _place(span: Span | None) -> str:
    return "" if span is None else f"{plain(span.source.name)}:{span.line}:{span.column}: "
