"""Diagnostics as the protocol has them.

What lies in an included file stands at the ``include`` that brings it, with the place itself as related information. It
is not published under that file's own address: the same lines may be right in another policy, and an open file says
itself what is wrong with it.
"""

from __future__ import annotations

from attrs import frozen
from lsprotocol import types

from policylang.editor.locations import location
from policylang.editor.state import State
from policylang.language.diagnostics import Diagnostic, Related, Severity, Span
from policylang.language.resources import codes_folder

_SEVERITIES = {
    Severity.ERROR: types.DiagnosticSeverity.Error,
    Severity.WARNING: types.DiagnosticSeverity.Warning,
    Severity.NOTE: types.DiagnosticSeverity.Information,
}
_UNNECESSARY = frozenset(("APL110", "APL303", "APL307", "APL309"))
"""Of a name that nothing uses, and of rules that decide nothing, or nothing that the backward reads."""


@frozen
class Shown:
    """What a client can show of a diagnostic."""

    related: bool = True
    links: bool = True
    tags: bool = True


def published(state: State, shown: Shown | None = None) -> list[types.Diagnostic]:
    """The diagnostics of a document, in the order of ``policylang check``."""
    return [_published(state, each, shown or Shown()) for each in state.diagnostics]


def place_in_document(state: State, found: Diagnostic) -> Span | None:
    """Where a diagnostic stands in its document: itself, or the include that brings its line; None for neither."""
    for span in (found.span, *(each.span for each in found.related)):
        if span is not None and span.source == state.document.source:
            return span
    return None if found.span is None else state.text.expansion.brought.get(found.span.source.name)


def _published(state: State, found: Diagnostic, shown: Shown) -> types.Diagnostic:
    positions, place = state.document.positions, place_in_document(state, found)
    elsewhere = () if found.span is None or place is found.span else (Related(found.message, found.span),)
    lines = [found.message, *found.details]
    related: list[types.DiagnosticRelatedInformation] = []
    for each in (*elsewhere, *found.related):
        where = None if each.span is None else location(state, each.span)
        if where is not None and shown.related:
            related.append(types.DiagnosticRelatedInformation(where, each.message))
        elif each.span is None:
            lines.append(f"note: {each.message}")
        else:
            lines.append(f"note: {each.message} ({each.span.location})")
    if elsewhere:
        lines[0] = f"{elsewhere[0].span.location if elsewhere[0].span else ''}: {found.message}"
    if found.help:
        lines.append(f"help: {found.help}")
    page = codes_folder() / f"{found.code}.md"
    return types.Diagnostic(
        range=positions.between(0, 0) if place is None else positions.range(place),
        message="\n".join(lines),
        severity=_SEVERITIES[found.severity],
        code=found.code,
        code_description=types.CodeDescription(page.as_uri()) if shown.links else None,
        source="policylang",
        tags=[types.DiagnosticTag.Unnecessary] if shown.tags and found.code in _UNNECESSARY else None,
        related_information=related or None,
    )
