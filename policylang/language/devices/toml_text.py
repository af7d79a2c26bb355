"""Reads the text of a TOML file, and finds the places of its keys."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from policylang.language.diagnostics import Diagnostic, Source, Span, diagnose
from policylang.language.files import decoded, read_limited
from policylang.language.shown import shortened

_MOST = 1 << 20
_LONGEST = 200
_AT = re.compile(r" \(at line (\d+), column (\d+)\)$| \(at end of document\)$")


def read_text(path: Path, name: str, noun: str) -> Source | Diagnostic:
    """The text of a file under the name that reports will give it. ``noun``: what the file should be."""
    shown = shortened(name, _LONGEST)
    content = read_limited(path, shown, _MOST, "APL153", f"name the file of {noun}")
    if isinstance(content, Diagnostic):
        return content
    if len(content) > _MOST:
        message = f"the file is larger than the 1 MiB that {noun} may have"
        return diagnose("APL153", message, Span(Source(shown, ""), 0, 0))
    return decoded(content, shown, "APL153", noun)


def tables_of(source: Source, code: str) -> dict[str, Any] | Diagnostic:
    """Parse a TOML text; a diagnostic of this code where it is none."""
    try:
        return tomllib.loads(source.text)
    except RecursionError:
        return diagnose(code, "the file nests lists or tables too deep", Span(source, 0, 0))
    except ValueError as error:  # tomllib's own error is one, and so is a number of more digits than Python reads
        message = str(error)
    start, at = 0, _AT.search(message)
    if at is not None:
        message = message[: at.start()]
        start = len(source.text)
        if at[1]:
            lines = source.text.split("\n")
            start = sum(len(line) + 1 for line in lines[: int(at[1]) - 1]) + int(at[2]) - 1
    if "digits" in message:
        message = "a number has too many digits"
    return diagnose(code, f"the file is not TOML: {message[:1].lower()}{message[1:]}", Span(source, start, start))


@frozen
class KeyPlace:
    """The place of a key in a text, and its value to the end of its line; of a table with a header, both are the
    header."""

    key: Span
    value: Span


def place_of(source: Source, table: Sequence[str], key: str | None = None, number: int = 0) -> KeyPlace:
    """Find a key by its name on the lines below its table's header; the header, or the start of the
    text, where it is not found. ``number``: which of the tables of one name."""

    def pattern(name: str) -> str:
        return rf"[\"']?{re.escape(name)}[\"']?"  # in quotes or not

    header = Span(source, 0, 0)
    if table:
        name = r"[ \t]*\.[ \t]*".join(map(pattern, table))
        headers = list(re.finditer(rf"^[ \t]*(\[\[?[ \t]*{name}[ \t]*\]\]?)", source.text, re.MULTILINE))
        if number >= len(headers):
            return place_of(source, table[:-1], table[-1])
        header = Span(source, *headers[number].span(1))
    if key is not None:
        line = re.compile(rf"^[ \t]*({pattern(key)})[ \t]*=[ \t]*((?:[^\n#]*[^\s#])?)", re.MULTILINE)
        if (found := line.search(source.text, header.end)) is not None:
            return KeyPlace(Span(source, *found.span(1)), Span(source, *found.span(2)))
    return KeyPlace(header, header)
