"""Where a text defines names, where it uses them, and which files it names, in its order; nothing is looked up.

A statement that cannot be read still says words, so that a mistake does not take the name on its own line away.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property, lru_cache

from attrs import frozen

from policylang.language.diagnostics import Source, Span
from policylang.language.grammar import words_of
from policylang.language.lexer import FOREIGN_COMMENT, Lexeme, comments
from policylang.language.parser import parse_file
from policylang.language.syntax import Device, Include, Let, Statement, Word
from policylang.language.walk import selector_of, walk

_NO_NAMES_AFTER = frozenset(
    ("IN", "OUTSIDE", "COMPARISON", "POLICY", "OVER", "BLOCKS", "WHERE", "IS", "NOT", "UNDECIDED", "REQUIRES", "DEVICE")
)
"""Words behind which a name is one of a module, a figure or a dimension, in a statement that cannot be read."""
_ENDS = re.compile(r"[;\n]")
_BLANK = re.compile(rf"(?:\s+|{FOREIGN_COMMENT})*")
_NOTHING = re.compile(r"[\s;]*")


@frozen
class Occurrence:
    """A word of a selector, or the name that a ``let`` defines."""

    name: str
    span: Span
    defines: bool = False
    statement: Span | None = None
    """Of the ``let``, where it defines."""
    read: bool = True
    """Whether its statement can be read."""


@frozen(slots=False)
class Occurrences:
    """``parts`` are in the order of the text: names, and the statements that name files."""

    parts: tuple[Occurrence | Include | Device, ...]

    @property
    def names(self) -> tuple[Occurrence, ...]:
        return tuple(part for part in self.parts if isinstance(part, Occurrence))

    @property
    def includes(self) -> tuple[Include, ...]:
        return tuple(part for part in self.parts if isinstance(part, Include))

    @property
    def files(self) -> tuple[Include | Device, ...]:
        """The statements that name a file, or a device profile of the library."""
        return tuple(part for part in self.parts if isinstance(part, Include | Device))

    def of(self, name: str) -> tuple[Occurrence, ...]:
        return tuple(self._by_name.get(name, ()))

    @cached_property
    def _by_name(self) -> dict[str, list[Occurrence]]:
        found: dict[str, list[Occurrence]] = {}
        for each in self.names:
            found.setdefault(each.name, []).append(each)
        return found

    def at(self, offset: int) -> Occurrence | Include | Device | None:
        """What the word at an offset is part of, the offset behind its last character too."""
        return next((part for part in self.parts if part.span.start <= offset <= part.span.end), None)


@lru_cache(maxsize=512)
def occurrences(source: Source) -> Occurrences:
    """Of a text; linear in its length, and kept for the texts asked of last."""
    statements = parse_file(source)[0].statements
    found: list[Occurrence | Include | Device] = []
    skipped = [*comments(source), (len(source.text), len(source.text))]
    done = 0
    for statement in [*statements, None]:
        start, end = (len(source.text),) * 2 if statement is None else (statement.span.start, statement.span.end)
        for first, last in skipped[bisect_left(skipped, (done, 0)) :]:
            found += _unread(source, done, min(first, start))
            done = last
            if first >= start:
                break
        found += () if statement is None else _said(statement)
        done = end
    return Occurrences(tuple(found))


def target_of(statement: Include | Device) -> Span:
    """The name of the file in its statement, without what it is written in."""
    span = statement.span
    at = span.text.rindex(statement.target) - (not statement.target)
    return Span(span.source, span.start + at, span.start + at + len(statement.target))


def _said(statement: Statement) -> Iterator[Occurrence | Include | Device]:
    if isinstance(statement, Include | Device):
        yield statement
    if isinstance(statement, Let):
        span = statement.span
        name = words_of(span.source, span.start, span.end)[1].span
        yield Occurrence(statement.name, name, True, span)
    selector = selector_of(statement)
    for part in walk(selector) if selector is not None else ():
        if isinstance(part, Word):
            yield Occurrence(part.text, part.span)


def _unread(source: Source, start: int, end: int) -> Iterator[Occurrence]:
    """The words of what stands between two statements or comments, and cannot be read."""
    if _NOTHING.fullmatch(source.text, start, end):
        return
    for line in _lines(source.text, start, end):
        yield from _of_a_line(list(_words(source, *line)))


def _of_a_line(words: list[Lexeme]) -> Iterator[Occurrence]:
    for index, word in enumerate(words):
        before = words[index - 1].type if index else ""
        after = words[index + 1].type if index + 1 < len(words) else ""
        if word.type == "NAME" and before == "LET":
            yield Occurrence(str(word), word.span, True, words[0].span.to(words[-1].span), read=False)
        elif word.type in ("NAME", "PATH") and before not in _NO_NAMES_AFTER and after != "COMPARISON":
            yield Occurrence(str(word), word.span, read=False)


def _lines(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    for stop in _ENDS.finditer(text, start, end):
        yield start, stop.start()
        start = stop.end()
    yield start, end


def _words(source: Source, start: int, end: int) -> Iterator[Lexeme]:
    """Those of a line, also behind a character that no word has. An open quote holds the rest of it."""
    while start < end:
        words = words_of(source, start, end)
        yield from words
        stop = words[-1].span.end if words else start
        blank = _BLANK.match(source.text, stop, end)
        start = (blank.end() if blank else stop) + 1
        if source.text[start - 1 : start] == '"':
            return
