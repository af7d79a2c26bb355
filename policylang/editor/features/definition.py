"""Where a name is defined, where it is used, and giving it another."""

from __future__ import annotations

from collections.abc import Sequence

from lsprotocol import types

from policylang.editor.state import State


def definition(state: State, offset: int) -> list[types.Location]:
    """Of the ``let`` name, the group or the include at a character offset."""
    return []


def references(state: State, others: Sequence[State], offset: int, *, declaration: bool) -> list[types.Location]:
    """Every use of the name at an offset, in this document, in the open ones and in those that they include."""
    return []


def renameable(state: State, offset: int) -> types.Range | None:
    """The range of the name at an offset, where it can be renamed."""
    return None


def renamed(state: State, others: Sequence[State], offset: int, name: str) -> types.WorkspaceEdit | str:
    """The edit that gives the name at an offset another, or why that cannot be."""
    return "nothing here has a name that can be changed"


def document_links(state: State) -> list[types.DocumentLink]:
    """The files of ``include`` and ``device`` lines."""
    return []
