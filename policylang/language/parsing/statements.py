"""The scanner: where each statement of a file begins and ends.

A newline or ``;`` ends a statement unless inside parentheses; ``#`` starts a comment. One mistake must not hide the
others, so a parenthesis that is never closed does not swallow the rest of the file: it is reported, and line ends
count again. Linear in the length of the text, and bounded.
"""

from __future__ import annotations

import re
from itertools import chain

from attrs import frozen

from policylang.language.diagnostics import Diagnostic, Source, Span, diagnose

MAX_FILE = 4 * 1024 * 1024
MAX_STATEMENT = 64 * 1024
MAX_STATEMENTS = 100_000
MAX_DEPTH = 100
_MOST_OPEN = 8

_UNREADABLE = re.compile("[\x00\ud800-\udfff]")
# A comment of another language, `//` or `--` before text, is one to the scanner, and reported: what follows it is no
# policy, whatever marks it holds.
FOREIGN_COMMENT = r"(?<!\S)(?://|--)(?!>)[^\n]*"
_STRUCTURE = re.compile(rf'"[^"\n]*"?|#[^\n]*|{FOREIGN_COMMENT}|[();\n]')
_BLANK = re.compile(rf"(?:\s+|#[^\n]*|{FOREIGN_COMMENT})*")


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
    start, depth, deepest = 0, 0, 0
    broken: Diagnostic | None = None
    for match in chain(_STRUCTURE.finditer(text), [None]):
        mark, at = (match.group(), match.start()) if match else (";", len(text))
        if mark.startswith(("//", "--")):
            diagnostics.append(_foreign_comment(Span(source, at, at + len(mark.rstrip()))))
        elif mark == "(" and at in unclosed:
            broken = broken or diagnose("APL007", "this `(` is never closed", Span(source, at, at + 1))
        elif mark == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif mark == ")" and depth:
            depth -= 1
        elif mark == ")":
            broken = broken or diagnose("APL007", "this `)` has no `(` before it", Span(source, at, at + 1))
        elif match is None or (mark in (";", "\n") and not depth):
            blank = _BLANK.match(text, start, at)
            start = blank.end() if blank else start
            wrong = broken or _broken_bound(Span(source, start, at), deepest)
            if wrong is not None:
                diagnostics.append(wrong)
            elif start < at:
                ranges.append((start, at))
            start, deepest, broken = at + 1, 0, None
    if len(ranges) > MAX_STATEMENTS:
        message = f"the file holds {len(ranges)} statements, more than the {MAX_STATEMENTS} a policy may have"
        return Slices((), (diagnose("APL002", message, Span(source, *ranges[MAX_STATEMENTS])),))
    return Slices(tuple(ranges), tuple(diagnostics))


def starts_before(source: Source, offset: int) -> tuple[int, ...] | None:
    """Where the statement may begin that a place is in, in the order of the text; None in a comment.

    The last is where it begins by the line ends. The others are those of statements before it that have a parenthesis
    without its other half: who writes one has not closed it yet.
    """
    text, unclosed = source.text, _unclosed(source.text)
    start, depth = 0, 0
    opened: list[int] = []
    for match in _STRUCTURE.finditer(text):
        mark, at = match.group(), match.start()
        if at >= offset:
            break
        if mark.startswith(("#", "//", "--")):
            if offset <= match.end():
                return None
        elif mark == "(" and at in unclosed:
            opened.append(start)
        elif mark == "(":
            depth += 1
        elif mark == ")":
            depth = max(0, depth - 1)
        elif mark in (";", "\n") and not depth:
            start = at + 1
    starts = dict.fromkeys((*opened[-_MOST_OPEN:], start))
    return tuple(found.end() if (found := _BLANK.match(text, each, offset)) else each for each in starts)


def is_blank(text: str, start: int, end: int) -> bool:
    """Whether a part of a text holds nothing but comments."""
    found = _BLANK.match(text, start, end)  # never fails, so never tries again
    return found is not None and found.end() == end


def comments(source: Source) -> list[tuple[int, int]]:
    """The ranges of the comments of a source, without their line ends."""
    return [match.span() for match in _STRUCTURE.finditer(source.text) if match.group().startswith("#")]


def unreadable_text(source: Source, offset: int) -> Diagnostic:
    """The diagnostic for a character that no text holds."""
    found = f"U+{ord(source.text[offset]):04X}"
    message = f"the file is not text: it holds the character {found}"
    return diagnose("APL001", message, Span(source, offset, offset + 1), help="a policy is a UTF-8 text file")


def comment_above(span: Span) -> str:
    """The comment on the lines above a statement, without its marks; else the one behind it on its line."""
    source = span.source
    found = {source.line_column(start)[0]: source.text[start:end] for start, end in comments(source)}
    alone = {line for line in found if source.line_text(line).lstrip().startswith("#")}
    line, lines = span.line - 1, list[str]()
    while line in alone:
        lines.insert(0, found[line])
        line -= 1
    if not lines and span.end_line in found:
        lines = [found[span.end_line]]
    return " ".join(" ".join(each.lstrip("#").split()) for each in lines)


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


def _foreign_comment(span: Span) -> Diagnostic:
    text = " ".join(span.text.lstrip("/-").split())
    comment = f"# {text}" if text else "#"
    return diagnose("APL005", "a comment starts with `#`", span, help=f"write `{comment}`", write=(comment,))


def _broken_bound(statement: Span, deepest: int) -> Diagnostic | None:
    size = statement.end - statement.start
    if size > MAX_STATEMENT:
        message = f"this statement holds {size / 1024:.0f} KiB of text, more than the 64 KiB it may have"
        return diagnose("APL003", message, statement, help="give its parts names with `let`")
    return too_deep(statement) if deepest > MAX_DEPTH and size > 0 else None


def too_deep(span: Span) -> Diagnostic:
    """The diagnostic for a statement whose parts are nested beyond the bound."""
    message = f"this statement is nested more than {MAX_DEPTH} deep"
    return diagnose("APL004", message, span, help="give its parts names with `let`")
