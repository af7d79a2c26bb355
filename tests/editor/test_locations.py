"""From a span to a place that an editor can open."""

from __future__ import annotations

from pathlib import Path

from attrs import evolve
from lsprotocol import types

from policylang.editor.state import Document, State, location, read_text, uri_of, uri_of_path
from policylang.language.files import read_source
from policylang.language.resources import devices_folder, policies_folder
from policylang.language.source import Source, Span


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
    assert found is not None
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
