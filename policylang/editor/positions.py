"""Places in a text as the language counts them, in characters, and as the protocol does, in code units of a line.

The protocol counts in UTF-16 unless a client asks for UTF-8 or UTF-32: a character beyond the basic plane is two units
there. A line ends with ``\\n``, ``\\r\\n`` or ``\\r`` there, and with nothing else.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property

from attrs import field, frozen
from lsprotocol import types

from policylang.language.diagnostics import Span

_LINE_END = re.compile(r"\r\n|\r|\n")
_UNITS = {
    types.PositionEncodingKind.Utf8: "utf-8",
    types.PositionEncodingKind.Utf16: "utf-16-le",
    types.PositionEncodingKind.Utf32: "utf-32-le",
}
_WIDTH = {
    types.PositionEncodingKind.Utf8: 1,
    types.PositionEncodingKind.Utf16: 2,
    types.PositionEncodingKind.Utf32: 4,
}


@frozen(slots=False)
class Positions:
    """Of one text, in the encoding that client and server agreed on."""

    text: str = field(repr=False)
    encoding: types.PositionEncodingKind = types.PositionEncodingKind.Utf16

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(found.end() for found in _LINE_END.finditer(self.text))]

    def position(self, offset: int) -> types.Position:
        """Of a character offset; one beyond the text is its end."""
        offset = max(0, min(offset, len(self.text)))
        line = bisect_right(self._starts, offset) - 1
        return types.Position(line, self._units(self.text[self._starts[line] : offset]))

    def offset(self, position: types.Position) -> int:
        """Of a position; one behind the end of its line is that end, one behind the last line the end of the text, one
        within a character its start."""
        if position.line >= len(self._starts):
            return len(self.text)
        start = self._starts[position.line]
        end = self._starts[position.line + 1] if position.line + 1 < len(self._starts) else len(self.text)
        line = self.text[start:end].rstrip("\r\n")
        if self.encoding is types.PositionEncodingKind.Utf32 or line.isascii():
            return start + min(position.character, len(line))
        units = 0
        for index, character in enumerate(line):
            units += self._units(character)
            if units > position.character:
                return start + index
        return start + len(line)

    def range(self, span: Span) -> types.Range:
        """Of a span of this text."""
        return self.between(span.start, span.end)

    def between(self, start: int, end: int) -> types.Range:
        """Of two character offsets."""
        return types.Range(self.position(start), self.position(end))

    def _units(self, text: str) -> int:
        if self.encoding is types.PositionEncodingKind.Utf32 or text.isascii():
            return len(text)
        return len(text.encode(_UNITS[self.encoding], "surrogatepass")) // _WIDTH[self.encoding]


def changed_text(
    text: str,
    changes: Sequence[types.TextDocumentContentChangeEvent],
    encoding: types.PositionEncodingKind = types.PositionEncodingKind.Utf16,
) -> str:
    """A text after changes that were made one after the other, of the whole or of parts."""
    for change in changes:
        if isinstance(change, types.TextDocumentContentChangePartial):
            positions = Positions(text, encoding)
            start, end = positions.offset(change.range.start), positions.offset(change.range.end)
            text = text[:start] + change.text + text[max(start, end) :]
        else:
            text = change.text
    return text
