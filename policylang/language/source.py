"""Source texts, and spans in them."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property

from attrs import field, frozen


@frozen(slots=False)
class Source:
    """The text of one policy file.

    ``name`` is what reports print: the path as the user gave it, ``<fsdp>`` for a file of the bundled library,
    ``<policy>`` for text that came from no file. Two sources are the same when name and text are.
    """

    name: str
    text: str = field(repr=False)

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        position = self.text.find("\n")
        while position >= 0:
            starts.append(position + 1)
            position = self.text.find("\n", position + 1)
        return starts

    def line_column(self, offset: int) -> tuple[int, int]:
        """The 1-based line and column (in characters) of a character offset."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def line_text(self, line: int) -> str:
        """The text of a 1-based line, without its line end."""
        start = self._line_starts[line - 1]
        end = self._line_starts[line] - 1 if line < len(self._line_starts) else len(self.text)
        return self.text[start:end].rstrip("\r")


@frozen
class Span:
    """A half-open range of characters in a source. Lines and columns are counted from 1, columns in characters."""

    source: Source
    start: int
    end: int

    @property
    def text(self) -> str:
        """The characters themselves."""
        return self.source.text[self.start : self.end]

    @property
    def one_line(self) -> str:
        """The text with each run of spaces and line breaks as one space."""
        return " ".join(self.text.split())

    @property
    def line(self) -> int:
        """Of the first character."""
        return self.source.line_column(self.start)[0]

    @property
    def column(self) -> int:
        """Of the first character."""
        return self.source.line_column(self.start)[1]

    @property
    def end_line(self) -> int:
        """Of the character behind the last."""
        return self.source.line_column(self.end)[0]

    @property
    def end_column(self) -> int:
        """Of the character behind the last."""
        return self.source.line_column(self.end)[1]

    @property
    def location(self) -> str:
        """``file:line``, the form in which rules are named in reports and on nodes."""
        return f"{self.source.name}:{self.line}"

    def to(self, other: Span) -> Span:
        """The span from the start of this one to the end of ``other``."""
        return Span(self.source, self.start, other.end)
