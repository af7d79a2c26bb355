"""Canonical text and layout: what is written reads back, and is the same for all that means the same."""

from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import strategies as st

from policylang.language import formatting
from policylang.language.diagnostics import Source
from policylang.language.formatting import format_source
from policylang.language.lexer import comments, split, words_of
from policylang.language.loader import parse_policy
from policylang.language.parser import parse_file
from policylang.language.resources import policies_folder
from policylang.language.selectors import format_selector, nth
from policylang.language.shown import UNITS, read_quantity, write_quantity
from policylang.language.statements import KINDS, format_statement
from policylang.language.syntax import Bucket, Everything, Expectation, Quantity, Scheduling, Selector, Statement
from tests.language import strategies
from tests.language.test_forms import BINDING, EXPECTATIONS, LLAMA3, SELECTORS, policy, selector
from tests.support.drawn import drawn

_PROPERTIES = {"seconds": "time"}
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")


@drawn(40, 600, strategies.selectors)
def test_a_selector_reads_back(tree: Selector) -> None:
    text = format_selector(tree)
    assert selector(text) == tree
    assert format_selector(selector(text)) == text


@drawn(25, 200, strategies.expectations)
def test_an_expectation_reads_back(tree: Expectation) -> None:
    text = format_statement(tree)
    assert policy(text).expectations == (tree,)


@drawn(25, 100, strategies.ordering)
def test_a_scheduling_line_reads_back(tree: Bucket | Scheduling) -> None:
    text = format_statement(tree)
    found = policy(text)
    assert (*found.rewrites, *found.scheduling) == (tree,)


def test_every_statement_is_a_registered_kind_and_another_is_not_written_as_one() -> None:
    assert {kind.made for kind in KINDS} == set(get_args(Statement))
    with pytest.raises(KeyError):
        format_statement(SimpleNamespace(selector=Everything(), blocks=2, optional=False))  # type: ignore[arg-type]


@drawn(60, 300, strategies.quantities)
def test_a_figure_reads_back_exactly(quantity: Quantity) -> None:
    property_ = _PROPERTIES.get(quantity.dimension, quantity.dimension)
    text = write_quantity(quantity.value, quantity.dimension)
    where = selector(f"mm where {property_} > {text}")
    assert where.predicate.value == quantity  # type: ignore[union-attr]


@pytest.mark.parametrize("text", [text for text, _ in (*SELECTORS, *BINDING)])
def test_the_forms_of_the_language_are_canonical_when_formatted_twice(text: str) -> None:
    once = format_selector(selector(text))
    assert format_selector(selector(once)) == once


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("(first (add)) in block", "(first add) in block"),
        ("first  (add in block)  per block", "first add in block per block"),
        ("((mm or bmm), add)", "mm, bmm, add"),
        ("(mm or bmm) and add", "(mm, bmm) and add"),
        ("mm where ((is view) and (is random or is mutated))", "mm where is view and (is random or is mutated)"),
        ("(mm where is view) and bmm", "(mm where is view) and bmm"),
        ("(mm where is view) except bmm", "mm where is view except bmm"),
        ("first (every 2nd mm) per block", "first (every 2nd mm) per block"),
        ("mm where bytes > 65536 KiB", "mm where bytes > 64 MiB"),
        ("every 2nd mm in every 3rd block from 3rd from 1st", "every 2nd (mm in every 3rd block) from 1st"),
        ("mm where (crosses cut per 2048 MiB)", "mm where crosses cut per 2 GiB"),
        ("mm where crosses  cut per  auto", "mm where crosses cut per auto"),
        ("mm in first 1 blocks", "mm in first block"),
        ('mm in "layers.*"', "mm in layers.*"),
        ("mm where dtype == half", "mm where dtype == float16"),
        ("mm where time > 0.4ms", "mm where time > 400 us"),
        ("mm where time > 400 µs", "mm where time > 400 us"),
        ("mm where time_per_gib > 1500 \N{GREEK SMALL LETTER MU}s", "mm where time_per_gib > 1.5 ms"),
        ("mm where time > 0", "mm where time > 0 s"),
    ],
)
def test_parentheses_are_as_few_as_it_takes(text: str, canonical: str) -> None:
    assert format_selector(selector(text)) == canonical


def test_canonical_policy() -> None:
    text = """
        policy demo   # a comment
        let big = mm where bytes > 65536 KiB
        blocks layers.*; save (big)
        undecided → save
        optional bmm → must_recompute
        fuse allgather chains over dp,tp
        collapse   round_trips
        expect every big saved
    """
    assert policy(text).canonical == (
        "policy demo\n"
        "blocks layers.*\n"
        "undecided -> save\n"
        "let big = mm where bytes > 64 MiB\n"
        "save big\n"
        "optional must_recompute bmm\n"
        "fuse all_gather chains over dp, tp\n"
        "collapse round_trips\n"
        "expect every big saved\n"
    )


def test_canonical_scheduling_lines() -> None:
    text = """
        overlap (collective)  up to 2048 MiB in   flight within 5 % of peak
        bucket all_gather per 1 block up to 0.5 GiB ; bucket reduce_scatter in block per 2 block
        optional prefetch all_gather 1 blocks ahead
        keep   order of all_to_all; delay reduce_scatter where bytes > 3 MiB 2 block
    """
    lines = [line for line in policy(text).canonical.splitlines() if not line.startswith(("let", "policy"))]
    assert lines == [
        "bucket all_gather per block up to 512 MiB",
        "bucket (reduce_scatter in block) per 2 blocks",
        "overlap collective up to 2 GiB in flight within 5% of peak",
        "optional prefetch all_gather 1 block ahead",
        "keep order of all_to_all",
        "delay (reduce_scatter where bytes > 3 MiB) 2 blocks",
    ]


def test_canonical_text_is_canonical_and_changes_with_a_word_alone() -> None:
    canonical = policy(LLAMA3 + "".join(f"expect {text}\n" for text, _ in EXPECTATIONS)).canonical
    again = parse_policy(canonical)
    assert again.policy.canonical == canonical
    assert {each.code for each in again.diagnostics} == {"APL111"}, "groups are written out, so they hide the prelude's"
    assert policy("save mm # a\n\n\nsave bmm").canonical == policy("save   mm;save (bmm)").canonical
    assert policy("save mm").canonical != policy("save bmm").canonical
    assert policy("let a = mm\nsave a").canonical != policy("let a = bmm\nsave a").canonical


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (13, "13th"), (21, "21st"),
     (102, "102nd"), (111, "111th"), (122, "122nd")],
)  # fmt: skip
def test_ordinals(number: int, text: str) -> None:
    assert nth(number) == text


@pytest.mark.parametrize("unit", UNITS)
def test_every_unit_is_read(unit: str) -> None:
    amount, dimension = read_quantity("3", unit)
    if dimension == "fraction":
        limit = policy("expect recomputed flops <= 20%").expectations[0].limit  # type: ignore[union-attr]
        assert limit == Quantity(0.2, "fraction")
        return
    found = selector(f"mm where {_PROPERTIES.get(dimension, dimension)} > 3 {unit}")
    assert found.predicate.value == Quantity(amount, dimension)
    assert selector(f"mm where {_PROPERTIES.get(dimension, dimension)} > 3{unit}") == found  # type: ignore[union-attr]


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
    real = formatting._lay_out
    texts = {
        "a lost comment": lambda source: real(source).replace("  # why", ""),
        "another tree": lambda source: real(source).replace("bmm", "mm"),
        "a second change": lambda source: real(source) + "\n" * source.text.count("\n"),
    }
    monkeypatch.setattr(formatting, "_lay_out", texts[broken])
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


@drawn(25, 250, layouts())
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
