"""Tables of measured collectives, a row for each of a group's collectives and a column for each size.

The form is that of AutoParallel's overlap simulator::

    Group    Group Size  Collective                1MB (ms)    2MB (ms)
    -------  ----------  ----------------------  ----------  ----------
    0                64  all_gather_into_tensor        0.25        0.45

A size is that of the tensor that one rank puts in; ``MB`` is 1024² bytes there.
"""

from __future__ import annotations

import re
from itertools import pairwise
from math import isfinite
from pathlib import Path

from policylang.language.devices.collectives import collective_kind
from policylang.language.devices.profile import CollectiveTimes
from policylang.language.devices.text_file import read_text
from policylang.language.diagnostics import Diagnostic, Source, Span, diagnose

_COLUMN = re.compile(r"(?P<size>\d{1,12}(?:\.\d{1,9})?)\s*(?P<unit>[KMGT]?)i?B\s*\((?P<time>ns|us|µs|ms|s)\)")
_WORD = re.compile(r"\S+")
_RULE = re.compile(r"[\s|:+=-]+")
_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
_LONGEST_TIME = 1e6

Row = tuple[str, CollectiveTimes]
"""The name of a group, and what was measured there."""


def read_table(path: Path, name: str) -> tuple[Row, ...] | Diagnostic:
    """The rows of a table in the order of the file."""
    source = read_text(path, name, "a table of collective times")
    return source if isinstance(source, Diagnostic) else table_rows(source)


def table_rows(source: Source) -> tuple[Row, ...] | Diagnostic:
    """The rows that a text holds, or the first thing that is wrong with it."""
    columns: list[tuple[float, float]] = []  # bytes, and the seconds of one unit
    rows: dict[tuple[str, int, str], CollectiveTimes] = {}
    start = 0
    for line in source.text.splitlines(keepends=True):
        span = Span(source, start, start + len(line.rstrip()))
        start += len(line)
        if _RULE.fullmatch(line) or line.lstrip().startswith("#"):
            continue
        if not columns:
            columns = [(float(at["size"]) * _BYTES[at["unit"]], _SECONDS[at["time"]]) for at in _COLUMN.finditer(line)]
            if not columns:
                if "Collective" not in line:  # no table at all, and perhaps nobody's to be shown
                    span = Span(Source(source.name, ""), 0, 0)
                example = "for example `Group  Group Size  Collective  1MB (ms)`"
                return _wrong("the first line names no sizes", span, example)
            sizes = [size for size, _ in columns]
            if sizes[0] <= 0 or any(low >= high for low, high in pairwise(sizes)):
                return _wrong("the sizes do not rise from column to column", span)
            continue
        row = _row(source, span, columns)
        if isinstance(row, Diagnostic):
            return row
        group, times = row
        key = (group, times.ranks, times.collective)
        if key in rows:
            return _wrong(f"`{times.collective}` of group `{group}` stands twice", span)
        rows[key] = times
    if not rows:
        return _wrong("the table has no rows", Span(source, 0, 0))
    return tuple((group, times) for (group, _, _), times in rows.items())


def _row(source: Source, span: Span, columns: list[tuple[float, float]]) -> Row | Diagnostic:
    words = [Span(source, span.start + at.start(), span.start + at.end()) for at in _WORD.finditer(span.text)]
    if len(words) != 3 + len(columns):
        found = f"{len(words)} words, and {3 + len(columns)} are wanted"
        return _wrong(f"the row has {found}", span, "a group, its size, a collective and a time for each size")
    group, size, collective, *figures = words
    if not re.fullmatch(r"[0-9]{1,9}", size.text) or int(size.text) < 1:
        return _wrong(f"`{size.text}` is not the size of a group", size)
    if collective_kind(collective.text) is None:
        return _wrong(f"`{collective.text}` is no collective", collective)
    points = []
    for (much, unit), figure in zip(columns, figures, strict=True):
        try:
            seconds = float(figure.text) * unit
        except ValueError:
            return _wrong(f"`{figure.text}` is not a number", figure)
        if not (isfinite(seconds) and 0 < seconds <= _LONGEST_TIME):
            return _wrong(f"`{figure.text}` is not the time of a collective", figure)
        points.append((much, seconds))
    return group.text, CollectiveTimes(collective.text, int(size.text), tuple(points))


def _wrong(message: str, span: Span, help: str | None = None) -> Diagnostic:
    return diagnose("APL158", message, span, help=help)
