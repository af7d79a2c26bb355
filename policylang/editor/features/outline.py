"""Symbols and folding ranges of a policy."""

from __future__ import annotations

from lsprotocol import types

from policylang.editor.state import State


def symbols(state: State) -> list[types.DocumentSymbol]:
    """The statements of a document, under the comment lines that head them."""
    return []


def folding(state: State) -> list[types.FoldingRange]:
    """Statements of several lines, blocks of comments, and what stands under a heading."""
    return []
