"""Plausible mistakes: what a user is told, word for word, and that the mend, where it is a text, is one."""

from __future__ import annotations

import re
from pathlib import Path

from policylang.language.codes import is_error
from policylang.language.diagnostics import Diagnostic
from policylang.language.parsing.common_mistakes import mistakes
from policylang.language.resolution.loader import load_policy, parse_policy

# As in told.txt: a statement, the span underlined, what is said, and the help where there is one.
BLOCKS = [
    block.split("\n") for block in Path(__file__).with_name("mistakes.txt").read_text("utf-8").strip().split("\n\n")
]
TEXTS = [block[0] for block in BLOCKS]
_MEND = re.compile(r"(?:write|did you mean) `([^`]+)`(?!,| or)")
STILL_WRONG = {"include ‘other.apl’": "APL103", "save mm per blocks": "APL014"}
"""Statements with a second mistake, for which there is no text to write."""


def test_sixty_are_few() -> None:
    assert len(set(TEXTS)) == len(TEXTS) > 150


def test_told() -> None:
    """One test of them all: a case costs a millisecond, and a test of its own several."""
    wrong: list[str] = []
    for block in BLOCKS:
        (found,) = parse_policy(block[0]).diagnostics
        span = found.span
        assert span is not None, block[0]
        said = [
            f"{found.severity.value}[{found.code}]: {found.message}",
            *([f"help: {found.help}"] if found.help else []),
        ]
        now = [block[0], " " * span.start + "^" * max(1, span.end - span.start), *said]
        wrong.extend([] if now == block else ["", *now])
    assert not wrong, "\n".join(wrong)


def mended(text: str, found: Diagnostic) -> str | None:
    """The text with the mend of its help in the place that is underlined; None where the help is no text to write."""
    span, help = found.span, found.help or ""
    assert span is not None
    if re.fullmatch(r"leave `[^`]+` out", help):
        return f"{text[: span.start]} {text[span.end :]}"
    match = _MEND.match(help)
    return None if match is None else text[: span.start] + match[1] + text[span.end :]


def test_the_mend_is_one() -> None:
    """A statement with several mistakes is mended one at a time, and then has no error."""
    wrong: list[str] = []
    for text in TEXTS:
        now = text
        for _ in range(4):
            errors = [found for found in parse_policy(now).diagnostics if is_error(found)]
            better = mended(now, errors[0]) if errors else None
            if better is None:
                break
            now = better
        left = [found.code for found in errors]
        wrong.extend([f"{text} => {now}"] if left and now != text and left != [STILL_WRONG.get(text)] else [])
    assert wrong == []


def test_most_have_a_mend() -> None:
    have = [text for text in TEXTS if mended(text, parse_policy(text).diagnostics[0]) is not None]
    assert len(have) > 0.8 * len(TEXTS)


def test_every_row_says_what_is_underlined() -> None:
    assert all("bad" in each.pattern.groupindex for each in mistakes())


def test_three_lines_with_one_mistake_are_three_diagnostics() -> None:
    found = parse_policy("save mn\nsave mn in block\nrecompute mn, mn").diagnostics
    assert [(each.span and each.span.line, each.code) for each in found] == [
        (1, "APL101"),
        (2, "APL101"),
        *[(3, "APL101")] * 2,
    ]
    found = parse_policy("save mylib.fused\nsave mylib.fused").diagnostics
    assert [(each.span and each.span.line, each.code) for each in found] == [(1, "APL102"), (2, "APL102")]


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


def test_a_long_statement_is_read_in_the_time_it_takes() -> None:
    found = parse_policy("save " + "mm, " * 10_000 + "where").diagnostics
    assert [each.code for each in found] == ["APL010"]
