"""Rematerialisation, case by case: where copies go, what they are called, and what stays."""

from __future__ import annotations

import operator

from policylang.audit.graphs import audit_flat
from policylang.backends.flat import rematerialise
from policylang.graph import marks
from policylang.graph.collect import collect
from tests.support import models
from tests.support.decided import decided
from tests.support.flat_graphs import flat_graph
from tests.support.hand import Hand, apply, aten, by_hand, names


def test_a_copy_stands_right_before_the_first_node_that_needs_it() -> None:
    gm = by_hand(
        "x; a = sin(x); c = cos(a); loss = exp(c); first := ones_like(loss); second := mul(first, c); "
        "third := mul(second, a); -> loss, third"
    )
    apply(gm, "recompute sin or cos")
    assert names(gm) == [
        "x",
        "sin_default",
        "cos_default",
        "exp_default",
        "ones_like_default",
        "sin_default_recomputed",
        "cos_default_recomputed",
        "mul_tensor",
        "mul_tensor_1",
        "output",
    ]
    index = {node.name: node for node in gm.graph.nodes}
    assert index["cos_default_recomputed"].args == (index["sin_default_recomputed"],)
    assert index["mul_tensor_1"].args[1] is index["sin_default_recomputed"], "the second reader shares the copy"


def test_each_region_gets_its_own_copies_with_names_of_their_own() -> None:
    gm = by_hand(
        "x; a = sin(x); loss = exp(a); one := mul(loss, a); more = cos(x); two := mul(more, a); -> loss, one, more, two"
    )
    report = apply(gm, "recompute sin")
    assert [name for name in names(gm) if "recomputed" in name] == [
        "sin_default_recomputed",
        "sin_default_recomputed_1",
    ]
    assert report.recomputed.names == ("sin_default",)


def test_regions_that_need_nothing_get_nothing() -> None:
    gm = by_hand(
        "x; a = sin(x); loss = exp(a); one := ones_like(loss); more = cos(x); two := mul(more, a); "
        "-> loss, one, more, two"
    )
    rematerialise(gm, decided(collect(gm), lambda row: row == 1))
    assert names(gm).index("sin_default_recomputed") == names(gm).index("mul_tensor") - 1
    assert "sin_default_recomputed_1" not in names(gm)


def test_a_value_that_lives_on_in_the_forward_is_read_as_it_is() -> None:
    """Running it again would save nothing: the forward after the region needs it."""
    gm = by_hand(
        "x; a = sin(x); loss = exp(a); one := mul(loss, a); more = cos(a); two := mul(more, a); -> loss, one, more, two"
    )
    plan = decided(collect(gm), lambda row: row == 1)
    rematerialise(gm, plan)
    assert [name for name in names(gm) if "recomputed" in name] == ["sin_default_recomputed"]
    index = {node.name: node for node in gm.graph.nodes}
    assert index["mul_tensor"].args[1] is index["sin_default"]
    assert marks.SAVED not in marks.custom(index["sin_default"].meta)
    assert audit_flat(plan, gm.graph).agrees


def test_forward_nodes_that_nothing_reads_any_more_go() -> None:
    gm = by_hand(
        "x; kept = sin(x); gone = cos(kept); also = tanh(gone); loss = exp(kept); back := mul(loss, also); "
        "-> loss, back"
    )
    rematerialise(gm, decided(collect(gm), lambda row: row in (2, 3)))
    assert {"cos_default", "tanh_default"}.isdisjoint(names(gm))
    assert [node.name for node in gm.graph.nodes if marks.SAVED in marks.custom(node.meta)] == [
        "sin_default",
        "exp_default",
    ]


def test_a_multi_output_operator_runs_again_once_with_the_pieces_that_are_needed() -> None:
    hand = Hand()
    x = hand.input("x")
    both = hand.f(aten.frexp.Tensor, x, val=(hand.value, hand.value))
    left = hand.f(operator.getitem, both, 0)
    right = hand.f(operator.getitem, both, 1)
    loss = hand.f(aten.mul.Tensor, left, right)
    back = hand.b(aten.mul.Tensor, loss, left)
    gm = hand.done(loss, back)
    apply(gm, "recompute frexp")
    copies = [name for name in names(gm) if "recomputed" in name]
    assert copies == ["frexp_tensor_recomputed", "getitem_recomputed"]


def test_the_gather_and_its_wait_run_again_together() -> None:
    gm = by_hand(
        'w; x; gather = all_gather_into_tensor(w, 1, "0"); wait = wait_tensor(gather); out = mm(x, wait); '
        "loss = exp(out); back := mm(loss, wait); -> loss, back"
    )
    apply(gm, "must_recompute all_gather")
    order = names(gm)
    assert order[order.index("mm_default_1") - 2 : order.index("mm_default_1")] == [
        "all_gather_into_tensor_default_recomputed",
        "wait_tensor_default_recomputed",
    ]


def test_what_is_saved_is_marked_with_its_operator() -> None:
    gm = flat_graph(models.llama(layers=1)).gm
    report = apply(gm, "recompute everything; save attention")
    marked = {node.name for node in gm.graph.nodes if marks.custom(node.meta).get(marks.SAVED)}
    attention = {
        node.name for node in gm.graph.nodes if "scaled_dot_product" in node.name and "backward" not in node.name
    }
    assert marked == {*report.saved.names, *(name for name in attention if "recomputed" not in name)}
