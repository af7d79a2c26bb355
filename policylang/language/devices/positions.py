"""Where the tables and the keys of a TOML text stand: ``tomllib`` says it of syntax errors alone.

One pass over the tokens of a text that ``tomllib`` has read. What stands inside an inline table or an array has no
position of its own, and is found at the key that holds it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from attrs import define, field, frozen

from policylang.language.diagnostics import Source, Span

Path = tuple[str | int, ...]
"""``("network", 1, "latency")``: the names and numbers that lead to a figure."""

_AT = re.compile(r" \(at line (\d+), column (\d+)\)$| \(at end of document\)$")
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'"
    r"|#[^\n]*|\n|[ \t\r]+|[\[\]{}=,.]|[^\s\[\]{}=,.\"'#]+|.",
    re.DOTALL,
)


@frozen
class Position:
    key: Span
    value: Span
    """Of a table that stands under a header, the header."""


@define
class _Statement:
    tokens: list[re.Match[str]] = field(factory=list)
    depth: int = 0


def positions(source: Source) -> Mapping[Path, Position]:
    """The place of each table and each key; a text that is no TOML gives some, and no error."""
    found: dict[Path, Position] = {}
    table: Path = ()
    counts: dict[Path, int] = {}
    for statement in _statements(source.text):
        texts = [token.group() for token in statement]
        whole = Span(source, statement[0].start(), statement[-1].end())
        if texts[0] != "[":
            at = _equals(texts)
            if at is None or at + 1 >= len(statement):
                continue
            key = Span(source, statement[0].start(), statement[at - 1].end())
            value = Span(source, statement[at + 1].start(), statement[-1].end())
            _note(found, (*table, *_names(texts[:at])), Position(key, value))
            continue
        names = tuple(_numbered(_names(texts), counts))
        if texts[1:2] == ["["] and names:
            counts[names] = counts.get(names, -1) + 1
            names = (*names, counts[names])
        table = names
        _note(found, names, Position(whole, whole))
    return found


def place_of(path: Path, known: Mapping[Path, Position]) -> Position | None:
    """The place of what a path leads to, or of the nearest that holds it."""
    while path and path not in known:
        path = path[:-1]
    return known.get(path)


def misread(message: str, source: Source) -> tuple[str, Span]:
    """What ``tomllib`` says of a text that is no TOML, in the words of a diagnostic, and the place that it means."""
    at = _AT.search(message)
    start = 0
    if at is not None:
        message = message[: at.start()]
        start = len(source.text)
        if at[1]:
            lines = source.text.split("\n")
            start = sum(len(line) + 1 for line in lines[: int(at[1]) - 1]) + int(at[2]) - 1
    if "digits" in message:
        message = "a number has too many digits"
    return message[:1].lower() + message[1:], Span(source, start, start)


def _note(found: dict[Path, Position], path: Path, position: Position) -> None:
    for length in range(1, len(path) + 1):  # `a.b = 1` makes `a`
        found.setdefault(path[:length], position)


def _statements(text: str) -> Iterator[list[re.Match[str]]]:
    """The tokens of each header and each assignment, without blanks and comments."""
    statement = _Statement()
    for token in _TOKEN.finditer(text):
        piece = token.group()
        if piece == "\n" and statement.depth <= 0:
            if statement.tokens:
                yield statement.tokens
            statement = _Statement()
        elif not piece.isspace() and piece[0] != "#":
            statement.tokens.append(token)
            statement.depth += (piece in "[{") - (piece in "]}")
    if statement.tokens:
        yield statement.tokens


def _equals(texts: list[str]) -> int | None:
    return texts.index("=") if "=" in texts[1:] and texts[0] != "=" else None


def _names(texts: list[str]) -> list[str]:
    names = [text for text in texts if text not in "[]."]
    return [name[1:-1] if len(name) > 1 and name[0] in "\"'" and name[-1] == name[0] else name for name in names]


def _numbered(names: list[str], counts: Mapping[Path, int]) -> Iterator[str | int]:
    """``[network.more]`` speaks of the last ``[[network]]``."""
    path: Path = ()
    for at, name in enumerate(names):
        path = (*path, name)
        yield name
        if at < len(names) - 1 and path in counts:
            path = (*path, counts[path])
            yield counts[path[:-1]]
