"""What canonical layout changes in a text, place by place: for editors, whose cursors stay where nothing changes.

A change is of the blanks between two words, or of a word's own form (``→`` to ``->``), so each by itself, and any of
them together, leave the policy as it is.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby

from attrs import define, field, frozen

from policylang.language.diagnostics import Diagnostic, Source, Span, bounded, diagnose, is_error
from policylang.language.grammar import word_pairs, words_of
from policylang.language.lexer import Lexeme, comments, split
from policylang.language.parser import parse_file

CHANGED = "APL520"

_STEP = 4
_GAP = 2
_TAB = 8
_CROWDED = re.compile(r"^#(?=[\w`'\"(])")


@frozen
class Formatted:
    """The canonical text; None where a diagnostic is an error, and the file is to be left alone."""

    text: str | None
    diagnostics: tuple[Diagnostic, ...]


def format_source(source: Source) -> Formatted:
    """The canonical text of a file, proved, or why there is none. Names are not looked up; linear in the text."""
    file, diagnostics = parse_file(source)
    if any(map(is_error, diagnostics)):
        return Formatted(None, bounded(diagnostics))
    text = _lay_out(source)
    made = Source(source.name, text)
    again, faults = parse_file(made)
    if faults or again.statements != file.statements or _content(made) != _content(source) or _lay_out(made) != text:
        message = f"formatting `{source.name}` would change more than its layout, so nothing was written"
        help = "this is a bug in policylang: please report it with the file"
        return Formatted(None, (diagnose(CHANGED, message, Span(source, 0, 0), help=help),))
    return Formatted(text, ())


@frozen
class LayoutPiece:
    """A word or a comment of the source."""

    text: str
    start: int
    end: int
    statement: int
    """The number of its statement; of a comment, -1."""

    @property
    def is_comment(self) -> bool:
        return self.statement < 0


@define
class _Line:
    """A line of the result."""

    depth: int = 0
    words: list[str] = field(factory=list)
    comment: str | None = None
    column: int = 0
    """The column of a comment behind words."""
    blank_before: bool = False

    @property
    def closes(self) -> bool:
        """True if it holds closing parentheses alone."""
        return all(word == ")" for word in self.words)

    @property
    def code(self) -> str:
        return " " * (_STEP * self.depth) + "".join(self.words)


def _lay_out(source: Source) -> str:
    lines = _lines(source)
    _line_up([line for line in lines if line.words and line.comment is not None])
    written: list[str] = []
    for line in lines:
        if line.blank_before and written:
            written.append("")
        written.append(_write(line))
    return "".join(f"{line}\n" for line in written)


def _write(line: _Line) -> str:
    if line.comment is None:
        return line.code
    return line.code + " " * (line.column - len(line.code)) + line.comment if line.words else line.code + line.comment


def _line_up(commented: Sequence[_Line]) -> None:
    """Give the comments behind code their columns. Successive ones that shared a column share one."""
    for column, lines in groupby(commented, key=lambda line: line.column):
        group = list(lines)
        least = max(len(line.code) for line in group) + _GAP
        for line in group:
            line.column = max(least, column) if len(group) > 1 else least


def _lines(source: Source) -> list[_Line]:
    """The source cut into lines, without the last word on the columns of comments."""
    lines: list[_Line] = []
    depth = 0
    before: LayoutPiece | None = None
    for piece in pieces_of(source):
        gap = source.text.count("\n", before.end, piece.start) if before is not None else 0
        if piece.is_comment and before is not None and not before.is_comment and not gap:
            lines[-1].comment, lines[-1].column = _comment(piece.text), _column(source.text, piece.start)
            before = piece
            continue
        starts = before is None or before.is_comment or gap or piece.statement != before.statement
        if starts:
            lines.append(_Line(depth=depth - (piece.text == ")"), blank_before=gap > 1 and not _hugs(before, piece)))
        if piece.is_comment:
            lines[-1].comment = _comment(piece.text)
        else:
            if not starts and piece.text == ")" and lines[-1].closes:
                lines[-1].depth -= 1
            lines[-1].words.append(_spaced(piece.text, None if starts else before))
            depth += (piece.text == "(") - (piece.text == ")")
        before = piece
    return lines


def _hugs(before: LayoutPiece | None, piece: LayoutPiece) -> bool:
    """True if a blank line between the two would be just inside a parenthesis."""
    return piece.text == ")" or (before is not None and before.text == "(")


def _spaced(word: str, before: LayoutPiece | None) -> str:
    if before is None or before.text == "(" or word in (")", ",", "%"):
        return word
    return f" {word}"


def _comment(text: str) -> str:
    return _CROWDED.sub("# ", text.rstrip(), count=1)


def _column(text: str, offset: int) -> int:
    return len(text[text.rfind("\n", 0, offset) + 1 : offset].expandtabs(_TAB))


def pieces_of(source: Source) -> Iterable[LayoutPiece]:
    """Words and comments, in the order of the text."""
    said = [LayoutPiece(source.text[start:end], start, end, -1) for start, end in comments(source)]
    words = [
        piece
        for number, (start, end) in enumerate(split(source).ranges)
        for word in words_of(source, start, end)
        for piece in _words(word, number)
    ]
    return sorted([*said, *words], key=lambda piece: piece.start)


def _words(word: Lexeme, statement: int) -> Iterable[LayoutPiece]:
    start, end = word.start_pos or 0, word.end_pos or 0
    text = str(word)
    if word.type in word_pairs():  # two words, and there may be a comment between them
        first, last = text.split()[0], text.split()[-1]
        yield LayoutPiece(first, start, start + len(first), statement)
        yield LayoutPiece(last, end - len(last), end, statement)
        return
    yield LayoutPiece("->" if word.type == "ARROW" else text, start, end, statement)


def _content(source: Source) -> list[tuple[int, str]]:
    """The words, and the comments between them: formatting must not change these."""
    return [
        (-1, "".join(piece.text.split())) if piece.is_comment else (piece.statement, piece.text)
        for piece in pieces_of(source)
    ]


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
    """The line end of a text's first line."""
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
    """The changes that make a text canonical, sorted by position; None where ``fmt`` refuses it."""
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
    """The changes of the lines that hold a statement or comment between two offsets. A statement that cannot be read is
    left as it is, and so is the rest of its lines."""
    readable, left_alone = _without_mistakes(source)
    first, last = _whole_lines(readable, start, end)
    parts = (_within(source.text, change, first, last) for change in layout_changes(readable) or ())
    starts = [start for start, _ in left_alone]

    def stays(change: LayoutChange) -> bool:
        before = bisect_right(starts, change.start)
        return bool(before) and change.end <= left_alone[before - 1][1]

    return tuple(change for change in parts if change is not None and not stays(change))


def _end(piece: LayoutPiece) -> int:
    """The end of a piece, without blanks behind a comment."""
    return piece.start + len(piece.text.rstrip()) if piece.is_comment else piece.end


def _between(text: str, start: int, end: int, wanted: str, line_end: str) -> list[LayoutChange]:
    """The change of the blanks between two words, without the prefix and suffix that stay."""
    old, new = _PARTS.findall(text[start:end]), _PARTS.findall(wanted.replace("\n", line_end))
    while old and new and old[0] == new[0]:
        start += len(old[0])
        del old[0], new[0]
    while old and new and old[-1] == new[-1]:
        end -= len(old[-1])
        del old[-1], new[-1]
    return [LayoutChange(start, end, "".join(new))] if old or new else []


def _joined(changes: Iterable[LayoutChange]) -> Iterable[LayoutChange]:
    """Merges changes that touch: an editor may apply two at one place in either order."""
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
    """The part of a change within lines from one offset to another; blank lines around them stay."""
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
