"""What canonical layout changes in a text, place by place: for editors, whose cursors stay where nothing changes.

A change is of the blanks between two words, or of a word's own form (``→`` to ``->``), so each by itself, and any of
them together, leave the policy as it is.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from attrs import frozen

from policylang.language.diagnostics import Source
from policylang.language.formatting.canonical import LayoutPiece, format_source, pieces_of
from policylang.language.parsing.parser import parse_file
from policylang.language.parsing.statements import comments, split

_PARTS = re.compile(r"\r\n|\r|\n|[^\r\n]+")
_LINE_END = re.compile(r"\r\n|\r|\n")
_LINE = re.compile(r"\S[^\n]*")
_NOTHING_SAID = re.compile(r"[\s;]*")


@frozen
class LayoutChange:
    """Characters of a text that others take the place of."""

    start: int
    end: int
    text: str


def line_end_of(text: str) -> str:
    """How the lines of a text end: as its first one does."""
    first = text.find("\n")
    return "\r\n" if first > 0 and text[first - 1] == "\r" else "\n"


def applied(text: str, changes: Iterable[LayoutChange]) -> str:
    """The text with changes made that do not overlap, in the order of the text."""
    parts: list[str] = []
    done = 0
    for change in changes:
        parts += (text[done : change.start], change.text)
        done = change.end
    return "".join((*parts, text[done:]))


def layout_changes(source: Source) -> tuple[LayoutChange, ...] | None:
    """From the text to its canonical form, in the order of the text; None where it has none, as with ``fmt``."""
    formatted = format_source(source).text
    if formatted is None:
        return None
    line_end = line_end_of(source.text)
    old, new = list(pieces_of(source)), list(pieces_of(Source(source.name, formatted)))
    found: list[LayoutChange] = []
    done = written = 0
    for before, after in zip(old, new, strict=True):
        found += _between(source.text, done, before.start, formatted[written : after.start], line_end)
        end = _end(before)
        if source.text[before.start : end] != after.text:
            found.append(LayoutChange(before.start, end, after.text))
        done, written = end, after.end
    found += _between(source.text, done, len(source.text), formatted[written:], line_end)
    return tuple(_joined(found))


def layout_changes_between(source: Source, start: int, end: int) -> tuple[LayoutChange, ...]:
    """Those of the lines that hold a statement or a comment between two offsets. A statement that cannot be read is
    left as it is, and so is what stands on its lines."""
    readable, left_alone = _without_mistakes(source)
    first, last = _whole_lines(readable, start, end)
    parts = (_within(source.text, change, first, last) for change in layout_changes(readable) or ())
    starts = [start for start, _ in left_alone]

    def stays(change: LayoutChange) -> bool:
        before = bisect_right(starts, change.start)
        return bool(before) and change.end <= left_alone[before - 1][1]

    return tuple(change for change in parts if change is not None and not stays(change))


def _end(piece: LayoutPiece) -> int:
    """Of a comment, where its last word ends: blanks behind it are no part of it."""
    return piece.start + len(piece.text.rstrip()) if piece.is_comment else piece.end


def _between(text: str, start: int, end: int, wanted: str, line_end: str) -> list[LayoutChange]:
    """From the blanks between two words to those that are wanted, without what both begin and end with."""
    old, new = _PARTS.findall(text[start:end]), _PARTS.findall(wanted.replace("\n", line_end))
    while old and new and old[0] == new[0]:
        start += len(old[0])
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        end -= len(old[-1])
        del old[-1], new[-1]
    return [LayoutChange(start, end, "".join(new))] if old or new else []


def _joined(changes: Iterable[LayoutChange]) -> Iterable[LayoutChange]:
    """Those that touch as one: an editor may take two at one place in either order."""
    last: LayoutChange | None = None
    for change in changes:
        if last is not None and last.end == change.start:
            last = LayoutChange(last.start, change.end, last.text + change.text)
            continue
        if last is not None:
            yield last
        last = change
    if last is not None:
        yield last


def _within(text: str, change: LayoutChange, first: int, last: int) -> LayoutChange | None:
    """What of a change lies in the lines from one offset to another; the blank lines around them stay."""
    if change.end < first or change.start > last or (change.start == last < len(text)) or first >= last:
        return None
    start, end, wanted = change.start, change.end, change.text
    if start < first:
        start, wanted = first, _LINE_END.split(wanted)[-1]
    if end > last:
        end, wanted = last, _LINE_END.split(wanted)[0] if _LINE_END.search(wanted) else ""
    return LayoutChange(start, end, wanted) if text[start:end] != wanted else None


def _whole_lines(source: Source, start: int, end: int) -> tuple[int, int]:
    """The lines of all that is said between two offsets, from the first's start to the last's end, with the lines that
    statements on these go on over. Twice the same offset where nothing is said."""
    text, said = source.text, _said(source)
    touched = [at for at, (a, b) in enumerate(said) if (a < end and b > start) or (start == end and a <= start <= b)]
    if not touched:
        return start, start
    first, last = touched[0], touched[-1]
    while first and "\n" not in text[said[first - 1][1] : said[first][0]]:
        first -= 1
    while last + 1 < len(said) and "\n" not in text[said[last][1] : said[last + 1][0]]:
        last += 1
    line_end = text.find("\n", said[last][1])
    line_end = len(text) if line_end < 0 else line_end - (text[line_end - 1] == "\r")
    return text.rfind("\n", 0, said[first][0]) + 1, line_end


def _said(source: Source) -> list[tuple[int, int]]:
    """The ranges of statements, and of comments outside of them, in the order of the text."""
    found: list[tuple[int, int]] = []
    for start, end in sorted((*split(source).ranges, *comments(source))):
        if not found or start >= found[-1][1]:
            found.append((start, end))
    return found


def _without_mistakes(source: Source) -> tuple[Source, Sequence[tuple[int, int]]]:
    """The text with each line that cannot be read as a comment of the same length, and the ranges from the word before
    to the word behind each, in which nothing changes."""
    text = source.text
    starts = {statement.span.start for statement in parse_file(source)[0].statements}
    said = [(a, b) for a, b in _said(source) if a in starts or text.startswith("#", a)]
    lines = [line.span() for a, b, read in _blocks(text, said) if not read for line in _LINE.finditer(text, a, b)]
    letters = list(text)
    for start, _ in lines:
        letters[start] = "#"
    return Source(source.name, "".join(letters)), [_with_blanks(text, *line) for line in lines]


def _blocks(text: str, said: Iterable[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """The lines of a text, those together that one of the things said goes on over, and whether these are all."""
    blocks: list[tuple[int, int, bool]] = []
    start = done = 0
    read = True
    for first, last in [*said, (len(text), len(text))]:
        while (at := text.find("\n", done, first)) >= 0:
            blocks.append((start, at, read and bool(_NOTHING_SAID.fullmatch(text, done, at))))
            start, done, read = at + 1, at + 1, True
        read = read and bool(_NOTHING_SAID.fullmatch(text, done, first))
        done = last
    return [*blocks, (start, len(text), read)]


def _with_blanks(text: str, start: int, end: int) -> tuple[int, int]:
    """A range with the blanks around it."""
    while start and text[start - 1].isspace():
        start -= 1
    while end < len(text) and text[end].isspace():
        end += 1
    return start, end
