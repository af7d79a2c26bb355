"""Canonical layout: a policy file as ``policylang fmt`` writes it, the author's words, comments and line breaks kept.

Where :mod:`policylang.language.formatting.unparse` writes what a policy *means*, this writes what its author *wrote*:
one statement a line, one space between words, a line in parentheses indented by its depth, at most one blank line in a
row. A comment behind a statement stands two spaces after it, and comments behind successive statements that stood in
one column go on to do so.

Before a text is handed out it is proved: it has the same tree, the same words and the same comments between the same
words as the original, and formatting it again changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from attrs import define, field, frozen

from policylang.language.diagnostics import Diagnostic, Source, Span, bounded, diagnose, is_error
from policylang.language.parsing.lexer import PAIRS, Lexeme
from policylang.language.parsing.parser import parse_file, words_of
from policylang.language.parsing.statements import comments, split

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
    """Where a comment behind words stood."""
    blank_before: bool = False

    @property
    def closes(self) -> bool:
        """Whether it holds closing parentheses and nothing else."""
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
    """Whether a blank line between the two would stand just inside a parenthesis."""
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
    if word.type in PAIRS:  # two words, and there may be a comment between them
        first, last = text.split()[0], text.split()[-1]
        yield LayoutPiece(first, start, start + len(first), statement)
        yield LayoutPiece(last, end - len(last), end, statement)
        return
    yield LayoutPiece("->" if word.type == "ARROW" else text, start, end, statement)


def _content(source: Source) -> list[tuple[int, str]]:
    """What may not change: every word, and every comment between the words."""
    return [
        (-1, "".join(piece.text.split())) if piece.is_comment else (piece.statement, piece.text)
        for piece in pieces_of(source)
    ]
