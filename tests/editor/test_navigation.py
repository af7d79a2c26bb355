"""Places in a text, names with their definitions and uses, the outline and formatting, whatever the text is."""

import re
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from lsprotocol import types

from policylang.api.load import format_text
from policylang.editor.actions import definition, formatted, highlights, references, symbols
from policylang.editor.state import Document, Positions, State, changed_text, location, read_text, uri_of, uri_of_path
from policylang.language.diagnostics import Source, Span
from policylang.language.files import read_source
from policylang.language.resources import devices_folder, policies_folder
from tests.editor.conftest import PoliciesAtHand, with_edits
from tests.language.test_formatter import layouts
from tests.support.drawn import drawn

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


@pytest.mark.slow
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


TEXTS = st.text(st.sampled_from("ab \t\n\r\f\v\x1c\x85\u2028\u2029é𝔘𐐀e\u0301\ufeff\ud800"), max_size=40)
ENCODINGS = st.sampled_from(types.PositionEncodingKind)


def units(text: str, encoding: types.PositionEncodingKind) -> int:
    """How many code units a text is, a character after the other."""
    if encoding == types.PositionEncodingKind.Utf32:
        return len(text)
    if encoding == types.PositionEncodingKind.Utf16:
        return sum(1 if ord(each) < 0x10000 else 2 for each in text)
    return sum(1 if (code := ord(each)) < 0x80 else 2 if code < 0x800 else 3 if code < 0x10000 else 4 for each in text)


def slow_position(text: str, offset: int, encoding: types.PositionEncodingKind) -> tuple[int, int]:
    """The lines before, and the units since the last of them; between the halves of a line end the line goes on."""
    ends = [found.end() for found in re.finditer(r"\r\n|\n|\r", text) if found.end() <= offset]
    start = ends[-1] if ends else 0
    return len(ends), units(text[start:offset], encoding)


@given(TEXTS, ENCODINGS)
def test_a_position_is_that_of_the_protocol_and_there_and_back_is_the_same_place(text, encoding) -> None:
    positions = Positions(text, encoding)
    for offset in range(len(text) + 1):
        found = positions.position(offset)
        assert (found.line, found.character) == slow_position(text, offset, encoding)
    for offset in range(len(text) + 1):
        back = positions.offset(positions.position(offset))
        inside_a_line_end = text[offset - 1 : offset + 1] == "\r\n" and offset > 0
        assert back == (offset - 1 if inside_a_line_end else offset)


@given(TEXTS, ENCODINGS, st.integers(0, 45), st.integers(0, 90))
def test_every_position_is_some_place(text: str, encoding: types.PositionEncodingKind, line: int, unit: int) -> None:
    """One behind the end of a line is that end, one behind the text its end, one within a character its start."""
    places = {slow_position(text, offset, encoding): offset for offset in range(len(text), -1, -1)}
    last = max(place[0] for place in places)
    if line > last:
        expected = len(text)
    else:
        here = [offset for place, offset in places.items() if place[0] == line and place[1] <= unit]
        start = places[line, 0]
        end = re.search(r"\r\n|\n|\r|\Z", text[start:])
        expected = min(max(here), start + end.start())
    assert Positions(text, encoding).offset(types.Position(line, unit)) == expected


@given(TEXTS, ENCODINGS, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), TEXTS), max_size=4))
def test_changes_of_parts_are_those_of_a_string(text: str, encoding: types.PositionEncodingKind, edits) -> None:
    changes: list[types.TextDocumentContentChangeEvent] = []
    made = text
    for start, length, new in edits:
        positions = Positions(made, encoding)
        range = positions.between(start, start + length)
        changes.append(types.TextDocumentContentChangePartial(range, new))
        first, last = positions.offset(range.start), positions.offset(range.end)
        made = made[:first] + new + made[last:]
    assert changed_text(text, changes, encoding) == made
    assert changed_text(text, [*changes, types.TextDocumentContentChangeWholeDocument("all")], encoding) == "all"


def test_an_included_file_is_where_it_lies_however_it_is_written(tmp_path: Path, state_of) -> None:
    folder = tmp_path / "names"
    folder.mkdir()
    (folder / "first.apl").write_text('include "../names/second.apl"\n')
    (folder / "second.apl").write_text("# 𝛼\nlet 𝛼𝛽 = mm\nsave 𝛼𝛽\n", encoding="utf-8")
    state = state_of('include "names/first.apl"\nsave 𝛼𝛽\n')
    let = next(each.statement for each in state.text.expansion.statements)
    found = location(state, Span(let.span.source, let.span.start + 4, let.span.start + 6))
    expected = types.Range(types.Position(1, 4), types.Position(1, 8))
    assert found == types.Location((folder / "second.apl").as_uri(), expected)
    utf8 = evolve(state, document=evolve(state.document, encoding=types.PositionEncodingKind.Utf32))
    found = location(utf8, Span(let.span.source, let.span.start + 4, let.span.start + 6))
    assert found.range.end.character == 6


def test_files_that_cannot_be_read_have_a_place_too(tmp_path: Path, state_of) -> None:
    (tmp_path / "bytes.apl").write_bytes(b"\xff\xfe")
    state = state_of('include "bytes.apl"\n')
    (found,) = state.diagnostics
    assert uri_of(state, found.span.source) == (tmp_path / "bytes.apl").as_uri()


def test_the_library_lies_in_the_package(tmp_path: Path, state_of) -> None:
    state = state_of("include <fsdp>\ndevice h100\n")
    for name, path in {
        "<fsdp>": policies_folder() / "fsdp.apl",
        "<prelude>": policies_folder() / "prelude.apl",
        "<h100-sxm>": devices_folder() / "h100-sxm.toml",
    }.items():
        assert uri_of(state, Source(name, "")) == path.as_uri()
    assert uri_of(state, Source("<nothing>", "")) is None


def test_a_device_profile_is_looked_for_where_its_policy_lies(tmp_path: Path, state_of) -> None:
    (tmp_path / "cluster.toml").write_text("name = 1\n")
    state = state_of('device "cluster.toml"\nsave mm where time > 1 us\n')
    (found,) = state.diagnostics
    assert found.span.source.name == "cluster.toml" or found.related
    assert uri_of(state, Source("cluster.toml", "")) == (tmp_path / "cluster.toml").as_uri()


def test_a_text_in_no_file_has_the_address_it_came_with(tmp_path: Path) -> None:
    document = Document("untitled:one", 1, Source("untitled:one", "save mm\n"))
    state = State(document, read_text(document, None, read_source))
    found = location(state, Span(document.source, 0, 4))
    assert found == types.Location("untitled:one", types.Range(types.Position(0, 0), types.Position(0, 4)))


def test_a_link_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    (tmp_path / "x.apl").write_text("")
    (tmp_path / "here" / "x.apl").write_text("")
    assert uri_of_path(tmp_path / "here" / "link" / ".." / "x.apl") == (tmp_path / "x.apl").as_uri()


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


@drawn(12, 300, broken_policies(), st.floats(0, 1))
def test_any_text_is_answered(tmp_path_factory: pytest.TempPathFactory, text: str, where: float) -> None:
    offset, folder = int(len(text) * where), tmp_path_factory.getbasetemp() / "any_text"
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
