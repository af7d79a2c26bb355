"""Policies in files and in an editor, for tests of what reaches beyond one document."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen
from lsprotocol import types

from policylang.editor.state import Document, Positions, State, read_text
from policylang.language.diagnostics import Diagnostic, Source
from policylang.language.files import read_source


@frozen
class PoliciesAtHand:
    """A folder with policies, some of them open with other texts than on disk."""

    folder: Path
    unsaved: Mapping[str, str] = {}

    @classmethod
    def on(cls, folder: Path, files: Mapping[str, str], unsaved: Mapping[str, str] | None = None) -> PoliciesAtHand:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode())
        return cls(folder, unsaved or {})

    def state(self, name: str) -> State:
        document = self._document(name)
        return State(document, read_text(document, None, self._read))

    def text(self, name: str) -> str:
        return self.unsaved.get(name) or (self.folder / name).read_bytes().decode()

    def shown(self, place: types.Location) -> str:
        """``file:line:text`` of a place."""
        path = Path(place.uri.removeprefix("file://"))
        own = path.is_relative_to(self.folder)
        name = os.path.relpath(path, self.folder) if own else f"<{path.stem}>"
        text = self.text(name) if own else path.read_text(encoding="utf-8")
        positions, range = Positions(text), place.range
        found = text[positions.offset(range.start) : positions.offset(range.end)]
        return f"{name}:{range.start.line + 1}:{found}"

    def _document(self, name: str) -> Document:
        path = self.folder / name
        return Document(path.as_uri(), 1, Source(name, self.text(name)), path)

    def _read(self, path: Path, name: str) -> Source | Diagnostic:
        for each, text in self.unsaved.items():
            if os.path.realpath(self.folder / each) == os.path.realpath(path):
                return Source(name, text)
        return read_source(path, name)


def with_edits(text: str, edits: Sequence[types.TextEdit]) -> str:
    """A text after edits of it."""
    positions = Positions(text)
    places = [(positions.offset(each.range.start), positions.offset(each.range.end), each.new_text) for each in edits]
    for start, end, new in sorted(places, reverse=True):
        text = text[:start] + new + text[end:]
    return text
