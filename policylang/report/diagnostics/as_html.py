"""Diagnostics as HTML, for the cell of a notebook: each with its source line and the span underlined."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from policylang.language.diagnostics import CODES, Diagnostic, Severity, Span
from policylang.report.diagnostics.text import plain
from policylang.report.markup import Markup, element, joined

_COLORS = {Severity.ERROR: "#c62828", Severity.WARNING: "#b26a00", Severity.NOTE: "#1565c0"}
_LINE = "margin: 0.2em 0 0.2em 1em; white-space: pre-wrap"
_WINDOW = 400
"""The characters of a source line that are shown on either side of the span's ends."""


def render_html(diagnostics: Iterable[Diagnostic]) -> Markup:
    """One block each. Nothing in it needs a style sheet or a script, and all text is escaped."""
    return joined(*(element("div", *_parts(each), style="margin-bottom: 0.8em") for each in diagnostics))


def _parts(found: Diagnostic) -> Iterator[str]:
    color = _COLORS[found.severity]
    head = f"{found.severity.value}[{found.code}]"
    yield element("b", head, style=f"color: {color}", title=CODES[found.code].title)
    yield f": {plain(found.message)}"
    if found.span is not None:
        yield _excerpt(found.span, color)
    for detail in found.details:
        yield element("div", f"= {plain(detail)}", style=_LINE)
    for other in found.related:
        place = f" ({plain(other.span.location)})" if other.span is not None else ""
        yield element("div", f"= note: {plain(other.message)}{place}", style=_LINE)
        if other.span is not None and not other.brief:
            yield _excerpt(other.span, _COLORS[Severity.NOTE])
    if found.help is not None:
        yield element("div", "= help: ", element("b", plain(found.help)), style=_LINE)


def _excerpt(span: Span, color: str) -> Markup:
    """The place, and its first line where there is one."""
    text = span.source.line_text(span.line)
    start = min(span.column - 1, len(text))
    end = min(span.end_column - 1, len(text)) if span.end_line == span.line else len(text)
    low, high = max(0, start - _WINDOW), min(len(text), end + _WINDOW)
    underlined = element(
        "span", plain(text[start:end]) or " ", style=f"text-decoration: underline wavy {color}; color: {color}"
    )
    line = (
        "…" if low else "",
        plain(text[low:start]),
        underlined,
        plain(text[end:high]),
        "…" if high < len(text) else "",
    )
    return element("pre", f"{span.location}  ", *(line if text else ()), style=f"{_LINE}; font-family: monospace")
