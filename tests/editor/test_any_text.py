"""Whatever a text is, the answers about names and form are there, and lie within it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.editor.actions import definition, formatted, highlights, references, symbols
from policylang.editor.state import Document, State, read_text
from policylang.language.diagnostics import Source
from policylang.language.files import read_source

POLICY = (Path(__file__).resolve().parents[2] / "policies" / "llama3_sac.apl").read_text(encoding="utf-8")
PIECES = st.sampled_from(
    ["let big = mm", "save big", "(", ")", ";", "\n", "\r\n", "\r", "# big", '"', 'include "', 'include "a.apl"', "𝛼",
     "include <fsdp>", 'device "x\x00"', "device h100", "\x00", "\ud800", "//", "let", "=", "where", "big", "->", " ",
     "  \t", "# --- x ---", "\u2028", "\x0b", "include \"" + "a" * 300 + '"', "\ufeff", "let big = big", "2nd"]
)  # fmt: skip


@st.composite
def broken_policies(draw: st.DrawFn) -> str:
    """A real policy with a hole and something in it, or pieces in any order."""
    pieces = "".join(draw(st.lists(PIECES, max_size=12)))
    if draw(st.booleans()):
        return pieces
    start = draw(st.integers(0, len(POLICY)))
    end = draw(st.integers(start, min(len(POLICY), start + 60)))
    return POLICY[:start] + pieces + POLICY[end:]


def check_answers(made: pytest.TempPathFactory, text: str, offset: int) -> None:
    folder = made.getbasetemp() / "any_text"
    folder.mkdir(exist_ok=True)
    path = folder / "mine.apl"
    document = Document(path.as_uri(), 1, Source("mine.apl", text), path)
    state = State(document, read_text(document, None, read_source))
    end = document.positions.position(len(text))
    definition(state, offset)
    references(state, offset, declaration=True)
    ranges = [each.range for each in (*highlights(state, offset), *(formatted(state) or ()))]
    ranges += [each.location.range for each in symbols(state)]
    for each in ranges:
        assert (each.start.line, each.start.character) <= (each.end.line, each.end.character)
        assert (each.end.line, each.end.character) <= (end.line, end.character)


@given(broken_policies(), st.floats(0, 1))
@settings(max_examples=12)
def test_any_text_is_answered(tmp_path_factory: pytest.TempPathFactory, text: str, where: float) -> None:
    check_answers(tmp_path_factory, text, int(len(text) * where))


@pytest.mark.slow
@given(broken_policies(), st.floats(0, 1))
@settings(max_examples=300)
def test_any_of_many_texts_is_answered(tmp_path_factory: pytest.TempPathFactory, text: str, where: float) -> None:
    check_answers(tmp_path_factory, text, int(len(text) * where))
