"""What of a policy can be folded, and what a selection grows to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from lsprotocol import types

from policylang.editor.features.outline import Comment, StatementExtent, shape_of
from policylang.editor.state import State
from policylang.language.diagnostics import Source, Span
from policylang.language.grammar import words_of
from policylang.language.syntax import Include, Predicate, Where
from policylang.language.walk import selector_of, walk

_WORD = re.compile(r"[\w.*?]+")


def folding(state: State) -> list[types.FoldingRange]:
    """Statements of several lines, comments, what a comment heads, runs of includes and sections; each lies within
    another or outside of it."""
    source, shape = state.document.source, shape_of(state)
    found: dict[tuple[int, int], types.FoldingRangeKind | None] = {}
    headings = [paragraph.heading for paragraph in shape.paragraphs if paragraph.is_headed]
    kind = types.FoldingRangeKind
    for comment in shape.comments:
        if not any(comment is each for each in headings):
            found[comment.lines] = kind.Comment
    for paragraph in shape.paragraphs:
        if paragraph.heading is not None and paragraph.is_headed:
            found[_lines(source, paragraph.heading.start, paragraph.end)] = kind.Region
        for statement in paragraph.statements:
            found.setdefault(_lines(source, statement.start, statement.end), None)
        for is_include, alike in groupby(paragraph.statements, key=lambda each: isinstance(each.statement, Include)):
            if is_include and (run := list(alike)):
                found[_lines(source, run[0].start, run[-1].end)] = kind.Imports
    for lines in _sections(source, shape.comments):
        found[lines] = kind.Region
    return [types.FoldingRange(first, last, kind=what) for (first, last), what in sorted(found.items()) if last > first]


def selection(state: State, offset: int) -> types.SelectionRange:
    """What a selection at an offset grows to: word, atom, phrase, selector, statement, paragraph, document."""
    positions = state.document.positions
    text = state.document.source.text
    spans = sorted({(0, len(text)), *_around(state, offset)}, key=lambda span: span[0] - span[1])
    grown: types.SelectionRange | None = None
    outer = spans[0]
    for span in spans:
        if grown is None or (outer[0] <= span[0] and span[1] <= outer[1]):
            grown, outer = types.SelectionRange(positions.between(*span), grown), span
    assert grown is not None
    return grown


def _around(state: State, offset: int) -> Iterator[tuple[int, int]]:
    """The ranges of the parts of a text that hold an offset."""
    for start, end in _all_around(state, offset):
        if start <= offset <= end and start < end:
            yield start, end


def _all_around(state: State, offset: int) -> Iterator[tuple[int, int]]:
    source = state.document.source
    shape = shape_of(state)
    line = source.text.rfind("\n", 0, offset) + 1
    end = source.text.find("\n", offset)
    yield from (word.span() for word in _WORD.finditer(source.text, line, len(source.text) if end < 0 else end))
    yield from ((comment.start, comment.end) for comment in shape.comments)
    for paragraph in shape.paragraphs:
        first = paragraph.statements[0].start
        yield first, paragraph.end
        if paragraph.heading is not None:
            yield paragraph.heading.start, paragraph.end
        for statement in paragraph.statements:
            if statement.start <= offset <= statement.end:
                yield from ((span.start, span.end) for span in _parts(statement))


def _parts(extent: StatementExtent) -> Iterator[Span]:
    """A statement, what stands in its parentheses, its words, selectors and predicates."""
    statement = extent.statement
    span = Span(statement.span.source, extent.start, extent.end)
    yield span
    opened: list[int] = []
    for word in words_of(span.source, span.start, span.end):
        yield word.span
        if word.type == "LPAR":
            opened.append(word.span.start)
        elif word.type == "RPAR" and opened:
            yield Span(span.source, opened[-1], word.span.end)
            yield Span(span.source, opened.pop() + 1, word.span.start)
    selector = selector_of(statement)
    for part in walk(selector) if selector is not None else ():
        yield part.span
        if isinstance(part, Where):
            yield from _predicates(part.predicate)


def _predicates(predicate: Predicate) -> Iterator[Span]:
    pending: list[Any] = [predicate]
    while pending:
        part = pending.pop()
        yield part.span
        pending += [*getattr(part, "parts", ()), *filter(None, [getattr(part, "predicate", None)])]


def _sections(source: Source, comments: Sequence[Comment]) -> Iterator[tuple[int, int]]:
    """From each banner to the last line before the next one on which anything stands."""
    banners = [comment for comment in comments if comment.banner is not None]
    ends = [*(banner.start for banner in banners[1:]), len(source.text)]
    for banner, end in zip(banners, ends, strict=False):
        said = source.text[banner.start : end].rstrip()
        yield _lines(source, banner.start, banner.start + len(said))


def _lines(source: Source, start: int, end: int) -> tuple[int, int]:
    return source.line_column(start)[0] - 1, source.line_column(end)[0] - 1
