"""What a user is told about a statement that is wrong, word for word, and that the fix, where it is a text, is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policylang.language.loader import load_policy, parse_policy
from policylang.language.mistakes import mistakes
from policylang.report.diagnostics import render_text

LINES = Path(__file__).with_name("mistakes.txt").read_text("utf-8").splitlines()
"""Each a statement with its underlined part in ⟦⟧, what is said, and the help where there is one."""
TEXTS = [re.sub("[⟦⟧]", "", line.split("  =>  ")[0]) for line in LINES]


def test_told() -> None:
    """One test of them all: a case costs a millisecond, and a test of its own several."""
    now = []
    for text in TEXTS:
        (found,) = parse_policy(text).diagnostics
        assert found.span is not None, text
        start, end = found.span.start, found.span.end
        marked = f"{text[:start]}⟦{text[start:end]}⟧{text[end:]}"
        said = (marked, f"{found.severity.value}[{found.code}]: {found.message}", found.help)
        now.append("  =>  ".join(filter(None, said)))
        printed = render_text([found]).replace(text, "")
        assert not re.search(r"__ANON|\$END|Token\(|EVERY_NTH|LPAR|\bNAME\b(?!`)|STRING", printed), text
    assert now == LINES


def test_every_row_is_told_of_some_statement() -> None:
    told = [line.split("  =>  ")[1] for line in LINES]
    for each in mistakes():
        message = re.sub(r"\\\{\w+\\\}", ".+", re.escape(each.message))
        assert any(re.fullmatch(rf"error\[APL\d+\]: {message}", said) for said in told), each.message


def test_three_lines_with_one_mistake_are_three_diagnostics() -> None:
    found = parse_policy("save mn\nsave mn in block\nrecompute mn, mn").diagnostics
    assert [(each.span and each.span.line, each.code) for each in found] == [
        (1, "APL101"),
        (2, "APL101"),
        *[(3, "APL101")] * 2,
    ]
    found = parse_policy("save mylib.fused\nsave mylib.fused").diagnostics
    assert [(each.span and each.span.line, each.code) for each in found] == [(1, "APL102"), (2, "APL102")]


def test_all_the_errors_of_a_file_come_in_one_run() -> None:
    lines = ["sav mm", "save mn", "save (mm", "save bmm per block"]
    lines += ["save add in layers..0; save add where bytes > 3 mib", "x ->"]
    found = parse_policy("\n".join(lines)).diagnostics
    codes = {1: ["APL012"], 2: ["APL101"], 3: ["APL007"], 4: ["APL014"], 5: ["APL112", "APL113"], 6: ["APL011"]}
    assert [(each.span and each.span.line, each.code) for each in found] == [
        (line, code) for line, each in codes.items() for code in each
    ]


def test_a_parenthesis_that_is_never_closed_costs_one_statement() -> None:
    found = parse_policy("save (mm in block\nrecompute (bmm)\nsave adt")
    assert [each.code for each in found.diagnostics] == ["APL007", "APL101"]


def test_a_statement_may_end_in_a_comment_that_holds_marks() -> None:
    loaded = parse_policy('save mm # ( " ; save bm\nsave bmm')
    assert len(loaded.policy.rules) == 2


def test_comments_of_other_languages_cost_one_diagnostic_each() -> None:
    text = 'save mm // why; "because (\n-- and\nsave (\n  bmm,  // the second\n  add\n)\nsave adt'
    found = parse_policy(text).diagnostics
    assert [(each.code, each.span and each.span.line) for each in found] == [
        ("APL005", 1),
        ("APL005", 2),
        ("APL005", 4),
        ("APL101", 7),
    ]
    assert found[0].help == 'write `# why; "because (`'


def test_a_path_with_slashes_and_an_arrow_are_no_comments() -> None:
    assert parse_policy("save mm in /layers.*\nmm -> save").diagnostics == ()


def test_a_mistake_on_one_of_several_lines() -> None:
    found = parse_policy("save (\n  mm, # the products\n  bmm\n) in layers 3..1").diagnostics
    assert [(each.code, each.span and each.span.line) for each in found] == [("APL010", 4)]


def test_a_byte_order_mark_tabs_and_line_ends_of_windows(tmp_path: Path) -> None:
    text = "\ufeffsave\tmm\r\nsave bmm # why\r\n"
    assert parse_policy(text).diagnostics == ()
    file = tmp_path / "windows.apl"
    file.write_bytes(text.encode("utf-8"))
    assert load_policy(file).diagnostics == ()


def test_control_characters_are_named_not_printed() -> None:
    (found,) = parse_policy("save \x1b[2Jmm").diagnostics
    assert (found.code, found.message) == ("APL005", "unexpected character U+001B")
    assert "\x1b" not in render_text([found])


@pytest.mark.parametrize("character", ["\x00", "\ud800"])
def test_text_that_is_not_text(character: str) -> None:
    (found,) = parse_policy(f"save mm\nsave {character}").diagnostics
    assert found.code == "APL001"
    assert found.span.line == 2


def test_a_long_statement_is_read_in_the_time_it_takes() -> None:
    found = parse_policy("save " + "mm, " * 3_000 + "where").diagnostics
    assert [each.code for each in found] == ["APL010"]
