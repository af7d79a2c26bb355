"""The trade-off as rows, as a picture, and on a page that may hold any text."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import attrs
import pytest

import policylang
from policylang.report.tuning.page import trade_off_page
from policylang.report.tuning.rows import distinctions
from policylang.report.tuning.scatter import trade_off_svg
from policylang.simulation.node_times import node_times
from policylang.tuning.evaluation import Besides, Budget, Candidate, Tuned
from policylang.tuning.tuned_policy import neighbour_words, subject_of

SVG = "{http://www.w3.org/2000/svg}"


def candidate(rules: str, peak: int, recompute: float, saved: int = 0) -> Candidate:
    return Candidate(rules, peak, "mm", saved or peak // 2, 0, recompute, 0.0, 1.0 + recompute)


ALL = candidate("recompute everything\nsave everything in block where crosses block\n", 10 << 30, 0.6)
SOME = candidate(
    "recompute everything\nsave matmul in block\nsave everything in block where crosses block\n", 20 << 30, 0.2
)
NONE = candidate("save everything\n", 30 << 30, 0.0)


def tuned(budget: Budget = Budget("peak", 25 << 30), bound: float | None = 0.15) -> Tuned:  # noqa: B008
    return Tuned(budget, Besides(), SOME, ALL, NONE, (ALL, SOME, NONE), bound, 1.0)


def policy(graph: str = "a.graph", **how: object) -> policylang.TunedPolicy:
    facts = policylang.load_snapshot("docs/graphs/tutorial.graph")
    device = policylang.load_device("h100-sxm")
    subject = subject_of(facts, graph, node_times(facts, device), "h100-sxm")
    return policylang.TunedPolicy("save everything\n", tuned(**how), subject)  # type: ignore[arg-type]


def test_what_distinguishes_each_from_the_one_before():
    lines = "recompute everything; save everything in block where crosses block"
    assert distinctions((ALL, SOME, NONE)) == [lines, "save matmul in block", "save everything"]
    assert distinctions((SOME, ALL)) == [SOME.rules.strip().replace("\n", "; "), "without save matmul in block"]
    turned = attrs.evolve(ALL, rules="\n".join(reversed(ALL.rules.splitlines())))
    assert distinctions((ALL, turned))[1] == "the same rules in another order"


def points(svg: str, kind: str) -> list[ElementTree.Element]:
    return [each for each in ElementTree.fromstring(svg).iter(f"{SVG}g") if each.get("class") == kind]


def test_the_picture_has_a_point_for_every_policy():
    known = [("full", candidate("recompute everything\n", 12 << 30, 0.9)), ("full", ALL)]
    svg = trade_off_svg(tuned(), known)
    assert len(points(svg, "policy")) == 2
    assert len(points(svg, "known")) == 2
    (chosen,) = points(svg, "chosen")
    assert chosen.find(f"{SVG}title").text == "this policy: 20 GiB, 200 ms (20%)\n" + SOME.rules.strip()
    assert chosen.find(f"{SVG}text").text == "this policy"
    assert "no choice of values that saves as much recomputes for less: 150 ms" in svg
    xs = [float(each.find(f"{SVG}circle").get("cx")) for each in points(svg, "policy")]
    ys = [float(each.find(f"{SVG}circle").get("cy")) for each in points(svg, "policy")]
    assert xs[0] > xs[1]  # by rising memory the time falls
    assert ys[0] > ys[1]  # and memory goes up
    without = trade_off_svg(tuned(), budget=False)
    assert not points(without, "chosen")
    assert len(points(without, "policy")) == 3
    assert "the budget" not in without


@pytest.mark.parametrize(
    "budget",
    [Budget("saved", 11 << 30), Budget("recompute time", 0.3), Budget("peak", 90 << 30)],
    ids=lambda b: b.figure,
)
def test_every_kind_of_budget_is_drawn(budget):
    svg = trade_off_svg(tuned(budget, None))
    assert ("the budget" in svg) == (budget.limit < 60 << 30)
    numbers = [float(each) for each in re.findall(r'(?:cx|cy|x1|x2|y1|y2)="([^"]+)"', svg)]
    assert all(0 <= each <= 960 for each in numbers)


def test_a_trade_off_of_one_policy_that_takes_nothing():
    only = candidate("save everything\n", 1, 0.0)
    alone = Tuned(Budget("peak", 1), Besides(), only, None, None, (only,), None, 0.0)
    ElementTree.fromstring(trade_off_svg(alone))


def test_copies_to_the_host_cost_what_the_step_waits_for_them():
    moved = attrs.evolve(
        SOME, rules="save everything\noffload mm\n", recompute=0.0, offloaded=1 << 30, step=1.4, copies=0.4
    )
    chosen = attrs.evolve(tuned(), chosen=moved, table=(ALL, moved, NONE))
    assert moved.price == 0.4
    assert neighbour_words(chosen) == "with 10 GiB more, 400 ms less; with 10 GiB less, 200 ms more"


def test_names_that_would_meet_are_left_out():
    crowd = [(f"policy_number_{n}", attrs.evolve(SOME, peak=SOME.peak + n)) for n in range(20)]
    labels = [each for each in points(trade_off_svg(tuned(), crowd), "known") if each.find(f"{SVG}text") is not None]
    assert 0 < len(labels) < 20


def test_no_text_becomes_markup():
    mean = "</style><script>alert(1)</script>.graph"
    known = [("<b>", attrs.evolve(SOME, rules="save mm # <i>&\n"))]
    page = trade_off_page(policy(mean), known)
    assert "<script>" not in page
    assert "<b>&" not in page
    assert "<i>" not in page.replace("<i class", "")
    assert "&lt;/style&gt;&lt;script&gt;alert(1)&lt;/script&gt;.graph" in page
    assert 'href="#policy-2"' in page
    assert 'id="policy-2"' in page


def test_a_notebook_shows_the_trade_off():
    cell = policy("a.graph")._repr_html_()
    assert "<svg" in cell
    assert "save everything" in cell
