"""The mends of diagnostics as edits, and what can be shown of a rule."""

from __future__ import annotations

from collections.abc import Sequence

from lsprotocol import types

from policylang.editor.state import State

EXPLAIN_NODE = "policylang.explainNode"
SHOW_PLAN = "policylang.showPlan"


def actions(state: State, start: int, end: int, only: Sequence[str] | None = None) -> list[types.CodeAction]:
    """What can be done about the text between two offsets."""
    return []


def explained(state: State, node: str) -> str:
    """What ``policylang explain --node`` says, as Markdown."""
    return ""


def page_of(state: State) -> str | None:
    """The page of ``policylang plan --html``, as text; None where the policy has no plan."""
    return None
