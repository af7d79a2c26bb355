"""Formatting, of a range too."""

from __future__ import annotations

from lsprotocol import types

from policylang.editor.state import State


def formatted(state: State, start: int, end: int) -> list[types.TextEdit] | None:
    """The edits that bring the statements between two offsets into canonical form; None for a text that has none."""
    return None
