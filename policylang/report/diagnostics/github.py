"""Diagnostics as workflow commands of GitHub Actions, which shows them beside their lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policylang.language.diagnostics import Diagnostic, Severity


def render_github(diagnostics: Iterable[Diagnostic]) -> str:
    """Workflow commands of GitHub Actions, one each."""
    return "\n".join(map(_annotation, diagnostics))


def _annotation(diagnostic: Diagnostic) -> str:
    kind = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.NOTE: "notice"}[diagnostic.severity]
    properties: list[tuple[str, object]] = []
    span = diagnostic.span
    if span is not None and not span.source.name.startswith("<"):
        properties += [("file", span.source.name), ("line", span.line), ("endLine", span.end_line)]
        if span.line == span.end_line:  # columns across lines are not shown where they belong
            properties += [("col", span.column), ("endColumn", max(span.end_column, span.column + 1))]
    properties.append(("title", diagnostic.code))
    parts: Sequence[str] = [diagnostic.message, *diagnostic.details]
    message = "\n".join((*parts, f"help: {diagnostic.help}") if diagnostic.help else parts)
    if span is not None and span.source.name.startswith("<"):
        message = f"{span.source.name}:{span.line}: {message}"
    written = ",".join(f"{name}={_escape_property(str(value))}" for name, value in properties)
    return f"::{kind} {written}::{_escape(message)}"


def _escape(text: str) -> str:
    """``##[`` begins a command wherever it is in a line."""
    return text.replace("##", "# #").replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
