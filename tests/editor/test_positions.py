"""Places in a text, against a slow and obvious reading of the protocol."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from lsprotocol import types

from policylang.editor.state import Document, Positions, State, changed_text, location, read_text, uri_of, uri_of_path
from policylang.language.diagnostics import Source, Span
from policylang.language.files import read_source
from policylang.language.resources import devices_folder, policies_folder

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
def test_a_position_is_that_of_the_protocol(text: str, encoding: types.PositionEncodingKind) -> None:
    positions = Positions(text, encoding)
    for offset in range(len(text) + 1):
        found = positions.position(offset)
        assert (found.line, found.character) == slow_position(text, offset, encoding)


@given(TEXTS, ENCODINGS)
def test_there_and_back_is_the_same_place(text: str, encoding: types.PositionEncodingKind) -> None:
    positions = Positions(text, encoding)
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
