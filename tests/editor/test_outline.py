"""Symbols of a document and of a workspace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from lsprotocol import types

from policylang.editor.outline import flat, symbols, workspace_symbols
from policylang.editor.state import State
from policylang.language.resources import policies_folder
from tests.editor.policies import PoliciesAtHand

ROOT = Path(__file__).resolve().parents[2]
POLICIES = sorted([*policies_folder().glob("*.apl"), *(ROOT / "examples").glob("*.apl")])
TEXT = """\
# What this is for. And more of it,
# on a second line.
policy 𝛼
requires policylang >= 0.2

include "a.apl"
include <fsdp>   # twice

# --- names ------------------------------

# The large ones
let 𝛼𝛽 = mm where (
    bytes > 3 MiB  # not small
)
let small = bmm

# of a single line
save 𝛼𝛽 in layers.0
sav bmm or

# ==== rules ====
blocks layers.*; save small
undecided -> save
expect saved <= 3 GiB
overlap collective
# the end
"""


def shown(found: Sequence[types.DocumentSymbol], depth: int = 0) -> list[str]:
    return [line for each in found for line in ("  " * depth + each.name, *shown(each.children or (), depth + 1))]


def test_statements_stand_under_what_heads_them(state_of) -> None:
    assert shown(symbols(state_of(TEXT))) == [
        "What this is for",
        "  policy 𝛼",
        "  requires policylang >= 0.2",
        'include "a.apl"',
        "include <fsdp>",
        "names",
        "  The large ones",
        "    𝛼𝛽",
        "    small",
        "  save 𝛼𝛽 in layers.0",
        "rules",
        "  blocks layers.*",
        "  save small",
        "  undecided -> save",
        "  expect saved <= 3 GiB",
        "  overlap collective",
    ]


def test_a_let_is_selected_by_its_name_and_tells_its_selector(state_of) -> None:
    for text in (TEXT, TEXT.replace("\n", "\r\n")):
        names = symbols(state_of(text))[3]
        assert names.children is not None
        assert names.children[0].children is not None
        let = names.children[0].children[0]
        assert let.detail == "mm where ( bytes > 3 MiB )"
        assert let.selection_range == types.Range(types.Position(11, 4), types.Position(11, 8))
        assert let.range == types.Range(types.Position(11, 0), types.Position(13, 1))
        assert names.range.end.line == 17


def test_a_client_without_trees_gets_a_list(state_of) -> None:
    state = state_of(TEXT)
    found = flat(state, symbols(state))
    assert [each.name for each in found] == [line.strip() for line in shown(symbols(state))]
    assert found[7].container_name == "The large ones"
    assert found[0].container_name is None


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_the_ranges_of_every_policy_lie_in_one_another(path: Path, state_of) -> None:
    text = path.read_text(encoding="utf-8")
    for each in (text, text.replace("\n", "\r\n") + "sav mm (\n"):
        state = state_of(each)
        _check_nesting(symbols(state), 0, len(each), state)
        said = [line.strip() for line in shown(symbols(state))]
        assert len(said) >= len(state.text.file.statements)


def _check_nesting(found: Sequence[types.DocumentSymbol], start: int, end: int, state: State) -> None:
    offset = state.document.positions.offset
    for each in found:
        a, b = offset(each.range.start), offset(each.range.end)
        assert start <= a <= offset(each.selection_range.start) <= offset(each.selection_range.end) <= b <= end
        assert each.name
        _check_nesting(each.children or (), a, b, state)
        start = b


@pytest.mark.parametrize("text", ["", "\n", "sav (mm", "# c", "\r\n\r\n"])
def test_texts_without_a_statement(text: str, state_of) -> None:
    assert symbols(state_of(text)) == []


def test_the_names_of_a_workspace(tmp_path: Path) -> None:
    files = {
        "a.apl": "let big_mm = mm\ninclude <llama3_sac>\n",
        "sub/b.apl": "let Small = mm\nsav mm\nlet tiny = (mm\n",
    }
    around = PoliciesAtHand.on(tmp_path, files).around()

    def found(query: str) -> list[tuple[str, str | None]]:
        made = workspace_symbols(around, query, types.PositionEncodingKind.Utf16)
        return [(each.name, each.container_name) for each in made]

    assert found("") == [("big_mm", "a.apl"), ("Small", "b.apl"), ("tiny", "b.apl")]
    assert found("sml") == [("Small", "b.apl")]
    assert found("bm") == [("big_mm", "a.apl")]
    assert found("x") == []
