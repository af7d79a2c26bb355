"""What a word or a rule means and does, under the pointer."""

from __future__ import annotations

from lsprotocol import types

from policylang.editor.state import State


def hover(state: State, offset: int) -> types.Hover | None:
    """Of the word at a character offset, else of the rule around it."""
    return None
