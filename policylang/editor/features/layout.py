"""Formatting, of a range too: what ``policylang fmt`` writes, as edits of the places where it differs.

The language has one form: what a client asks for in its options, such as the width of a tab, changes nothing.
"""

from __future__ import annotations

from lsprotocol import types

from policylang.editor.state import State
from policylang.language.layout import LayoutChange, layout_changes, layout_changes_between


def formatted(state: State) -> list[types.TextEdit] | None:
    """The edits that bring a document into canonical form; None where a mistake leaves it without one."""
    changes = layout_changes(state.document.source)
    return None if changes is None else [_edit(state, each) for each in changes]


def formatted_between(state: State, start: int, end: int) -> list[types.TextEdit]:
    """Those of the statements between two offsets that can be read, whatever else there is in the document."""
    return [_edit(state, each) for each in layout_changes_between(state.document.source, start, end)]


def _edit(state: State, change: LayoutChange) -> types.TextEdit:
    return types.TextEdit(state.document.positions.between(change.start, change.end), change.text)
