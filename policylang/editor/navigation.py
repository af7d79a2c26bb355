"""The form of one policy: where its names are defined and used, the files that it names, its outline and its layout.

The words of a statement that cannot be read still count, so that a mistake does not hide the name on its line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import get_args

from attrs import frozen
from lsprotocol import types

from policylang.editor.state import State, location, uri_of_path
from policylang.language import syntax
from policylang.language.devices.reading import find_device
from policylang.language.diagnostics import Source, Span
from policylang.language.files import bundled_file
from policylang.language.layout import format_source, line_end_of
from policylang.language.lexer import split, words_of
from policylang.language.operators import prelude_group
from policylang.language.parser import parse_file
from policylang.language.selectors import selector_of, walk
from policylang.language.shown import shortened
from policylang.language.syntax import Device, Include, Let, Statement, Word

_START = types.Range(types.Position(0, 0), types.Position(0, 0))
_NO_NAMES_AFTER = frozenset(
    ("IN", "OUTSIDE", "COMPARISON", "POLICY", "OVER", "BLOCKS", "WHERE", "IS", "NOT", "UNDECIDED", "REQUIRES", "DEVICE")
)
"""Words behind which a name is one of a module, a figure or a dimension, in a statement that cannot be read."""


# --- names ---


@frozen
class Occurrence:
    """A word of a selector, or the name that a ``let`` defines."""

    name: str
    span: Span
    defines: bool = False


@lru_cache(maxsize=64)
def occurrences(source: Source) -> tuple[Occurrence | Include | Device, ...]:
    """The names of a text, and its statements that name files, in its order; linear in its length."""
    found: list[Occurrence | Include | Device] = []
    read = {statement.span.start: statement for statement in parse_file(source)[0].statements}
    for start, end in split(source).ranges:
        found += _read(read[start]) if start in read else _unread(source, start, end)
    return tuple(found)


def _read(statement: Statement) -> Iterator[Occurrence | Include | Device]:
    if isinstance(statement, Include | Device):
        yield statement
    if isinstance(statement, Let):
        yield _defined_by(statement)
    selector = selector_of(statement)
    for part in walk(selector) if selector is not None else ():
        if isinstance(part, Word):
            yield Occurrence(part.text, part.span)


def _defined_by(let: Let) -> Occurrence:
    return Occurrence(let.name, words_of(let.span.source, let.span.start, let.span.end)[1].span, defines=True)


def _unread(source: Source, start: int, end: int) -> Iterator[Occurrence]:
    before = ""
    for word in words_of(source, start, end):
        if word.type in ("NAME", "PATH") and before not in _NO_NAMES_AFTER:
            yield Occurrence(str(word), word.span, defines=before == "LET")
        before = word.type


def _at(state: State, offset: int) -> Occurrence | Include | Device | None:
    """The occurrence, include or device at an offset, the offset after its last character included."""
    found = occurrences(state.document.source)
    return next((part for part in found if part.span.start <= offset <= part.span.end), None)


def _named(source: Source, name: str) -> Iterator[Occurrence]:
    return (part for part in occurrences(source) if isinstance(part, Occurrence) and part.name == name)


def _definition_of(state: State, name: str) -> Occurrence | None:
    """The ``let`` that counts: the first, one that can be read before others; else the group of the prelude."""
    lets = (placed.statement for placed in state.text.expansion.statements if isinstance(placed.statement, Let))
    let = next((let for let in lets if let.name == name), None)
    torn = next((each for each in _named(state.document.source, name) if each.defines), None)
    if let is None and torn is None:
        let = prelude_group(name)
    return torn if let is None else _defined_by(let)


def definition(state: State, offset: int) -> types.Location | None:
    """The place of the ``let``, the group or the file that is named at a character offset."""
    part = _at(state, offset)
    if isinstance(part, Include | Device):
        path = _file_of(state, part)
        return None if path is None else types.Location(uri_of_path(path), _START)
    found = None if part is None else _definition_of(state, part.name)
    return None if found is None else location(state, found.span)


def _file_of(state: State, statement: Include | Device) -> Path | None:
    """The file that a line of the document names; None where there is none such."""
    folder = Path() if state.document.path is None else state.document.path.parent
    path: Path | None
    if isinstance(statement, Device):
        found = find_device(statement.target, folder)
        path = found[0] if isinstance(found, tuple) else None
    else:
        path = bundled_file(statement.target) if statement.bundled else folder / statement.target
    try:
        return path if path is not None and os.path.isfile(path) else None
    except (OSError, ValueError):
        return None


def references(state: State, offset: int, *, declaration: bool) -> list[types.Location]:
    """The uses of the name at an offset in the document and in what it includes, the document's own first."""
    name = _at(state, offset)
    if not isinstance(name, Occurrence):
        return []
    sources = [state.document.source, *(each.statement.span.source for each in state.text.expansion.statements)]
    if (defined := _definition_of(state, name.name)) is not None:
        sources.append(defined.span.source)
    uses = (each for source in dict.fromkeys(sources) for each in _named(source, name.name))
    places = (location(state, each.span) for each in uses if declaration or not each.defines)
    return [place for place in places if place is not None]


def highlights(state: State, offset: int) -> list[types.DocumentHighlight]:
    """The uses of the name at an offset within the document."""
    name = _at(state, offset)
    if not isinstance(name, Occurrence):
        return []
    write, read = types.DocumentHighlightKind.Write, types.DocumentHighlightKind.Read
    return [
        types.DocumentHighlight(state.document.positions.range(each.span), write if each.defines else read)
        for each in _named(state.document.source, name.name)
    ]


# --- outline and layout ---

_LONGEST = 80
_KIND = types.SymbolKind
_KINDS: dict[type, types.SymbolKind] = {
    syntax.PolicyName: _KIND.Module,
    syntax.Include: _KIND.File,
    syntax.Let: _KIND.Variable,
    **dict.fromkeys((syntax.Rule, syntax.Undecided), _KIND.Function),
    **dict.fromkeys(get_args(syntax.Expectation), _KIND.Boolean),
    **dict.fromkeys((syntax.Requires, syntax.Device, syntax.Blocks), _KIND.Property),
}
"""Rewrites and scheduling lines, which are not here, are events."""


def symbols(state: State) -> list[types.SymbolInformation]:
    """The statements of a document that can be read; a ``let`` by its name."""
    return [
        types.SymbolInformation(
            types.Location(state.document.uri, state.document.positions.range(each.span)),
            each.name if isinstance(each, Let) else shortened(each.span.one_line, _LONGEST),
            _KINDS.get(type(each), _KIND.Event),
        )
        for each in state.text.file.statements
    ]


def formatted(state: State) -> list[types.TextEdit] | None:
    """The edit of the lines that canonical form changes, from the first to the last; None where a mistake leaves the
    document without one."""
    source = state.document.source
    made = format_source(source).text
    if made is None:
        return None
    old = source.text.splitlines(keepends=True)
    new = made.replace("\n", line_end_of(source.text)).splitlines(keepends=True)
    first = _alike(old, new)
    last = _alike(reversed(old[first:]), reversed(new[first:]))
    start, end = len("".join(old[:first])), len(source.text) - len("".join(old[len(old) - last :]))
    text = "".join(new[first : len(new) - last])
    return [types.TextEdit(state.document.positions.between(start, end), text)] if text or start < end else []


def _alike(old: Iterable[str], new: Iterable[str]) -> int:
    """The number of equal lines at the beginning of both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))
