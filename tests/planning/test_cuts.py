"""Where the forward is cut into stages, and what crosses the cuts; by hand."""

from __future__ import annotations

import pytest

from policylang.graph.chains import Chains
from policylang.graph.facts import Facts
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.selection.selectors import Cuts
from tests.planning.sentences import names, only, planned
from tests.support.textgraph import GraphBuilder, facts_of


def cuts_of(facts: Facts) -> Cuts:
    return Cuts(facts, Chains(facts))


def behind(facts: Facts, size: float) -> list[str]:
    """The last node before each cut."""
    return [facts.names[facts.forward[place - 1]] for place in cuts_of(facts).positions(size)]


def crossing(facts: Facts, size: float) -> list[str]:
    mask = cuts_of(facts).crossing(size)
    return [facts.names[row] for row in range(len(facts)) if mask[row]]


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


Stages = tuple[float, list[str] | None, list[str]]
"""A size, the last node before each cut where that is asked, and what crosses them."""


@pytest.mark.parametrize(
    ("text", "produced", "stages"),
    [
        pytest.param(
            """
            %x = input
            %thin_early = aten.mm.default(%x) bytes=1
            %wide = aten.mm.default(%thin_early) bytes=50
            %thin = aten.mm.default(%wide) bytes=2
            %wide_again = aten.mm.default(%thin) bytes=40
            %end = aten.mm.default(%wide_again) bytes=30
            """,
            123,  # at 100 behind `wide` (51 made, 50 alive), `thin` (53, 2) or `wide_again` (93, 40)
            [(100, ["thin"], ["thin"])],
            id="a stage ends where the least is alive in its second half",
        ),
        pytest.param(
            """
            %x = input
            %residual = aten.mm.default(%x) bytes=10
            %norm = aten.mul.Tensor(%residual) bytes=10
            %up = aten.mm.default(%norm) bytes=10
            %sum = aten.add.Tensor(%residual, %up) bytes=10
            %head = aten.mm.default(%sum) bytes=10
            """,
            50,  # the second stage: behind `norm` two values are alive, behind `up` as well
            [(20, ["residual", "up"], ["residual", "up"]), (30, None, ["residual", "up"]), (40, None, ["sum"])],
            id="what a residual skips over is alive too",
        ),
        pytest.param(
            """
            %x = input
            %a = aten.mm.default(%x) bytes=10
            %huge = aten.mm.default(%a) bytes=1000
            %flat = aten.view.default(%huge) view
            %b = aten.mm.default(%flat) bytes=10
            %c = aten.mm.default(%b) bytes=10
            """,
            1030,
            [(100, ["flat"], ["huge"])],
            id="one node that makes too much is a stage of its own",
        ),
        pytest.param(
            """
            %x = input
            %a = aten.mm.default(%x) bytes=10
            %huge = aten.mm.default(%a) bytes=1000
            %flat = aten.view.default(%huge) view
            %size = aten.sym_size.int(%flat) symbolic bytes=8
            """,
            1010,
            [(100, [], [])],
            id="nothing is cut off behind the last value",
        ),
        pytest.param(
            """
            %x = input bytes=1000
            %looked_at = aten.view.default(%x) view bytes=1000
            %base = aten.mm.default(%looked_at) bytes=10
            %flat = aten.view.default(%base) view bytes=10
            %turned = aten.t.default(%flat) view bytes=10
            %b = aten.mm.default(%turned) bytes=10
            %c = aten.add.Tensor(%b, %looked_at) bytes=10
            """,
            30,  # behind `flat` as behind `turned`: `base` is read by the next node through a view
            [(10, ["turned", "b"], ["base", "b"])],
            id="the value that carries the memory crosses and its views do not",
        ),
        pytest.param(
            """
            %x = input
            %reduce = _c10d_functional.all_reduce.default(%x) collective bytes=10
            %done = _c10d_functional.wait_tensor.default(%reduce) bytes=10
            %b = aten.mm.default(%done) bytes=10
            %c = aten.mm.default(%b) bytes=10
            """,
            30,
            [(10, None, ["reduce", "done", "b"])],
            id="a wait crosses with its collective",
        ),
        pytest.param(
            """
            %x = input
            %norm = aten.native_layer_norm.default(%x) multi_output bytes=30
            %out = builtin.getitem(%norm) bytes=20
            %mean = builtin.getitem(%norm) bytes=10
            %b = aten.mm.default(%out) bytes=30
            %c = aten.mm.default(%b) bytes=30
            ---
            %bw = aten.mul.Tensor(%mean)
            """,
            90,
            [(30, ["mean", "b"], ["norm", "out", "b"])],
            id="of several results those that are read later cross with their operator",
        ),
        pytest.param(
            """
            %x = input
            %pair = aten.native_layer_norm.default(%x) multi_output bytes=20
            %out = builtin.getitem(%pair) bytes=10
            %b = aten.mm.default(%out) bytes=10
            %rest = builtin.getitem(%pair) bytes=10
            %c = aten.add.Tensor(%b, %rest) bytes=10
            """,
            40,  # `rest` is picked late and was there all the time
            [(20, ["out"], ["pair", "out", "rest"])],
            id="results are made when their operator runs",
        ),
        pytest.param(
            """
            %x = input bytes=10
            %w = parameter bytes=100
            %half = prims.convert_element_type.default(%w) bytes=50
            %gather = _c10d_functional.all_gather_into_tensor.default(%half) collective bytes=400 group=dp:8
            %weight = _c10d_functional.wait_tensor.default(%gather) bytes=400
            %a = aten.mm.default(%x, %weight) bytes=10
            %b = aten.mm.default(%a, %weight) bytes=10
            %c = aten.mm.default(%b, %weight) bytes=10
            """,
            30,
            [(10, None, ["a", "b"])],
            id="weights are neither made nor alive",
        ),
    ],
)
def test_where_a_forward_is_cut_and_what_crosses(text: str, produced: int, stages: list[Stages]):
    facts = facts_of(text)
    assert cuts_of(facts).produced == produced
    for size, before, over in stages:
        assert before is None or behind(facts, size) == before
        assert crossing(facts, size) == over


def test_a_rule_saves_what_crosses_and_recomputes_a_stage_at_a_time():
    builder = GraphBuilder()
    builder.add("x", "input", ())
    for i in range(100):
        builder.add(f"n{i}", "aten.sin.default", (len(builder.rows) - 1,), bytes=8)
    for i in reversed(range(100)):
        builder.add(f"b{i}", "aten.cos.default", (builder.index[f"n{i}"],), backward=True)
    facts = builder.facts(facts_of("%x = input\n---\n%t = tangent").kind)
    made = planned(facts, "recompute everything; save everything where crosses cut per 80")
    assert made.diagnostics == ()
    outcome = saved_and_recomputed(made)
    assert names(facts, outcome.saved) == [f"n{i}" for i in range(9, 99, 10)]
    assert outcome.saved_bytes == 9 * 8
    assert len(outcome.recomputed) == 91


@pytest.mark.parametrize(
    ("selector", "size", "details"),
    [
        ("everything", "4096", ("everything: 10 nodes", "4096: 0 of them; the forward makes 100 B and has no cut")),
        (
            *("everything", "auto"),
            ("everything: 10 nodes", "auto: 0 of them; the forward makes 100 B and has no cut at stages of 320 KiB"),
        ),
        ("cos", "30", ("cos: 0 nodes", "30: 0 of them; the forward makes 100 B and has 3 cuts")),
    ],
)
def test_a_rule_that_nothing_crosses_for_is_told_what_there_is_to_cut(selector, size, details):
    made = planned(CHAIN, f"recompute everything; save {selector} where crosses cut per {size}")
    assert only(made.diagnostics, "APL301").details == (details[0], f"where crosses cut per {details[1]}")
