"""The changes of canonical layout, place by place: for editors, whose cursors stay where nothing changes.

A change is of the blanks between two words, or of a word's form (``→`` to ``->``), so each of them, and any together,
leave the policy as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from attrs import define, field, frozen

from policylang.language.diagnostics import Diagnostic, Source, Span, bounded, diagnose, is_error
from policylang.language.lexer import comments, split, word_pairs, words_of
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
    def code(self) -> str:
        return " " * (_STEP * self.depth) + "".join(self.words)


def _lay_out(source: Source) -> str:
    lines = _lines(source)
    commented = [line for line in lines if line.words and line.comment is not None]
    for column, together in groupby(commented, key=lambda line: line.column):
        group = list(together)  # successive comments behind code that shared a column share one
        least = max(len(line.code) for line in group) + _GAP
        for line in group:
            line.column = max(least, column) if len(group) > 1 else least
    written: list[str] = []
    for line in lines:
        if line.blank_before and written:
            written.append("")
        written.append(line.code if line.comment is None else line.code.ljust(line.column) + line.comment)
    return "".join(f"{line}\n" for line in written)


def _lines(source: Source) -> list[_Line]:
    """The source cut into lines; comments after code have their columns in the source."""
    lines: list[_Line] = []
    depth = 0
    before: LayoutPiece | None = None
    for piece in pieces_of(source):
        text = piece.text
        gap = source.text.count("\n", before.end, piece.start) if before is not None else 0
        behind = before is not None and not before.is_comment and not gap
        starts = not behind or (not piece.is_comment and before is not None and piece.statement != before.statement)
        if starts:
            hugs = text == ")" or (before is not None and before.text == "(")  # no blank line just inside parentheses
            lines.append(_Line(depth=depth - (text == ")"), blank_before=gap > 1 and not hugs))
        line = lines[-1]
        if piece.is_comment:
            line.comment = _CROWDED.sub("# ", text.rstrip(), count=1)
            if not starts:
                start = source.text.rfind("\n", 0, piece.start) + 1
                line.column = len(source.text[start : piece.start].expandtabs(_TAB))
        else:
            if not starts and text == ")" and all(word == ")" for word in line.words):
                line.depth -= 1
            joins = starts or before is None or before.text == "(" or text in (")", ",", "%")
            line.words.append(text if joins else f" {text}")
            depth += (text == "(") - (text == ")")
        before = piece
    return lines


def pieces_of(source: Source) -> Sequence[LayoutPiece]:
    """Words and comments, in the order of the text."""
    found = [LayoutPiece(source.text[start:end], start, end, -1) for start, end in comments(source)]
    for number, (start, end) in enumerate(split(source).ranges):
        for word in words_of(source, start, end):
            at, behind = word.start_pos or 0, word.end_pos or 0
            if word.type in word_pairs():  # two words, and there may be a comment between them
                first, *_, last = word.split()
                found.append(LayoutPiece(first, at, at + len(first), number))
                found.append(LayoutPiece(last, behind - len(last), behind, number))
            else:
                found.append(LayoutPiece("->" if word.type == "ARROW" else str(word), at, behind, number))
    return sorted(found, key=lambda piece: piece.start)


def _content(source: Source) -> list[tuple[int, str]]:
    """The words, and the comments between them: formatting must not change these."""
    return [
        (-1, "".join(piece.text.split())) if piece.is_comment else (piece.statement, piece.text)
        for piece in pieces_of(source)
    ]


def line_end_of(text: str) -> str:
    """The line end of a text's first line."""
    first = text.find("\n")
    return "\r\n" if first > 0 and text[first - 1] == "\r" else "\n"
