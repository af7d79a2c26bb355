"""Figures at the end of each rule, and the totals on the ``policy`` line."""

from __future__ import annotations

from lsprotocol import types

from policylang.editor.state import State


def hints(state: State, start: int, end: int) -> list[types.InlayHint]:
    """Of the rules between two character offsets; none where the text has no plan."""
    return []
