"""Diagnostics as an editor shows them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("pygls", reason="needs the extra policylang[lsp]")

from attrs import evolve
from lsprotocol import types

from policylang.editor.actions import Shown, published
from policylang.language.codes import diagnose


def place(found: types.Diagnostic) -> tuple[int, int, int, int]:
    start, end = found.range.start, found.range.end
    return start.line, start.character, end.line, end.character


def test_place_code_severity_page_and_mend(state_of) -> None:
    state = state_of("# 𝔘\r\nlet 𝔘nused = mm\r\nsave attenton\r\n")
    unused, wrong = published(state)
    assert (unused.code, unused.severity, unused.tags) == (
        "APL110",
        types.DiagnosticSeverity.Warning,
        [types.DiagnosticTag.Unnecessary],
    )
    assert place(wrong) == (2, 5, 2, 13)
    assert wrong.severity is types.DiagnosticSeverity.Error
    assert wrong.tags is None
    (help,) = wrong.message.splitlines()[1:]
    assert help.startswith("help: did you mean `attention`")
    assert wrong.code_description is not None
    page = Path(unquote(urlsplit(wrong.code_description.href).path))
    assert page.read_text().startswith("# APL101")


def test_what_lies_in_an_included_file_stands_at_the_include_and_leads_there(tmp_path: Path, state_of) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "outer.apl").write_text('include "inner.apl"\n')
    inner = tmp_path / "sub" / "inner.apl"
    inner.write_text("save mm\nsave attenton\nsave 5 5\n")
    state = state_of('# first\n  include "sub/outer.apl"\nsave bmm\n')
    found = published(state)
    assert [each.code for each in found][:1] == ["APL101"]
    assert {place(each) for each in found} == {(1, 2, 1, 25)}
    assert found[0].message.startswith("sub/inner.apl:2: there is no operator")
    (first, *_) = found[0].related_information or ()
    assert first.location.uri == inner.as_uri()
    assert first.location.range == types.Range(types.Position(1, 5), types.Position(1, 13))


def test_on_a_graph_too_and_in_the_library(tmp_path: Path, state_of) -> None:
    (tmp_path / "inner.apl").write_text("save everything in layers.99\nrecompute everything in layers.98\n")
    state = state_of('save mm\ninclude "inner.apl"\ninclude <replay>\n', "tutorial.graph")
    found = published(state)
    assert {place(each)[0] for each in found} <= {0, 1, 2}
    assert {
        each.related_information[0].location.uri for each in found if each.related_information and place(each)[0]
    } >= {(tmp_path / "inner.apl").as_uri()}


def test_what_has_no_place_stands_in_the_first_line(state_of) -> None:
    state = state_of("\nsave mm\n")
    problem = diagnose("APL355", "`x.graph` cannot be read", help="name another")
    (found,) = published(evolve(state, problems=(problem,)))
    assert place(found) == (0, 0, 0, 0)
    assert found.message == "`x.graph` cannot be read\nhelp: name another"


def test_a_client_that_shows_less_gets_it_in_the_message(state_of) -> None:
    state = state_of("let a = mm\nlet a = bmm\nsave a\n")
    (found,) = published(state, Shown(related=False, links=False, tags=False))
    assert (found.related_information, found.code_description, found.tags) == (None, None, None)
    assert "mine.apl:1" in found.message
    (full,) = published(state)
    assert full.related_information is not None
    assert full.related_information[0].location.range.start == types.Position(0, 0)
    assert "mine.apl:1" not in full.message


def test_the_order_is_that_of_check(tmp_path: Path, state_of) -> None:
    import policylang
    from tests.editor.conftest import GRAPHS

    text = "save mm\nsave mm in layers.99\nrecompute mm\nsave linear\nexpect saved <= 1 B\n"
    (tmp_path / "mine.apl").write_text(text)
    said = policylang.check(tmp_path / "mine.apl", graph=GRAPHS / "llama3_8b.graph").diagnostics
    assert len(said) > 3
    assert [each.code for each in published(state_of(text, "llama3_8b.graph"))] == [each.code for each in said]


def test_a_wrong_project_leads_to_its_file(tmp_path: Path, state_of) -> None:
    from policylang.editor.workspace import Workspace

    (tmp_path / "pyproject.toml").write_text('[tool.policylang]\npath = "jiont"\n')
    settings = Workspace().settings_of(tmp_path / "mine.apl")
    (found,) = published(evolve(state_of("save mm\n"), problems=settings.problems))
    assert place(found) == (0, 0, 0, 0)
    assert found.message.startswith("pyproject.toml:2: there is no path `jiont`")
    assert found.related_information is not None
    assert found.related_information[0].location.uri == (tmp_path / "pyproject.toml").as_uri()
    assert found.related_information[0].location.range.start.line == 1
