"""Symbols of a document and of a workspace, and formatting as edits, which comes to what ``policylang fmt`` writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from lsprotocol import types

from policylang.api.load import format_text
from policylang.editor.outline import flat, formatted, formatted_between, symbols, workspace_symbols
from policylang.editor.state import Document, Positions, State, read_text
from policylang.language.diagnostics import Source
from policylang.language.files import read_source
from policylang.language.layout import LayoutChange, layout_changes
from policylang.language.resources import policies_folder
from tests.editor.policies import PoliciesAtHand
from tests.language.test_layout import layouts

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


ALL_POLICIES = sorted(
    [*policies_folder().glob("*.apl"), *(ROOT / "examples").glob("*.apl"), *ROOT.glob("tests/**/*.apl")]
)


def fmt(text: str) -> str | None:
    written = format_text(text.encode()).written
    return None if written is None else written.decode()


def state_of_text(text: str) -> State:
    document = Document("untitled:1", 1, Source("untitled:1", text))
    return State(document, read_text(document, None, read_source))


def after(text: str, edits: list[types.TextEdit]) -> str:
    """As a client makes edits: from the last to the first."""
    positions = Positions(text)
    for edit in reversed(edits):
        start, end = positions.offset(edit.range.start), positions.offset(edit.range.end)
        text = text[:start] + edit.new_text + text[end:]
    return text


@pytest.mark.parametrize("path", ALL_POLICIES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_edits_make_what_fmt_writes(path: Path) -> None:
    text = path.read_bytes().decode()
    loose = re.sub(r"^(?=\S)", "  ", text.replace(" in ", "   in "), flags=re.MULTILINE)
    for each in (loose, loose.replace("\n", "\r\n")):
        changes = layout_changes(Source("a", each))
        assert (None if changes is None else applied(each, changes)) == fmt(each)
    assert layout_changes(Source("a", fmt(text) or "")) == ()


def test_edits_are_of_the_places_that_change_and_counted_in_utf_16() -> None:
    text = "policy 𝛼\r\n\r\n\r\nsave 𝛼  or  mm # 𝛼𝛽\r\nmm→save\r\nsave bmm  \r\n"
    edits = formatted(state_of_text(text))
    assert edits is not None
    assert after(text, edits) == "policy 𝛼\r\n\r\nsave 𝛼 or mm  # 𝛼𝛽\r\nmm -> save\r\nsave bmm\r\n" == fmt(text)
    assert [(each.range.start.line, each.range.start.character) for each in edits] == [
        (2, 0), (3, 7), (3, 11), (3, 15), (4, 2), (5, 8),
    ]  # fmt: skip
    assert [each.new_text for each in edits] == ["", " ", " ", "  ", " -> ", ""]


def test_a_mistake_leaves_the_document_alone() -> None:
    text = "save   mm\nsav  bmm  or\nsave(  mm )\n"
    state = state_of_text(text)
    assert formatted(state) is None
    assert formatted_between(state, 0, len(text)) == []


def test_a_range_is_formatted_with_the_whole_of_its_lines() -> None:
    text = "save   mm\nsave   bmm;save x\n\n\nsave   y\n"
    for place, wanted in (
        ((0, text.index("\n") + 1), text.replace("save   mm", "save mm")),
        ((text.index("bmm"), text.index("bmm")), text.replace("save   bmm;save x", "save bmm\nsave x")),
        ((0, len(text)), "save mm\nsave bmm\nsave x\n\nsave y\n"),
    ):
        assert after(text, formatted_between(state_of_text(text), *place)) == wanted


def applied(text: str, changes: Iterable[LayoutChange]) -> str:
    """The text with changes made that do not overlap, in the order of the text."""
    parts, done = [], 0
    for change in changes:
        parts += (text[done : change.start], change.text)
        done = change.end
    return "".join((*parts, text[done:]))


@given(layouts())
@settings(max_examples=20, deadline=None)
def test_any_layout(text: str) -> None:
    check_layout(text)


@pytest.mark.slow
@given(layouts())
@settings(max_examples=500, deadline=None)
def test_any_of_many_layouts(text: str) -> None:
    check_layout(text)


def check_layout(text: str) -> None:
    changes = layout_changes(Source("a", text))
    assert (None if changes is None else applied(text, changes)) == fmt(text)
