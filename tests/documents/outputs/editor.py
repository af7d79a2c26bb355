"""What the editor shows of a policy on a snapshot: hints at the ends of lines, and what is under the pointer."""

from __future__ import annotations

import shlex
from functools import cache
from typing import TYPE_CHECKING

from tests.documents.outputs.pages import ROOT, Shown

if TYPE_CHECKING:
    from policylang.editor.state import State

_WIDEST = 64
"""Of the statements beside which hints stand in one column."""


@cache
def _state(policy: str, graph: str, device: str) -> State:
    from policylang.api.load import load_device
    from policylang.api.planned_graphs import facts_of
    from policylang.editor.state import Document, State, read_graph, read_text
    from policylang.language.diagnostics import Source
    from policylang.language.files import read_source

    path = ROOT / "policies" / f"{policy}.apl"
    document = Document(path.as_uri(), 1, Source(path.name, path.read_text(encoding="utf-8")), path)
    facts = facts_of(ROOT / "docs" / "graphs" / graph)
    text = read_text(document, facts, read_source)
    planned = read_graph(text, facts, graph, None, load_device(device))
    assert planned is not None
    planned.look()
    planned.weigh()
    return State(document, text, planned, facts)


def hints(shown: Shown) -> str:
    """``hints POLICY GRAPH DEVICE``: the statements of a bundled policy with the figures at their ends."""
    from policylang.editor.hover import hints as made

    state = _state(*shown.words[1:])
    text = state.document.source.text
    lines = text.split("\n")
    found = [(each.position, each.label) for each in made(state, 0, len(text))]
    width = max(place.character for place, _ in found if place.character <= _WIDEST)
    return "\n".join(f"{lines[place.line][: place.character]:{width}}  {label}" for place, label in found)


def hover(shown: Shown) -> str:
    """``hover POLICY GRAPH DEVICE TEXT``: what is under the first character of a text, as clients without Markdown
    show it."""
    from policylang.editor.hover import hover as made

    _, policy, graph, device, text = shlex.split(shown.name)
    state = _state(policy, graph, device)
    found = made(state, state.document.source.text.index(text), markdown=False)
    assert found is not None
    return str(found.contents.value)  # type: ignore[union-attr]


PRODUCERS = {"hints": hints, "hover": hover}
