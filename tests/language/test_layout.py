"""``policylang fmt`` changes layout alone: golden files, and random policies in random layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.language import layout
from policylang.language.diagnostics import Source
from policylang.language.layout import format_source
from policylang.language.lexer import comments, split, words_of
from policylang.language.parser import parse_file
from policylang.language.resources import policies_folder
from policylang.language.selectors import format_selector
from policylang.language.statements import format_statement
from tests.language import strategies
from tests.support.drawn import examples

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).resolve().parents[2]


def formatted(text: str) -> str:
    result = format_source(Source("test.apl", text))
    assert result.text is not None, result.diagnostics
    return result.text


@pytest.mark.parametrize("case", sorted(path.stem for path in GOLDEN.glob("*.before.apl")))
def test_golden_files(case: str) -> None:
    name = case.removesuffix(".before")
    before = (GOLDEN / f"{name}.before.apl").read_bytes().decode()
    after = (GOLDEN / f"{name}.after.apl").read_bytes().decode()
    assert formatted(before) == after
    assert formatted(after) == after


@pytest.mark.parametrize(
    "path", sorted([*policies_folder().glob("*.apl"), *(ROOT / "examples").glob("*.apl")]), ids=lambda path: path.stem
)
def test_the_policies_that_come_with_the_project_are_formatted(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert formatted(text) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", ""),
        ("\n\n\n", ""),
        ("# a comment alone", "# a comment alone\n"),
        ("  save   mm ", "save mm\n"),
        ("save mm;save bmm;;", "save mm\nsave bmm\n"),
        ("save mm; save bmm # both", "save mm\nsave bmm  # both\n"),
        ("mm→save", "mm -> save\n"),
        ("must_save  mm\nbmm->prefer_recompute", "must_save mm\nbmm -> prefer_recompute\n"),
        ("save mm\n\n\n\nsave bmm", "save mm\n\nsave bmm\n"),
        ("save mm\t\t#said", "save mm  # said\n"),
        ("save mm    # a lone comment is two spaces away", "save mm  # a lone comment is two spaces away\n"),
        ("save mm      # one\nsave bmm     # two", "save mm      # one\nsave bmm     # two\n"),
        ("save mm # one\nsave addmm # two", "save mm  # one\nsave addmm  # two\n"),
        ("save mm  # one\nsave ( bmm )# two", "save mm  # one\nsave (bmm)  # two\n"),
        ("save (mm,bmm) in blocks 0..3", "save (mm, bmm) in blocks 0..3\n"),
        (
            "save aten.{mm, bmm} where(bytes>3MiB)and not(is view)",
            "save aten.{mm, bmm} where (bytes > 3MiB) and not (is view)\n",
        ),
        ("recompute every   2nd mm", "recompute every 2nd mm\n"),
        (
            "save (\n\n  mm,  # the first\n  # the second\n bmm\n\n) in block",
            "save (\n    mm,  # the first\n    # the second\n    bmm\n) in block\n",
        ),
        ("save ((\nmm\n)) # end", "save ((\n        mm\n))  # end\n"),
        ("save (every # by twos\n 2nd mm)", "save (every  # by twos\n    2nd mm)\n"),
        ("offload mm up   to 8GiB  per  rank", "offload mm up to 8GiB per rank\n"),
        ("bucket(all_gather)per  2   blocks up  to 3MiB", "bucket (all_gather) per 2 blocks up to 3MiB\n"),
        ("prefetch  all_gather 1   block  ahead", "prefetch all_gather 1 block ahead\n"),
        (
            "overlap collective up to 2GiB in  flight within 5 % of  peak",
            "overlap collective up to 2GiB in flight within 5% of peak\n",
        ),
        ("keep   order of(\n all_to_all )", "keep order of (\n    all_to_all)\n"),
        ("expect recomputed flops<=20 %", "expect recomputed flops <= 20%\n"),
        ("include   <fsdp>\r\nsave mm\r\n", "include <fsdp>\nsave mm\n"),
        ('save mm in "a # b"  # c', 'save mm in "a # b"  # c\n'),
    ],
)
def test_layout(text: str, canonical: str) -> None:
    assert formatted(text) == canonical


def test_a_file_with_a_syntax_error_has_no_canonical_form() -> None:
    result = format_source(Source("test.apl", "save mm or\nsave   bmm"))
    assert result.text is None
    assert [each.code for each in result.diagnostics] == ["APL011"]


def test_names_are_not_looked_up() -> None:
    assert formatted('include "nowhere.apl"; save  mmm') == 'include "nowhere.apl"\nsave mmm\n'


@pytest.mark.parametrize("broken", ["a lost comment", "another tree", "a second change"])
def test_a_text_that_is_not_proved_is_not_handed_out(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    real = layout._lay_out
    texts = {
        "a lost comment": lambda source: real(source).replace("  # why", ""),
        "another tree": lambda source: real(source).replace("bmm", "mm"),
        "a second change": lambda source: real(source) + "\n" * source.text.count("\n"),
    }
    monkeypatch.setattr(layout, "_lay_out", texts[broken])
    result = format_source(Source("test.apl", "save mm  # why\nsave bmm"))
    assert result.text is None
    assert [each.code for each in result.diagnostics] == ["APL520"]


STATEMENTS = st.one_of(
    st.builds(lambda s: f"save {format_selector(s)}", strategies.selectors),
    st.builds(lambda s: f"optional ({format_selector(s)})→must_recompute", strategies.selectors),
    st.builds(lambda s: f"let some = {format_selector(s)}", strategies.selectors),
    st.builds(format_statement, strategies.expectations),
    st.builds(format_statement, strategies.ordering),
    st.sampled_from(["policy demo", "blocks layers.*", "include <fsdp>", "undecided -> save", "collapse round_trips"]),
)
SPACE = st.sampled_from(["", " ", "   ", "\t", " \r"])
COMMENT = st.sampled_from(["#", "# said", '#said ( "', "   # → ; )", "# tail  "])
END = st.one_of(
    st.builds(lambda space, comment: f"{space}{comment}\n", SPACE, COMMENT),
    st.sampled_from([";", " ; ", "\n", "\r\n", "\n\n\n\n", "\n  # alone\n", ";# said\n"]),
)


@st.composite
def layouts(draw: st.DrawFn) -> str:
    """Policies as people and editors leave them: line ends, comments and blanks wherever they may stand."""
    parts = []
    for statement in draw(st.lists(STATEMENTS, max_size=5)):
        source = Source("part", statement)
        depth = 0
        for word in words_of(source, 0, len(statement)):
            depth += (word == "(") - (word == ")")
            parts.append(str(word))
            parts.append(draw(st.sampled_from([" ", "  ", "\n", " # within\n\n"])) if depth else " ")
        parts.append(draw(END))
    return "".join(parts)


@given(layouts())
@settings(max_examples=examples(25, 250))
def test_any_layout_is_formatted_to_the_same_policy(text: str) -> None:
    source = Source("test.apl", text)
    file, faults = parse_file(source)
    result = format_source(source)
    if faults:
        assert result.diagnostics == faults
        return
    assert result.text is not None, result.diagnostics
    made = Source("test.apl", result.text)
    assert parse_file(made)[0].statements == file.statements
    assert _said(made) == _said(source)
    assert format_source(made).text == result.text
    assert len(split(made).ranges) <= result.text.count("\n")
    assert not any(line != line.rstrip() for line in result.text.split("\n"))
    assert "\n\n\n" not in result.text


def _said(source: Source) -> list[str]:
    return ["".join(source.text[start:end].split()) for start, end in comments(source)]
