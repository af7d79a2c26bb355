"""Diagnostics as text: each with its source line and the span underlined."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable

from policylang.language.diagnostics import Diagnostic, Severity, Span
from policylang.report.width import columns

_WINDOW = 100
"""The columns of a source line that are shown; of a longer one, those around the span."""
_NARROWEST = 16
_TAB = 4

_RESET = "\x1b[0m"
_BOLD = "\x1b[1m"
_DIM = "\x1b[34m"
_COLORS = {Severity.ERROR: "\x1b[1;31m", Severity.WARNING: "\x1b[1;33m", Severity.NOTE: "\x1b[1;36m"}

Paint = Callable[[str, str], str]


def render_text(diagnostics: Iterable[Diagnostic], *, color: bool = False) -> str:
    """Each diagnostic with its source line and the span underlined, its mend on a line of its own."""

    def paint(text: str, code: str) -> str:
        return f"{code}{text}{_RESET}" if color and text else text

    return "\n\n".join("\n".join(_block(diagnostic, paint)) for diagnostic in diagnostics)


def _block(diagnostic: Diagnostic, paint: Paint) -> list[str]:
    tint = _COLORS[diagnostic.severity]
    head = paint(f"{diagnostic.severity.value}[{diagnostic.code}]", tint)
    lines = [f"{head}{paint(f': {plain(diagnostic.message)}', _BOLD)}"]
    margin = ""
    if diagnostic.span is not None:
        margin = " " * len(str(diagnostic.span.line))
        lines.extend(_excerpt(diagnostic.span, tint, paint))
    for detail in diagnostic.details:
        lines.append(f"{margin} {paint('=', _DIM)} {plain(detail)}")
    for other in diagnostic.related:
        place = f" ({plain(other.span.location)})" if other.brief and other.span is not None else ""
        lines.append(f"{margin} {paint('=', _DIM)} note: {plain(other.message)}{place}")
        if other.span is not None and not other.brief:
            lines.extend(f"{margin}   {line}" for line in _excerpt(other.span, _COLORS[Severity.NOTE], paint))
    if diagnostic.help is not None:
        lines.append(f"{margin} {paint('=', _DIM)} help: {plain(diagnostic.help)}")
    return lines


def _excerpt(span: Span, tint: str, paint: Paint) -> list[str]:
    """Where the span is, and its first line with the span underlined; the place alone where there is no such line."""
    number = str(span.line)
    margin = " " * len(number)
    bar = paint("|", _DIM)
    lines = [f"{margin}{paint('-->', _DIM)} {plain(span.source.name)}:{span.line}:{span.column}"]
    text = span.source.line_text(span.line)
    if not text:
        return lines
    start = min(span.column - 1, len(text))
    end = min(span.end_column - 1, len(text)) if span.end_line == span.line else len(text)
    shown, before, width = _window(text, start, max(end, start), _window_width(len(number)))
    underline = " " * before + paint("^" * width, tint)
    lines.append(f"{margin} {bar}")
    lines.append(f"{paint(number, _DIM)} {bar} {shown}".rstrip())
    lines.append(f"{margin} {bar} {underline}")
    return lines


def _window_width(margin: int) -> int:
    """What is left of a line beside its number, the bar and two marks of omission."""
    most = columns()
    return _WINDOW if most is None else max(_NARROWEST, min(_WINDOW, most - margin - 5))


def _window(text: str, start: int, end: int, window: int) -> tuple[str, int, int]:
    """The part of a line to show, the columns before the span in it, and the columns of the span (at least one)."""
    low, high = 0, len(text)
    if high > window:
        low = max(0, min(start - window // 4, high - window))
        high = min(high, low + window)
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


def plain(text: str) -> str:
    """The text with nothing in it that a terminal would act on, line ends excepted."""
    return "".join(character if character.isprintable() or character == "\n" else "�" for character in text)


def _columns(text: str) -> int:
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)
