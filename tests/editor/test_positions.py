"""Places in a text, against a slow and obvious reading of the protocol."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

from hypothesis import given
from hypothesis import strategies as st
from lsprotocol import types

from policylang.editor.state import Positions, changed_text

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
        assert end is not None
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
