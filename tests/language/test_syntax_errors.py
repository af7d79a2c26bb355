"""What a user is told about a statement that is wrong, word for word: the underlined text, the message, the help."""

from __future__ import annotations

from pathlib import Path

import pytest

from policylang.language.resolution.loader import parse_policy
from policylang.report.diagnostics import render_text

# Each block of told.txt: a statement, the span underlined, what is said, and the help where there is one.
BLOCKS = [block.split("\n") for block in Path(__file__).with_name("told.txt").read_text("utf-8").strip().split("\n\n")]


@pytest.mark.parametrize("block", BLOCKS, ids=[block[0] for block in BLOCKS])
def test_told(block: list[str]) -> None:
    text, underline, *said = block
    (found,) = parse_policy(text).diagnostics
    span = found.span
    assert span is not None
    assert " " * span.start + "^" * max(1, span.end - span.start) == underline
    printed = [f"{found.severity.value}[{found.code}]: {found.message}"]
    assert said == (printed if found.help is None else [*printed, f"help: {found.help}"])


@pytest.mark.parametrize("text", [block[0] for block in BLOCKS])
def test_no_message_speaks_of_the_grammar(text: str) -> None:
    printed = render_text(parse_policy(text).diagnostics)
    for word in ("__ANON", "$END", "Token(", "EVERY_NTH", "LPAR", "NAME", "STRING"):
        assert word not in printed.replace(text, "")


def test_all_the_errors_of_a_file_come_in_one_run() -> None:
    text = "\n".join(
        [
            "sav mm",
            "save mn",
            "save (mm",
            "save bmm per block",
            "save add in layers..0; save add where bytes > 3 mib",
            "x ->",
        ]
    )
    found = parse_policy(text).diagnostics
    assert [(each.code, each.span and each.span.line) for each in found] == [
        ("APL012", 1),
        ("APL101", 2),
        ("APL007", 3),
        ("APL014", 4),
        ("APL112", 5),
        ("APL113", 5),
        ("APL011", 6),
    ]


def test_a_parenthesis_that_is_never_closed_costs_one_statement() -> None:
    found = parse_policy("save (mm in block\nrecompute (bmm)\nsave adt")
    assert [each.code for each in found.diagnostics] == ["APL007", "APL101"]


def test_a_statement_may_end_in_a_comment_that_holds_marks() -> None:
    loaded = parse_policy('save mm # ( " ; save bm\nsave bmm')
    assert loaded.policy is not None
    assert len(loaded.policy.rules) == 2


def test_control_characters_are_named_not_printed() -> None:
    (found,) = parse_policy("save \x1b[2Jmm").diagnostics
    assert (found.code, found.message) == ("APL005", "unexpected character U+001B")
    assert "\x1b" not in render_text([found])


@pytest.mark.parametrize("character", ["\x00", "\ud800"])
def test_text_that_is_not_text(character: str) -> None:
    (found,) = parse_policy(f"save mm\nsave {character}").diagnostics
    assert found.code == "APL001"
    assert found.span is not None
    assert found.span.line == 2
