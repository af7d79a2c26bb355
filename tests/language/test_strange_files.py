"""A policy of a stranger shows nothing of other files, and a text full of mistakes takes no longer than it is long."""

from __future__ import annotations

from pathlib import Path

import pytest

from policylang.language.diagnostics import Fix, Source, Span, TextChange
from policylang.language.layout import format_source
from policylang.language.loader import load_policy, parse_policy
from policylang.report.diagnostics import render_text

SECRET = "token = hunter2 of root\n"
PROFILE = "[compute]\nfloat32 = 1e12\n[memory]\nbandwidth = 1e12\n[[network]]\nranks = 2\ntimes = "


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('include "secret"', "APL104"),
        ('include "../{folder}/secret"', "APL104"),
        ('include "link.apl"', "APL104"),
        ('device "./secret"', "APL154"),
        ('device "link.toml"', "APL154"),
        ('device "own.toml"', "APL158"),
    ],
)
def test_no_line_of_another_file_is_shown(text: str, code: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET, encoding="utf-8")
    for link in ("link.apl", "link.toml"):
        (tmp_path / link).symlink_to("secret")
    (tmp_path / "own.toml").write_text(f'{PROFILE}"secret"\n', encoding="utf-8")
    (tmp_path / "p.apl").write_text(text.format(folder=tmp_path.name) + "\nsave mm\n", encoding="utf-8")
    (found,) = load_policy(tmp_path / "p.apl").diagnostics
    assert found.code == code
    assert "hunter2" not in render_text([found])
    (linked,) = load_policy(tmp_path / "link.apl").diagnostics
    assert "hunter2" not in render_text([linked])


@pytest.mark.parametrize("line", ["save mmm whre", "save nope in layers.*", "let a = mm", "save mm in layer block 1"])
def test_a_thousand_mistakes_are_shown_and_the_others_counted(line: str) -> None:
    found = parse_policy(f"{line}\n" * 1202).diagnostics
    assert len(found) == 1001
    assert found[-1].code == "APL117"
    assert found[-1].message in ("202 further diagnostics are not shown", "201 further diagnostics are not shown")
    if "whre" in line:
        assert format_source(Source("<policy>", f"{line}\n" * 1202)).diagnostics == found


def test_a_mend_of_a_part_copies_no_more_than_the_part() -> None:
    source = Source("p.apl", "save mm\nsave mmm\nsave mm\n")
    fix = Fix("", (TextChange(Span(source, 13, 16), "bmm"), TextChange(Span(source, 0, 4), "drop")))
    assert fix.applied(source, 8, 16) == "save bmm"
    assert fix.applied(source) == "drop mm\nsave bmm\nsave mm\n"


def test_includes_that_multiply_are_reported_once(tmp_path: Path) -> None:
    for number in range(1, 40):
        (tmp_path / f"{number}.apl").write_text(f'include "{number - 1}.apl"\n' * 2, encoding="utf-8")
    found = load_policy(tmp_path / "39.apl").diagnostics
    assert [each.code for each in found] == ["APL106", "APL106"]
    assert len(render_text(found)) < 20_000
