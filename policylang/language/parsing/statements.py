"""The scanner: where each statement of a file begins and ends.

A newline or ``;`` ends a statement unless inside parentheses; ``#`` starts a comment. One mistake must not hide the
others, so a parenthesis that is never closed does not swallow the rest of the file: it is reported, and line ends
count again. Linear in the length of the text, and bounded.
"""

from __future__ import annotations

import re

from attrs import frozen

from policylang.language.codes import diagnose
from policylang.language.diagnostics import Diagnostic
from policylang.language.source import Source, Span

MAX_FILE = 4 * 1024 * 1024
MAX_STATEMENT = 64 * 1024
MAX_STATEMENTS = 100_000
MAX_DEPTH = 100

_UNREADABLE = re.compile("[\x00\ud800-\udfff]")
_STRUCTURE = re.compile(r'"[^"\n]*"?|#[^\n]*|[();\n]')
_BLANK = re.compile(r"(?:\s+|#[^\n]*)*")


@frozen
class Slices:
    """The ranges of the statements of a source, and what was wrong with its form."""

    ranges: tuple[tuple[int, int], ...]
    diagnostics: tuple[Diagnostic, ...]


def split(source: Source) -> Slices:
    """Cut a source into statements. Statements that break a bound are reported and left out."""
    text = source.text
    if len(text) > MAX_FILE:
        size = f"{len(text) / 1024 / 1024:.1f} MiB"
        message = f"the file holds {size} of text, more than the 4 MiB a policy may have"
        return Slices((), (diagnose("APL002", message, Span(source, 0, 1)),))
    unreadable = _UNREADABLE.search(text)
    if unreadable:
        return Slices((), (unreadable_text(source, unreadable.start()),))
    unclosed = _unclosed(text)
    ranges: list[tuple[int, int]] = []
    diagnostics: list[Diagnostic] = []
    start, depth, deepest, broken = 0, 0, 0, False
    for match in _STRUCTURE.finditer(text):
        mark = match.group()
        if mark == "(":
            if match.start() in unclosed:
                if not broken:
                    span = Span(source, match.start(), match.end())
                    diagnostics.append(diagnose("APL007", "this `(` is never closed", span))
                broken = True
            else:
                depth += 1
                deepest = max(deepest, depth)
        elif mark == ")":
            if depth:
                depth -= 1
            elif not broken:
                broken = True
                span = Span(source, match.start(), match.end())
                diagnostics.append(diagnose("APL007", "this `)` has no `(` before it", span))
        elif mark in (";", "\n") and not depth:
            _close(source, start, match.start(), deepest, broken, ranges, diagnostics)
            start, deepest, broken = match.end(), 0, False
    _close(source, start, len(text), deepest, broken, ranges, diagnostics)
    if len(ranges) > MAX_STATEMENTS:
        message = f"the file holds {len(ranges)} statements, more than the {MAX_STATEMENTS} a policy may have"
        return Slices((), (diagnose("APL002", message, Span(source, *ranges[MAX_STATEMENTS])),))
    return Slices(tuple(ranges), tuple(diagnostics))


def comments(source: Source) -> list[tuple[int, int]]:
    """The ranges of the comments of a source, without their line ends."""
    return [match.span() for match in _STRUCTURE.finditer(source.text) if match.group().startswith("#")]


def unreadable_text(source: Source, offset: int) -> Diagnostic:
    """The diagnostic for a character that no text holds."""
    found = f"U+{ord(source.text[offset]):04X}"
    message = f"the file is not text: it holds the character {found}"
    return diagnose("APL001", message, Span(source, offset, offset + 1), help="a policy is a UTF-8 text file")


def _unclosed(text: str) -> frozenset[int]:
    """The offsets of the opening parentheses that have no closing one."""
    stack: list[int] = []
    beyond = 0  # parentheses deeper than the bound are counted, not kept
    for match in _STRUCTURE.finditer(text):
        mark = match.group()
        if mark == "(":
            if len(stack) > MAX_DEPTH:
                beyond += 1
            else:
                stack.append(match.start())
        elif mark == ")":
            if beyond:
                beyond -= 1
            elif stack:
                stack.pop()
    return frozenset(stack)


def _close(
    source: Source,
    start: int,
    end: int,
    deepest: int,
    broken: bool,
    ranges: list[tuple[int, int]],
    diagnostics: list[Diagnostic],
) -> None:
    blank = _BLANK.match(source.text, start, end)
    start = blank.end() if blank else start
    if start >= end or broken:
        return
    if end - start > MAX_STATEMENT:
        message = f"this statement holds {(end - start) / 1024:.0f} KiB of text, more than the 64 KiB it may have"
        help = "give its parts names with `let`"
        diagnostics.append(diagnose("APL003", message, Span(source, start, end), help=help))
    elif deepest > MAX_DEPTH:
        diagnostics.append(too_deep(Span(source, start, end)))
    else:
        ranges.append((start, end))


def too_deep(span: Span) -> Diagnostic:
    """The diagnostic for a statement whose parts are nested beyond the bound."""
    message = f"this statement is nested more than {MAX_DEPTH} deep"
    return diagnose("APL004", message, span, help="give its parts names with `let`")
