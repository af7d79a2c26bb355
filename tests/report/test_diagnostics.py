"""Diagnostics as they are printed: lines that are long or odd, and what has no place. Whole ones are in `tests/cli`."""

from __future__ import annotations

import json

import pytest

from policylang.language.diagnostics import Diagnostic, Related, Severity, Source, Span, diagnose
from policylang.language.loader import parse_policy
from policylang.report.diagnostics import render_concise, render_github, render_json, render_text

TEXT = "let big = mm\nlet big = bmm\nsave atention in block\nsave big"


def found(text: str = TEXT, name: str = "llama3.apl") -> tuple[Diagnostic, ...]:
    return parse_policy(text, name=name).diagnostics


def test_details_stand_under_the_line() -> None:
    source = Source("a.apl", "save mm")
    printed = render_text([diagnose("APL101", "no", Span(source, 5, 7), details=("mm: 224 nodes", "in a: 0 of them"))])
    assert printed.splitlines()[-2:] == ["  = mm: 224 nodes", "  = in a: 0 of them"]


def test_a_place_without_text_is_named_alone() -> None:
    assert render_text([diagnose("APL104", "`x` is a folder", help="name a policy file")]) == (
        "error[APL104]: `x` is a folder\n = help: name a policy file"
    )
    where = Span(Source("x.apl", ""), 0, 0)
    assert render_text([diagnose("APL001", "the file is not text", where)]) == (
        "error[APL001]: the file is not text\n --> x.apl:1:1"
    )


def test_the_end_of_a_line_is_underlined_behind_it() -> None:
    (line,) = [line for line in render_text(found("save mm or")).splitlines() if "^" in line]
    assert line == "  |           ^"


@pytest.mark.parametrize("at", [0, 500, 5000, 9990])
def test_of_a_long_line_the_part_around_the_span_is_shown(at: int) -> None:
    text = "x" * at + "HERE" + "x" * (9996 - at)
    lines = render_text([diagnose("APL101", "no", Span(Source("a.apl", text), at, at + 4))]).splitlines()
    shown, underline = lines[3], lines[4]
    assert len(shown) < 120
    assert shown[underline.index("^") : underline.rindex("^") + 1] == "HERE"


def test_of_a_long_span_the_visible_part_is_underlined() -> None:
    text = "y" * 9000
    lines = render_text([diagnose("APL003", "no", Span(Source("a.apl", text), 0, 9000))]).splitlines()
    assert len(lines[4]) < 120
    assert lines[4].count("^") == lines[3].count("y")


def test_wide_and_invisible_characters_keep_the_underline_in_place() -> None:
    text = "模型\tsave\x1b[31m mn"
    at = text.index("mn")
    lines = render_text([diagnose("APL101", "no", Span(Source("a.apl", text), at, at + 2))]).splitlines()
    assert "\x1b" not in "".join(lines)
    assert lines[4].index("^") == lines[3].index("mn") + 2, "two characters of two columns stand before it"


def test_a_span_over_several_lines_is_underlined_on_its_first() -> None:
    text = "save (mm,\n  bmm)\n"
    lines = render_text([diagnose("APL101", "no", Span(Source("a.apl", text), 5, 16))]).splitlines()
    assert lines[3:] == ["1 | save (mm,", "  |      ^^^^"]


def test_concise_has_no_place_where_there_is_none() -> None:
    assert render_concise([diagnose("APL104", "`x` is a folder")]) == "error[APL104]: `x` is a folder"


def test_json_of_nothing_and_of_what_has_no_place() -> None:
    assert json.loads(render_json([])) == {"version": 1, "diagnostics": []}
    assert json.loads(render_json([diagnose("APL104", "no")]))["diagnostics"][0]["location"] is None


def test_github_leaves_the_columns_out_where_the_lines_differ() -> None:
    span = Span(Source("a.apl", "save (mm,\nbmm)"), 5, 13)
    assert render_github([diagnose("APL101", "no", span)]) == "::error file=a.apl,line=1,endLine=2,title=APL101::no"


def test_github_escapes_what_would_end_a_command() -> None:
    span = Span(Source("odd,name:1%.apl", "save mm"), 0, 4)
    (line,) = render_github([diagnose("APL101", "50%", span, help="more")]).splitlines()
    assert (
        line == "::error file=odd%2Cname%3A1%25.apl,line=1,endLine=1,col=1,endColumn=5,title=APL101::50%25%0Ahelp: more"
    )


def test_github_cannot_point_into_the_bundled_library() -> None:
    span = Span(Source("<fsdp>", "save mm"), 0, 4)
    assert render_github([diagnose("APL102", "odd", span)]) == "::warning title=APL102::<fsdp>:1: odd"


def test_severities() -> None:
    note = Diagnostic("APL101", "by the way", severity=Severity.NOTE, related=(Related("there"),))
    assert render_text([note]) == "note[APL101]: by the way\n = note: there"
    assert render_github([note]) == "::notice title=APL101::by the way"


def test_nothing_prints_as_nothing() -> None:
    assert render_text([]) == render_concise([]) == render_github([]) == ""
