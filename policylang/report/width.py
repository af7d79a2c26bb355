"""How wide text may be: tables give up what does not fit of their longest cells, sentences go on in the next line.

Nothing is shortened unless somebody says how wide the text may be, as the command line does for a terminal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from textwrap import TextWrapper

from policylang.language.figures import shortened

_COLUMNS: ContextVar[int | None] = ContextVar("columns", default=None)
_NARROWEST = 8
"""Of a cell that is shortened."""
_LEAST = 20
"""Of the text as a whole: what is narrower shows nothing."""
_BETWEEN = 2
_EXCERPT = re.compile(r"\s*\d*\s*\|(\s|$)")
_HANGS = re.compile(r"\s*(?:= |[-*] )?")


@contextmanager
def fitted(columns: int | None) -> Iterator[None]:
    """Within it, text is at most so many columns wide; any width with None or 0."""
    token = _COLUMNS.set(max(columns, _LEAST) if columns else None)
    try:
        yield
    finally:
        _COLUMNS.reset(token)


def columns(most: int | None = None) -> int | None:
    """How many columns text may have, ``most`` where that is less; None for any number."""
    found = _COLUMNS.get()
    return most if found is None else found if most is None else min(found, most)


def table(rows: Sequence[Sequence[str]], right: range, indent: int = 0) -> str:
    """Aligned columns; those in ``right`` are aligned to the right. The first row is the head.

    Where the whole is too wide, the widest of the columns that are aligned to the left are shortened.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    _narrow(widths, right, indent)
    most = columns()
    return "\n".join(
        " " * indent + _cut("  ".join(_cells(row, widths, right)).rstrip(), None if most is None else most - indent)
        for row in rows
    )


def _cells(row: Sequence[str], widths: Sequence[int], right: range) -> Iterator[str]:
    for column, (cell, width) in enumerate(zip(row, widths, strict=True)):
        text = shortened(cell, width) if len(cell) > width else cell
        yield text.rjust(width) if column in right else text.ljust(width)


def _narrow(widths: list[int], right: range, indent: int) -> None:
    """Take from the widest until all fits, or until nothing is left to take."""
    most = columns()
    if most is None:
        return
    excess = indent + sum(widths) + _BETWEEN * (len(widths) - 1) - most
    left = [column for column in range(len(widths)) if column not in right and widths[column] > _NARROWEST]
    while excess > 0 and left:
        left.sort(key=lambda column: widths[column])
        widest = widths[left[-1]]
        level = next((widths[column] for column in reversed(left) if widths[column] < widest), _NARROWEST)
        alike = [column for column in left if widths[column] == widest]
        step = min(widest - level, -(-excess // len(alike)))
        for column in alike:
            widths[column] -= min(step, max(excess, 0))
            excess -= step
        left = [column for column in left if widths[column] > _NARROWEST]


def _cut(line: str, most: int | None) -> str:
    return line if most is None else shortened(line, most)


def fit(text: str) -> str:
    """The text with its long sentences wrapped between words. Source lines of a diagnostic are cut, not wrapped."""
    most = columns()
    if most is None:
        return text
    return "\n".join(line if len(line) <= most else _fit_line(line, most) for line in text.split("\n"))


def _fit_line(line: str, most: int) -> str:
    if _EXCERPT.match(line):
        return shortened(line, most)
    found = _HANGS.match(line)
    start = 0 if found is None else found.end()
    hang = " " * (start if found is not None and found[0].strip() else start + 2)
    wrapper = TextWrapper(most, subsequent_indent=hang, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent = line[:start]
    return wrapper.fill(line[start:])
