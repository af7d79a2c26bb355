"""Canonical text reads back as what it was made from, and is the same for all that means the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import get_args

import pytest
from hypothesis import given, settings

from policylang.language.loader import parse_policy
from policylang.language.selectors import format_selector, nth
from policylang.language.shown import UNITS, read_quantity, write_quantity
from policylang.language.statements import KINDS, format_statement
from policylang.language.syntax import Bucket, Everything, Expectation, Quantity, Scheduling, Selector, Statement
from tests.language import strategies
from tests.language.test_forms import BINDING, EXPECTATIONS, LLAMA3, SELECTORS
from tests.language.told import policy, selector
from tests.support.drawn import examples

_PROPERTIES = {"seconds": "time"}
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")


@given(strategies.selectors)
@settings(max_examples=examples(40, 600))
def test_a_selector_reads_back(tree: Selector) -> None:
    text = format_selector(tree)
    assert selector(text) == tree
    assert format_selector(selector(text)) == text


@given(strategies.expectations)
@settings(max_examples=examples(25, 200))
def test_an_expectation_reads_back(tree: Expectation) -> None:
    text = format_statement(tree)
    assert policy(text).expectations == (tree,)


@given(strategies.ordering)
@settings(max_examples=examples(25, 100))
def test_a_scheduling_line_reads_back(tree: Bucket | Scheduling) -> None:
    text = format_statement(tree)
    found = policy(text)
    assert (*found.rewrites, *found.scheduling) == (tree,)


def test_every_statement_is_a_registered_kind_and_another_is_not_written_as_one() -> None:
    assert {kind.made for kind in KINDS} == set(get_args(Statement))
    with pytest.raises(KeyError):
        format_statement(SimpleNamespace(selector=Everything(), blocks=2, optional=False))  # type: ignore[arg-type]


@given(strategies.quantities)
@settings(max_examples=examples(60, 300))
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


def test_canonical_text_of_a_policy_is_canonical() -> None:
    canonical = policy(LLAMA3 + "".join(f"expect {text}\n" for text, _ in EXPECTATIONS)).canonical
    again = parse_policy(canonical)
    assert again.policy.canonical == canonical
    assert {each.code for each in again.diagnostics} == {"APL111"}, "groups are written out, so they hide the prelude's"


def test_comments_and_layout_do_not_reach_the_canonical_text() -> None:
    assert policy("save mm # a\n\n\nsave bmm").canonical == policy("save   mm;save (bmm)").canonical


def test_a_changed_word_does() -> None:
    assert policy("save mm").canonical != policy("save bmm").canonical
    assert policy("let a = mm\nsave a").canonical != policy("let a = bmm\nsave a").canonical


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (13, "13th"), (21, "21st"),
     (111, "111th"), (122, "122nd")],
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
