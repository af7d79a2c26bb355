"""Names with their definitions and uses, the outline, and formatting, which writes what ``policylang fmt`` writes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

from hypothesis import given, settings
from lsprotocol import types

from policylang.api.load import format_text
from policylang.editor.actions import definition, formatted, highlights, references, symbols
from policylang.editor.state import Document, State, read_text
from policylang.language.diagnostics import Source
from policylang.language.files import read_source
from policylang.language.resources import policies_folder
from tests.editor.policies import PoliciesAtHand, with_edits
from tests.language.test_formatter import layouts

LIB = "# 𝛼 names\r\nlet big = mm where bytes > 64 MiB\r\nlet 𝛼𝛽 = big or bmm\r\n"
FILES = {
    "lib/names.apl": LIB,
    "lib/all.apl": 'include "names.apl"\n',
    "main.apl": (
        'policy main\ninclude "lib/all.apl"\nsave 𝛼𝛽, big  # big\nrecompute big in "big"\nsave matmul\nsave mm\n'
    ),
    "apart.apl": "let big = bmm\nsave big\nsave matmul, mm\n",
}


def at(editor: PoliciesAtHand, name: str, word: str, nth: int = 0) -> tuple[State, int]:
    state = editor.state(name)
    offset = -1
    for _ in range(nth + 1):
        offset = state.document.source.text.index(word, offset + 1)
    return state, offset


def defined(editor: PoliciesAtHand, name: str, word: str, nth: int = 0) -> str | None:
    found = definition(*at(editor, name, word, nth))
    return None if found is None else editor.shown(found)


def used(editor: PoliciesAtHand, name: str, word: str, nth: int = 0, *, declaration: bool = True) -> list[str]:
    return [editor.shown(each) for each in references(*at(editor, name, word, nth), declaration=declaration)]


# --- definitions ---


def test_a_name_leads_to_its_let_in_a_file_that_is_included_by_an_included_one(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES)
    assert defined(editor, "main.apl", "𝛼𝛽") == "lib/names.apl:3:𝛼𝛽"
    assert defined(editor, "main.apl", "big in") == "lib/names.apl:2:big"
    unsaved = PoliciesAtHand(tmp_path, {"lib/names.apl": "\n\n\nlet big = mm\n"})
    assert defined(unsaved, "main.apl", "big in") == "lib/names.apl:4:big"


def test_a_definition_leads_to_itself_and_comments_and_modules_nowhere(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES)
    assert defined(editor, "apart.apl", "big") == "apart.apl:1:big"
    for word in ("# big", '"big"', "save mm", "mm\n"):
        assert defined(editor, "main.apl", word) is None


def test_groups_are_in_the_prelude_and_bundled_names_in_the_library(tmp_path: Path) -> None:
    text = "include <llama3_sac>\nsave residual\nsave attention\ninclude <prelude>\n"
    editor = PoliciesAtHand.on(tmp_path, {"a.apl": text})
    assert re.fullmatch(r"<prelude>:\d+:attention", str(defined(editor, "a.apl", "attention")))
    assert re.fullmatch(r"<llama3_sac>:\d+:residual", str(defined(editor, "a.apl", "residual")))
    assert defined(editor, "a.apl", "llama3") == "<llama3_sac>:1:"
    assert defined(editor, "a.apl", "prelude") == "<prelude>:1:"


@pytest.mark.parametrize(("name", "word"), [("prelude", "all_gather, reduce"), ("llama3_sac", "residual per")])
def test_a_bundled_file_that_is_open_works_as_any(name: str, word: str) -> None:
    path = policies_folder() / f"{name}.apl"
    document = Document(path.as_uri(), 1, Source(str(path), path.read_text()), path)
    state = State(document, read_text(document, None, read_source))
    found = definition(state, document.source.text.index(word))
    assert found.uri == document.uri
    assert len(references(state, document.source.text.index(word), declaration=True)) >= 2


def test_a_group_that_a_let_hides_is_the_let(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, {"a.apl": "save matmul\nlet matmul = mm\nsave matmul\n"})
    assert defined(editor, "a.apl", "matmul") == defined(editor, "a.apl", "matmul", 2) == "a.apl:2:matmul"


def test_mistakes_leave_the_definition_where_it_is(tmp_path: Path) -> None:
    text = "save later\nlet later = mm\nlet later = bmm\nsav later or\nsave mm - later\nlet own = own\n"
    editor = PoliciesAtHand.on(tmp_path, {"a.apl": f"{text}let torn = mm or\nsave torn\n"})
    for nth in range(4):
        assert defined(editor, "a.apl", "later", nth) == "a.apl:2:later"
    assert defined(editor, "a.apl", "own", 1) == "a.apl:6:own"
    assert defined(editor, "a.apl", "torn", 1) == "a.apl:7:torn"


def test_files_are_definitions_too(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("")
    text = (
        'include "lib.apl"\ninclude "none.apl"\ndevice "cluster.toml"; device h100\ndevice "nowhere.toml"\ninclude "\n'
    )
    editor = PoliciesAtHand.on(tmp_path, {"a.apl": text, "lib.apl": ""})
    assert defined(editor, "a.apl", "lib") == defined(editor, "a.apl", "include") == "lib.apl:1:"
    assert defined(editor, "a.apl", "cluster") == "cluster.toml:1:"
    assert defined(editor, "a.apl", "h100") == "<h100-sxm>:1:"
    assert defined(editor, "a.apl", "none") is None
    assert defined(editor, "a.apl", "nowhere") is None


# --- uses ---


def test_a_name_is_used_in_the_document_and_in_what_it_includes(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES)
    own, library = ["main.apl:3:big", "main.apl:4:big"], ["lib/names.apl:2:big", "lib/names.apl:3:big"]
    assert used(editor, "main.apl", "big") == [*own, *library]
    assert used(editor, "main.apl", "big", declaration=False) == [*own, library[1]]
    assert used(editor, "apart.apl", "big") == ["apart.apl:1:big", "apart.apl:2:big"]
    assert used(editor, "main.apl", "matmul")[0] == "main.apl:5:matmul"
    assert used(editor, "main.apl", "matmul")[1].startswith("<prelude>:")
    assert used(editor, "main.apl", "mm\n") == ["main.apl:6:mm", "lib/names.apl:2:mm"]
    assert used(editor, "main.apl", "policy") == []


def test_includes_in_a_circle_end(tmp_path: Path) -> None:
    files = {"a.apl": 'include "b.apl"\nlet big = mm\n', "b.apl": 'include "a.apl"\nsave big\n'}
    assert used(PoliciesAtHand.on(tmp_path, files), "b.apl", "big") == ["b.apl:2:big", "a.apl:2:big"]


def test_a_text_in_no_file_knows_its_own_names() -> None:
    state = state_of_text("let big = mm\r\nsave big\r\n")
    found = definition(state, state.document.source.text.rindex("big") + 3)
    assert found == types.Location("untitled:1", types.Range(types.Position(0, 4), types.Position(0, 7)))
    assert len(references(state, 5, declaration=True)) == 2


def test_highlights_are_the_places_in_the_document(tmp_path: Path) -> None:
    editor = PoliciesAtHand.on(tmp_path, FILES)
    found = highlights(*at(editor, "lib/names.apl", "big", 1))
    write, read = types.DocumentHighlightKind.Write, types.DocumentHighlightKind.Read
    assert [(each.range.start.line, each.kind) for each in found] == [(1, write), (2, read)]
    assert highlights(*at(editor, "main.apl", "recompute")) == []


# --- outline and layout ---


def state_of_text(text: str) -> State:
    document = Document("untitled:1", 1, Source("untitled:1", text))
    return State(document, read_text(document, None, read_source))


def test_the_outline_has_the_statements_that_can_be_read() -> None:
    text = "# What\npolicy 𝛼\r\nlet 𝛽 = mm where (\n    bytes > 3 MiB\n)\nsav bmm or\nsave 𝛽; undecided -> save\n"
    kind = types.SymbolKind
    found = symbols(state_of_text(text))
    assert [(each.name, each.kind) for each in found] == [
        ("policy 𝛼", kind.Module),
        ("𝛽", kind.Variable),
        ("save 𝛽", kind.Function),
        ("undecided -> save", kind.Function),
    ]
    assert found[1].location.range == types.Range(types.Position(2, 0), types.Position(4, 1))
    for nothing in ("", "\n", "sav (mm", "# c"):
        assert symbols(state_of_text(nothing)) == []


ROOT = Path(__file__).resolve().parents[2]
POLICIES = sorted([*policies_folder().glob("*.apl"), *(ROOT / "examples").glob("*.apl"), *ROOT.glob("tests/**/*.apl")])


def check_layout(text: str) -> None:
    written = format_text(text.encode()).written
    edits = formatted(state_of_text(text))
    made = None if edits is None else with_edits(text, edits)
    assert made == (None if written is None else written.decode())
    assert made != text or edits == []


def test_formatting_writes_what_fmt_writes() -> None:
    for path in POLICIES:
        text = path.read_bytes().decode()
        loose = re.sub(r"^(?=\S)", "  ", text.replace(" in ", "   in "), flags=re.MULTILINE)
        for each in (text, loose, loose.replace("\n", "\r\n")):
            check_layout(each)


def test_one_edit_of_the_lines_that_change_counted_in_utf_16() -> None:
    text = "policy 𝛼\r\n\r\nsave 𝛼  or  mm # 𝛼𝛽\r\nmm→save\r\nsave bmm\r\n"
    edits = formatted(state_of_text(text))
    assert edits == [
        types.TextEdit(types.Range(types.Position(2, 0), types.Position(4, 0)), "save 𝛼 or mm  # 𝛼𝛽\r\nmm -> save\r\n")
    ]
    assert formatted(state_of_text("save   mm\nsav  bmm  or\n")) is None  # a mistake leaves the document alone


@given(layouts())
@settings(max_examples=15)
def test_any_layout(text: str) -> None:
    check_layout(text)
