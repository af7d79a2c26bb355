"""Where a span lies for an editor: the address of its file, and its range there in the encoding of the client."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from lsprotocol import types

from policylang.editor.positions import Positions
from policylang.editor.state import State
from policylang.language import syntax
from policylang.language.devices.reading import bundled_devices, find_device
from policylang.language.diagnostics import Source, Span
from policylang.language.files import bundled_file
from policylang.language.resources import devices_folder


def location(state: State, span: Span) -> types.Location | None:
    """Of a span in the document, in a file that it includes, in the prelude or in a device profile; None where the
    text came from no file that is known, a table that a profile names for instance."""
    uri = uri_of(state, span.source)
    return None if uri is None else types.Location(uri, positions_of(state, span.source).range(span))


def uri_of(state: State, source: Source) -> str | None:
    """Of the file that a source was read from, as the document met it."""
    if source == state.document.source:
        return state.document.uri
    path = path_of(state, source.name)
    return None if path is None else uri_of_path(path)


def path_of(state: State, name: str) -> Path | None:
    """Of the file that reports call by this name."""
    path = state.text.expansion.files.get(name)
    if path is not None:
        return path
    if name.startswith("<") and name.endswith(">"):
        word = name[1:-1]
        return bundled_file(word) or (devices_folder() / f"{word}.toml" if word in bundled_devices() else None)
    for placed in state.text.expansion.statements:
        if isinstance(placed.statement, syntax.Device) and placed.statement.target == name:
            found = find_device(name, placed.folder)
            return found[0] if isinstance(found, tuple) else None
    beside = Path() if state.document.path is None else state.document.path.parent
    named = beside / name  # the project's settings are called as seen from the document, the client's in full
    return named if "\0" not in name and os.path.isfile(named) else None


def uri_of_path(path: Path) -> str:
    """Of a file, without ``..``: editors take two spellings of one file for two files."""
    plain = os.path.abspath(path)
    return Path(plain if os.path.realpath(plain) == os.path.realpath(path) else os.path.realpath(path)).as_uri()


def positions_of(state: State, source: Source) -> Positions:
    """Of a source, in the encoding that the document's client and the server agreed on."""
    if source == state.document.source:
        return state.document.positions
    return _positions(source.text, state.document.encoding)


@lru_cache(maxsize=64)
def _positions(text: str, encoding: types.PositionEncodingKind) -> Positions:
    return Positions(text, encoding)
