"""What a selector surely and possibly denotes: around what it denotes for the batch that is there."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

import policylang
from policylang.graph.blocks import blocks_of
from policylang.graph.chains import Chains
from policylang.graph.facts import Facts
from policylang.language.syntax import Selector, Where
from policylang.language.walk import walk
from policylang.planning.batch.bounds import Bound, Bounds, size_tests
from policylang.planning.batch.sizes import BatchSizes
from policylang.planning.selection.selectors import Selections
from policylang.simulation.node_times import node_times
from tests.planning.strategies import QUICK, graphs, selectors
from tests.support.drawn import examples
from tests.support.textgraph import facts_of

GRAPH = facts_of("""
    %x = input shape=16x64 dtype=f32
    %w = parameter shape=64x64 dtype=f32
    %cast = aten.sin.default(%w) shape=64x64 dtype=f32
    %a = aten.mm.default(%x, %cast) one shape=16x64 dtype=f32
    %b = aten.sin.default(%a) one shape=16x64 dtype=f32
    %c = aten.cos.default(%b) two shape=16x64 dtype=f32
    %s = aten.sum.default(%c) two shape=scalar dtype=f32
""")


def bounds_of(facts: Facts, selector: Selector, lets: dict) -> tuple[Bound, list[int]]:
    selections = Selections(facts, lets, blocks_of(facts), Chains(facts), node_times(facts, QUICK))
    return Bounds(selections, BatchSizes(facts)).of(selector), selections.rows(selector)


@settings(max_examples=examples(60, 300), deadline=None)
@given(graphs(), selectors(()))
def test_what_is_denoted_lies_between_them(facts: Facts, selector: Selector) -> None:
    bound, rows = bounds_of(facts, selector, {})
    assert set(bound.sure) <= set(rows) <= set(bound.possible)
    assert bound.possible == sorted(set(bound.possible))
    asks = any(isinstance(part, Where) and any(size_tests(part.predicate)) for part in walk(selector))
    assert asks or not bound.hangs


@pytest.mark.parametrize(
    ("text", "sure", "possible"),
    [
        ("everything where bytes > 4 KiB", "cast", "cast a b c"),
        ("everything where not bytes > 4 KiB", "s", "a b c s"),
        ("everything where bytes > 4 KiB or module == one", "cast a b", "cast a b c"),
        ("everything where bytes > 4 KiB and module == one", "", "a b"),
        ("everything except (everything where bytes > 4 KiB)", "s", "a b c s"),
        ("sin, mm where numel < 2000", "cast b", "cast a b"),
        ("users of (mm where numel < 2000)", "", "b"),
        ("everything fed by (everything where bytes > 4 KiB)", "a", "a b c s"),
        ("chain after (everything where bytes > 4 KiB)", "", "b c s"),
        ("first (everything where bytes > 4 KiB) per graph", "", "cast a b c"),
        ("mm chain after (everything where bytes > 4 KiB)", "", "b c s"),
        ("mm chain before (cos where bytes > 4 KiB)", "", "a b"),
        ("everything where time > 17 us", "cast", "cast a b c s"),
        ("everything where not time > 17 us", "", "a b c s"),
        ("everything where time > 0", "cast", "cast a b c s"),
        ("everything where time > 60 ms", "", ""),
        ("everything where time_per_gib > 2 s", "cast", "cast a b c s"),
        ("everything where shape[0] > 16", "cast", "cast a b c"),
        ("everything where shape[1] > 16", "cast a b c", "cast a b c"),
        ("everything where crosses cut per 1 KiB", "", "a b c"),
        ("everything where crosses cut per auto", "", ""),  # a batch a thousand times as large makes no GiB either
    ],
)
def test_by_hand(text: str, sure: str, possible: str) -> None:
    policy = policylang.parse(f"save {text}")
    bound, _ = bounds_of(GRAPH, policy.rules[0].selector, policy.lets)
    assert " ".join(GRAPH.names[row] for row in bound.sure) == sure
    assert " ".join(GRAPH.names[row] for row in bound.possible) == possible
