"""Reads the text of a TOML file, and finds the places of its keys."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from policylang.language.diagnostics import Diagnostic, Source, Span, diagnose
from policylang.language.shown import shortened

_MOST = 1 << 20
_LONGEST = 200
_AT = re.compile(r" \(at line (\d+), column (\d+)\)$| \(at end of document\)$")


def read_text(path: Path, name: str, noun: str) -> Source | Diagnostic:
    """The text of a file under the name that reports will give it. ``noun``: what the file should be."""
    shown = shortened(name, _LONGEST)
    try:
        if os.path.isdir(path):
            return diagnose("APL153", f"`{shown}` is a folder", help=f"name the file of {noun}")
        if os.path.exists(path) and not path.is_file():
            return diagnose("APL153", f"`{shown}` is not a regular file", help=f"name the file of {noun}")
        with path.open("rb") as stream:
            content = stream.read(_MOST + 1)
    except (OSError, ValueError) as error:
        reason = ((isinstance(error, OSError) and error.strerror) or str(error)).lower()
        return diagnose("APL153", f"`{shown}` cannot be read: {reason}")
    start = Span(Source(shown, ""), 0, 0)
    if len(content) > _MOST:
        return diagnose("APL153", f"the file is larger than the 1 MiB that {noun} may have", start)
    try:
        return Source(shown, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"the file is not text: byte 0x{content[error.start]:02x} in line {line} is not UTF-8"
        return diagnose("APL153", message, start, help=f"{noun} is a UTF-8 text file")


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
    """Where a text has a key and its value, as far as its line goes; both are the header for a table with one."""

    key: Span
    value: Span


def place_of(source: Source, table: Sequence[str], key: str | None = None, number: int = 0) -> KeyPlace:
    """Find a key by its name on the lines below its table's header; the header, or the start of the
    text, where it is not found. ``number``: which of the tables of one name."""
    nowhere = Span(source, 0, 0)
    place, start = KeyPlace(nowhere, nowhere), 0
    if table:
        name = r"[ \t]*\.[ \t]*".join(map(_name, table))
        headers = list(re.finditer(rf"^[ \t]*(\[\[?[ \t]*{name}[ \t]*\]\]?)", source.text, re.MULTILINE))
        if number >= len(headers):
            return place_of(source, table[:-1], table[-1])
        span = Span(source, *headers[number].span(1))
        place, start = KeyPlace(span, span), span.end
    if key is not None:
        line = re.compile(rf"^[ \t]*({_name(key)})[ \t]*=[ \t]*((?:[^\n#]*[^\s#])?)", re.MULTILINE)
        if (found := line.search(source.text, start)) is not None:
            return KeyPlace(Span(source, *found.span(1)), Span(source, *found.span(2)))
    return place


def _name(key: str) -> str:
    """The pattern of a key, in quotes or not."""
    return rf"[\"']?{re.escape(key)}[\"']?"
