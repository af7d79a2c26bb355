"""What may stand at a place of a policy."""

from __future__ import annotations

from lsprotocol import types

from policylang.editor.state import State


def completion(state: State, offset: int) -> types.CompletionList:
    """At a character offset, what fits best first."""
    return types.CompletionList(is_incomplete=False, items=[])
