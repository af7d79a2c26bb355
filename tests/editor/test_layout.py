"""Formatting as edits comes to what ``policylang fmt`` writes, and touches nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lsprotocol import types

from policylang.api.format import format_text
from policylang.editor.outline import formatted, formatted_between
from policylang.editor.state import Document, Positions, State, read_text
from policylang.language.files import read_source
from policylang.language.formatting.changes import applied, layout_changes, layout_changes_between
from policylang.language.parsing.parser import parse_file
from policylang.language.parsing.statements import comments, split
from policylang.language.resources import policies_folder
from policylang.language.source import Source
from tests.language.test_layout import layouts

ROOT = Path(__file__).resolve().parents[2]
POLICIES = sorted([*policies_folder().glob("*.apl"), *(ROOT / "examples").glob("*.apl"), *ROOT.glob("tests/**/*.apl")])
MESSY = (ROOT / "tests" / "language" / "golden" / "messy.before.apl").read_bytes().decode()
BROKEN = st.sampled_from(
    [
        "sav  mm or\n",
        "save (mm  or\n",
        "save mm)  x\n",
        "// no\n",
        "save  (\n  mm  bmm # x\n) ;",
        "let =  mm;",
        '"\n',
        "-",
    ]
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


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: f"{path.parent.name}-{path.name}")
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


def test_a_mistake_leaves_the_document_alone_and_a_range_beside_it_can_be_formatted() -> None:
    text = "save   mm\nsav  bmm  or\n\n\nsave(  mm )\nsave addmm\n"
    state = state_of_text(text)
    assert formatted(state) is None
    everything = after(text, formatted_between(state, 0, len(text)))
    assert everything == "save mm\nsav  bmm  or\n\n\nsave (mm)\nsave addmm\n"
    last = text.index("save(")
    assert after(text, formatted_between(state, last, last)) == "save   mm\nsav  bmm  or\n\n\nsave (mm)\nsave addmm\n"
    assert formatted_between(state, text.index("sav "), text.index("sav ") + 3) == []


def test_a_range_that_ends_at_the_start_of_a_line_leaves_that_line_alone() -> None:
    text = "save   mm\nsave   bmm\n"
    found = formatted_between(state_of_text(text), 0, text.index("\n") + 1)
    assert after(text, found) == "save mm\nsave   bmm\n"


def test_statements_on_one_line_are_formatted_together() -> None:
    text = "save   a\n\n\nsave  mm;save  (\nbmm\n);save   x\n\n\n  save   y"
    found = formatted_between(state_of_text(text), text.index("bmm"), text.index("bmm"))
    assert after(text, found) == "save   a\n\n\nsave mm\nsave (\n    bmm\n)\nsave x\n\n\n  save   y"


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


@st.composite
def broken_layouts(draw: st.DrawFn) -> str:
    return "".join(draw(st.one_of(layouts(), BROKEN)) for _ in range(draw(st.integers(1, 3))))


@given(broken_layouts(), st.data())
@settings(max_examples=20, deadline=None)
def test_any_range(text: str, data: st.DataObject) -> None:
    check_range(text, data)


@pytest.mark.slow
@given(broken_layouts(), st.data())
@settings(max_examples=500, deadline=None)
def test_any_of_many_ranges(text: str, data: st.DataObject) -> None:
    check_range(text, data)


def check_range(text: str, data: st.DataObject) -> None:
    source = Source("a", text)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    made = applied(text, layout_changes_between(source, start, end))
    before, now = parse_file(source), parse_file(Source("a", made))
    assert now[0].statements == before[0].statements
    assert [each.code for each in now[1]] == [each.code for each in before[1]]
    assert _said(made) == _said(text)
    touched = _lines_that(text, start, end)
    if not touched:
        assert made == text
        return
    new, above, below = made.split("\n"), text.split("\n")[: min(touched)], text.split("\n")[max(touched) + 1 :]
    assert new[: len(above)] == above
    assert not below or new[-len(below) :] == below
    whole = fmt(text)
    if whole is not None:
        own = "\n".join(line.rstrip("\r") for line in new[len(above) : len(new) - len(below)])
        assert f"\n{own}".rstrip("\n") in "\n" + whole.replace("\r\n", "\n")


def _lines_that(text: str, start: int, end: int) -> set[int]:
    """The lines of what is said between two offsets, with those of what stands on them too, one step after another."""
    source = Source("a", text)
    said = [*split(source).ranges, *comments(source)]
    lines = {(a, b): set(range(text.count("\n", 0, a), text.count("\n", 0, b) + 1)) for a, b in said}
    found = [lines[a, b] for a, b in said if (a < end and b > start) or (start == end and a <= start <= b)]
    touched = set().union(*found)
    while any(each & touched and not each <= touched for each in lines.values()):
        touched = touched.union(*(each for each in lines.values() if each & touched))
    return touched


def _said(text: str) -> list[str]:
    return ["".join(text[start:end].split()) for start, end in comments(Source("a", text))]


@given(layouts())
@settings(max_examples=10, deadline=None)
def test_a_range_of_everything_is_the_whole_but_for_blank_lines_at_its_ends(text: str) -> None:
    whole = fmt(text)
    if whole is not None:
        made = applied(text, layout_changes_between(Source("a", text), 0, len(text)))
        assert made.strip("; \t\r\n") == whole.strip("\r\n")
