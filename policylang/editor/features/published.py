"""Diagnostics as the protocol has them."""

from __future__ import annotations

from lsprotocol import types

from policylang.editor.state import State
from policylang.language.diagnostics import Diagnostic, Severity

_SEVERITIES = {
    Severity.ERROR: types.DiagnosticSeverity.Error,
    Severity.WARNING: types.DiagnosticSeverity.Warning,
    Severity.NOTE: types.DiagnosticSeverity.Information,
}


def published(state: State) -> list[types.Diagnostic]:
    """The diagnostics of a document, in the order of ``policylang check``."""
    return [_published(state, each) for each in state.diagnostics]


def _published(state: State, found: Diagnostic) -> types.Diagnostic:
    positions, span = state.document.positions, found.span
    here = span is not None and span.source == state.document.source
    where = positions.range(span) if span is not None and here else positions.between(0, 0)
    lines = [found.message, *found.details, *([f"help: {found.help}"] if found.help else [])]
    return types.Diagnostic(
        range=where,
        message="\n".join(lines),
        severity=_SEVERITIES[found.severity],
        code=found.code,
        source="policylang",
    )
