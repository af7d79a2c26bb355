"""Diagnostics for people and for machines: text, one line each, JSON, GitHub annotations."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

from attrs import frozen

from policylang.language.diagnostics import Diagnostic, Severity
from policylang.language.source import Span

_WINDOW = 100
"""The columns of a source line that are shown; of a longer one, those around the span."""
_TAB = 4
_JSON_VERSION = 1

_RESET = "\x1b[0m"
_BOLD = "\x1b[1m"
_DIM = "\x1b[34m"
_COLORS = {Severity.ERROR: "\x1b[1;31m", Severity.WARNING: "\x1b[1;33m", Severity.NOTE: "\x1b[1;36m"}


def render_text(diagnostics: Iterable[Diagnostic], *, color: bool = False) -> str:
    """Each diagnostic with its source line and the span underlined, its mend on a line of its own."""
    painter = _Painter(color)
    return "\n\n".join("\n".join(_block(diagnostic, painter)) for diagnostic in diagnostics)


def render_concise(diagnostics: Iterable[Diagnostic]) -> str:
    """One line each: ``llama3.apl:9:6: error[APL101]: there is no operator, group or name `mn```."""
    return "\n".join(
        f"{_place(each.span)}{each.severity.value}[{each.code}]: {_plain(each.message)}" for each in diagnostics
    )


def render_json(diagnostics: Iterable[Diagnostic]) -> str:
    """An object with a format version and the diagnostics; lines and columns count from 1, offsets from 0."""
    found = [
        {
            "code": each.code,
            "severity": each.severity.value,
            "message": each.message,
            "help": each.help,
            "location": _location(each.span),
            "related": [{"message": other.message, "location": _location(other.span)} for other in each.related],
            "details": list(each.details),
        }
        for each in diagnostics
    ]
    return json.dumps({"version": _JSON_VERSION, "diagnostics": found}, indent=2)


def render_github(diagnostics: Iterable[Diagnostic]) -> str:
    """Workflow commands of GitHub Actions, which shows them beside the lines they are about."""
    return "\n".join(map(_annotation, diagnostics))


@frozen
class _Painter:
    color: bool

    def __call__(self, text: str, code: str) -> str:
        return f"{code}{text}{_RESET}" if self.color and text else text


def _block(diagnostic: Diagnostic, paint: _Painter) -> list[str]:
    tint = _COLORS[diagnostic.severity]
    head = paint(f"{diagnostic.severity.value}[{diagnostic.code}]", tint)
    lines = [f"{head}{paint(f': {_plain(diagnostic.message)}', _BOLD)}"]
    margin = ""
    if diagnostic.span is not None:
        margin = " " * len(str(diagnostic.span.line))
        lines.extend(_excerpt(diagnostic.span, tint, paint))
    for detail in diagnostic.details:
        lines.append(f"{margin} {paint('=', _DIM)} {_plain(detail)}")
    for other in diagnostic.related:
        lines.append(f"{margin} {paint('=', _DIM)} note: {_plain(other.message)}")
        if other.span is not None:
            lines.extend(f"{margin}   {line}" for line in _excerpt(other.span, _COLORS[Severity.NOTE], paint))
    if diagnostic.help is not None:
        lines.append(f"{margin} {paint('=', _DIM)} help: {_plain(diagnostic.help)}")
    return lines


def _excerpt(span: Span, tint: str, paint: _Painter) -> list[str]:
    """Where the span is, and its first line with the span underlined; the place alone where there is no such line."""
    number = str(span.line)
    margin = " " * len(number)
    bar = paint("|", _DIM)
    lines = [f"{margin}{paint('-->', _DIM)} {_plain(span.source.name)}:{span.line}:{span.column}"]
    text = span.source.line_text(span.line)
    if not text:
        return lines
    start = min(span.column - 1, len(text))
    end = min(span.end_column - 1, len(text)) if span.end_line == span.line else len(text)
    shown, before, width = _window(text, start, max(end, start))
    underline = " " * before + paint("^" * width, tint)
    lines.append(f"{margin} {bar}")
    lines.append(f"{paint(number, _DIM)} {bar} {shown}".rstrip())
    lines.append(f"{margin} {bar} {underline}")
    return lines


def _window(text: str, start: int, end: int) -> tuple[str, int, int]:
    """The part of a line to show, the columns before the span in it, and the columns of the span (at least one)."""
    low, high = 0, len(text)
    if high > _WINDOW:
        low = max(0, min(start - _WINDOW // 4, high - _WINDOW))
        high = min(high, low + _WINDOW)
    head = "…" if low else ""
    tail = "…" if high < len(text) else ""
    before = _visible(text[low:start])
    inside = _visible(text[start : min(end, high)])
    after = _visible(text[min(end, high) : high])
    return f"{head}{before}{inside}{after}{tail}", len(head) + _columns(before), max(_columns(inside), 1)


def _visible(text: str) -> str:
    """The text with nothing in it that a terminal would act on."""
    return "".join(
        character if character.isprintable() else " " * _TAB if character == "\t" else "�" for character in text
    )


def _plain(text: str) -> str:
    return "".join(character if character.isprintable() or character == "\n" else "�" for character in text)


def _columns(text: str) -> int:
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def _place(span: Span | None) -> str:
    return "" if span is None else f"{_plain(span.source.name)}:{span.line}:{span.column}: "


def _location(span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    return {
        "file": span.source.name,
        "start": {"line": span.line, "column": span.column, "offset": span.start},
        "end": {"line": span.end_line, "column": span.end_column, "offset": span.end},
    }


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
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape(text).replace(":", "%3A").replace(",", "%2C")
