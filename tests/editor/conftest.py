"""The states of texts, as features get them, and a server behind a real client."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

from policylang.api.planned_graphs import facts_of
from policylang.editor.state import Document, State, read_graph, read_text
from policylang.language.diagnostics import Source
from policylang.language.files import read_source

SERVER = [sys.executable, "-m", "policylang.commands.cli", "lsp"]
GRAPHS = Path(__file__).resolve().parents[2] / "docs" / "graphs"


@pytest.fixture
def state_of(tmp_path: Path) -> Callable[..., State]:
    """The state of a text in a file that needs not exist; ``graph`` names a snapshot of docs/graphs, or is a file."""

    def made(text: str, graph: str | Path | None = None, *, name: str = "mine.apl", device=None) -> State:
        file = tmp_path / name
        document = Document(file.as_uri(), 1, Source(name, text), file)
        facts = None if graph is None else facts_of(GRAPHS / graph)
        text_state = read_text(document, facts, read_source)
        planned = None if facts is None else read_graph(text_state, facts, str(graph), None, device)
        return State(document, text_state, planned, facts)

    return made
