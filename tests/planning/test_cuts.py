"""Where the forward is cut into stages, and what crosses the cuts; by hand."""

from __future__ import annotations

import pytest

from policylang.graph.chains import Chains
from policylang.graph.facts import Facts
from policylang.language import syntax as s
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.selection.cuts import Cuts
from tests.planning.sentences import everything, names, only, op, planned, recompute, save, where
from tests.support.textgraph import GraphBuilder, facts_of
from tests.support.trees import span


def cuts_of(facts: Facts) -> Cuts:
    return Cuts(facts, Chains(facts))


def behind(facts: Facts, size: float) -> list[str]:
    """The last node before each cut."""
    return [facts.names[facts.forward[place - 1]] for place in cuts_of(facts).positions(size)]


def crossing(facts: Facts, size: float) -> list[str]:
    mask = cuts_of(facts).crossing(size)
    return [facts.names[row] for row in range(len(facts)) if mask[row]]


def crosses_cut(size: int) -> s.CrossesCut:
    text = f"crosses cut per {size}"
    return s.CrossesCut(s.Quantity(float(size), "bytes", span(str(size))), span(text))


CHAIN = facts_of("%x = input bytes=1000\n%n0 = aten.sin.default(%x) bytes=10\n" + "\n".join(
    f"%n{i} = aten.sin.default(%n{i - 1}) bytes=10" for i in range(1, 10)
))  # fmt: skip


def test_a_stage_holds_as_much_as_it_may_where_all_cuts_are_alike():
    """100 bytes in ten values: of equal cuts the latest, at which the stage has made just 30."""
    assert cuts_of(CHAIN).produced == 100
    assert behind(CHAIN, 30) == ["n2", "n5", "n8"]
    assert crossing(CHAIN, 30) == ["n2", "n5", "n8"]
    assert behind(CHAIN, 39) == ["n2", "n5", "n8"]
    assert behind(CHAIN, 50) == ["n4"]


@pytest.mark.parametrize(("gib", "stages"), [(1, 1), (2, 1), (4, 2), (16, 4), (100, 10)])
def test_auto_makes_as_many_stages_as_each_has_gib(gib: int, stages: int):
    """As AutoParallel counts: the square root of what the forward makes, both in GiB, weights left out."""
    builder = GraphBuilder()
    builder.add("w", "parameter", (), bytes=2**40)
    builder.add("gathered", "prims.convert_element_type.default", (0,), bytes=2**40)
    builder.add("x", "input", (), bytes=2**40)
    for i in range(gib):
        builder.add(f"n{i}", "aten.sin.default", (len(builder.rows) - 1,), bytes=2**30)
    facts = builder.facts(CHAIN.kind)
    cuts = cuts_of(facts)
    assert cuts.stage(None) == (gib * 2**60) ** 0.5
    assert len(cuts.positions(cuts.stage(None))) == (stages if gib == 2 else stages - 1)
    assert cuts.crossing(None) == cuts.crossing(cuts.stage(None))


@pytest.mark.parametrize("size", [100, 101, 10**12])
def test_a_forward_that_makes_no_more_than_one_stage_has_no_cut(size):
    assert behind(CHAIN, size) == []
    assert crossing(CHAIN, size) == []


def test_a_stage_ends_where_the_least_is_alive_in_its_second_half():
    facts = facts_of(
        """
        %x = input
        %thin_early = aten.mm.default(%x) bytes=1
        %wide = aten.mm.default(%thin_early) bytes=50
        %thin = aten.mm.default(%wide) bytes=2
        %wide_again = aten.mm.default(%thin) bytes=40
        %end = aten.mm.default(%wide_again) bytes=30
        """
    )
    # at 100 the stage may end behind `wide` (51 made, 50 alive), `thin` (53, 2) or `wide_again` (93, 40)
    assert behind(facts, 100) == ["thin"]
    assert crossing(facts, 100) == ["thin"]


def test_what_a_residual_skips_over_is_alive_too():
    facts = facts_of(
        """
        %x = input
        %residual = aten.mm.default(%x) bytes=10
        %norm = aten.mul.Tensor(%residual) bytes=10
        %up = aten.mm.default(%norm) bytes=10
        %sum = aten.add.Tensor(%residual, %up) bytes=10
        %head = aten.mm.default(%sum) bytes=10
        """
    )
    # the second stage: behind `norm` two values are alive, behind `up` as well
    assert behind(facts, 20) == ["residual", "up"]
    assert crossing(facts, 20) == ["residual", "up"]
    assert crossing(facts, 30) == ["residual", "up"]
    assert crossing(facts, 40) == ["sum"]


def test_one_node_that_makes_too_much_is_a_stage_of_its_own():
    facts = facts_of(
        """
        %x = input
        %a = aten.mm.default(%x) bytes=10
        %huge = aten.mm.default(%a) bytes=1000
        %flat = aten.view.default(%huge) view
        %b = aten.mm.default(%flat) bytes=10
        %c = aten.mm.default(%b) bytes=10
        """
    )
    assert behind(facts, 100) == ["flat"]
    assert crossing(facts, 100) == ["huge"]


def test_nothing_is_cut_off_behind_the_last_value():
    facts = facts_of(
        """
        %x = input
        %a = aten.mm.default(%x) bytes=10
        %huge = aten.mm.default(%a) bytes=1000
        %flat = aten.view.default(%huge) view
        %size = aten.sym_size.int(%flat) symbolic bytes=8
        """
    )
    assert behind(facts, 100) == []


def test_the_value_that_carries_the_memory_crosses_and_its_views_do_not():
    facts = facts_of(
        """
        %x = input bytes=1000
        %looked_at = aten.view.default(%x) view bytes=1000
        %base = aten.mm.default(%looked_at) bytes=10
        %flat = aten.view.default(%base) view bytes=10
        %turned = aten.t.default(%flat) view bytes=10
        %b = aten.mm.default(%turned) bytes=10
        %c = aten.add.Tensor(%b, %looked_at) bytes=10
        """
    )
    assert cuts_of(facts).produced == 30
    # behind `flat` as behind `turned`: `base` is read by the next node through a view
    assert behind(facts, 10) == ["turned", "b"]
    assert crossing(facts, 10) == ["base", "b"]


def test_a_wait_shares_the_fate_of_its_collective():
    facts = facts_of(
        """
        %x = input
        %reduce = _c10d_functional.all_reduce.default(%x) collective bytes=10
        %done = _c10d_functional.wait_tensor.default(%reduce) bytes=10
        %b = aten.mm.default(%done) bytes=10
        %c = aten.mm.default(%b) bytes=10
        """
    )
    assert cuts_of(facts).produced == 30
    assert crossing(facts, 10) == ["reduce", "done", "b"]


def test_of_several_results_those_that_are_read_later_cross_with_their_operator():
    facts = facts_of(
        """
        %x = input
        %norm = aten.native_layer_norm.default(%x) multi_output bytes=30
        %out = builtin.getitem(%norm) bytes=20
        %mean = builtin.getitem(%norm) bytes=10
        %b = aten.mm.default(%out) bytes=30
        %c = aten.mm.default(%b) bytes=30
        ---
        %bw = aten.mul.Tensor(%mean)
        """
    )
    assert cuts_of(facts).produced == 90
    assert behind(facts, 30) == ["mean", "b"]
    assert crossing(facts, 30) == ["norm", "out", "b"]


def test_results_are_made_when_their_operator_runs():
    """`rest` is picked late and was there all the time."""
    facts = facts_of(
        """
        %x = input
        %pair = aten.native_layer_norm.default(%x) multi_output bytes=20
        %out = builtin.getitem(%pair) bytes=10
        %b = aten.mm.default(%out) bytes=10
        %rest = builtin.getitem(%pair) bytes=10
        %c = aten.add.Tensor(%b, %rest) bytes=10
        """
    )
    assert behind(facts, 20) == ["out"]
    assert crossing(facts, 20) == ["pair", "out", "rest"]


def test_weights_are_neither_made_nor_alive():
    facts = facts_of(
        """
        %x = input bytes=10
        %w = parameter bytes=100
        %half = prims.convert_element_type.default(%w) bytes=50
        %gather = _c10d_functional.all_gather_into_tensor.default(%half) collective bytes=400 group=dp:8
        %weight = _c10d_functional.wait_tensor.default(%gather) bytes=400
        %a = aten.mm.default(%x, %weight) bytes=10
        %b = aten.mm.default(%a, %weight) bytes=10
        %c = aten.mm.default(%b, %weight) bytes=10
        """
    )
    assert cuts_of(facts).produced == 30
    assert crossing(facts, 10) == ["a", "b"]


def test_a_rule_saves_what_crosses_and_recomputes_a_stage_at_a_time():
    builder = GraphBuilder()
    builder.add("x", "input", ())
    for i in range(100):
        builder.add(f"n{i}", "aten.sin.default", (len(builder.rows) - 1,), bytes=8)
    for i in reversed(range(100)):
        builder.add(f"b{i}", "aten.cos.default", (builder.index[f"n{i}"],), backward=True)
    facts = builder.facts(facts_of("%x = input\n---\n%t = tangent").kind)
    made = planned(facts, recompute(everything), save(where(everything, crosses_cut(80))))
    assert made.diagnostics == ()
    outcome = saved_and_recomputed(made)
    assert names(facts, outcome.saved) == [f"n{i}" for i in range(9, 99, 10)]
    assert outcome.saved_bytes == 9 * 8
    assert len(outcome.recomputed) == 91


def test_a_rule_without_a_cut_is_told_how_much_there_is_to_cut():
    found = only(
        planned(CHAIN, recompute(everything), save(where(everything, crosses_cut(4096)))).diagnostics, "APL301"
    )
    assert found.details == (
        "everything: 10 nodes",
        "where crosses cut per 4096: 0 of them; the forward makes 100 B and has no cut",
    )


def test_without_a_cut_auto_says_how_large_its_stages_are():
    auto = s.CrossesCut(None, span("crosses cut per auto"))
    found = only(planned(CHAIN, recompute(everything), save(where(everything, auto))).diagnostics, "APL301")
    assert found.details[1] == (
        "where crosses cut per auto: 0 of them; the forward makes 100 B and has no cut at stages of 320 KiB"
    )


def test_a_rule_that_no_crossing_value_fits_is_told_the_number_of_cuts():
    found = only(planned(CHAIN, recompute(everything), save(where(op("cos"), crosses_cut(30)))).diagnostics, "APL301")
    assert found.details == (
        "cos: 0 nodes",
        "where crosses cut per 30: 0 of them; the forward makes 100 B and has 3 cuts",
    )
