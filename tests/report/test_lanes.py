"""The order of a sharded model's step, and its picture, in a browser as well."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policylang
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.snapshot import load
from policylang.planning.capabilities import EAGER, FLAT, JOINT, Capabilities
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.inspection.collective_places import placed
from policylang.planning.inspection.communication import Communication, as_decided, communication, step_in_order
from policylang.planning.inspection.order_changes import places_of
from policylang.planning.inspection.peak_values import values_at_peak
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.planning.schedule.builder import build_schedule
from policylang.report.order.lane_chart import LaneScale, lane_chart
from policylang.report.order.lane_data import DrawnStep, drawn_steps
from policylang.report.plan.as_json import plan_json
from policylang.report.plan.html import plan_page
from policylang.simulation.node_times import node_times
from policylang.simulation.step_time import step_time
from tests.report.test_html import WORDS, data_of, graph, in_browser, parsed, without_scripts
from tests.simulation.test_step_time import DEVICE, flat
from tests.support.browser import KEYS, browser
from tests.support.drawn import examples
from tests.support.ordered import SLOW, layers, ordered_plan
from tests.support.shared_graphs import BACKWARD, shared_facts
from tests.support.textgraph import facts_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
BARRIERS = {"mylib.scan.default": 3, "mylib.tell.default": 1}
LEFT = {"bucket0": "nothing computes before it"}


# --- a step of a sharded model ---

LINES = """
include <fsdp>
let weights = all_gather where from parameter
bucket weights per block
prefetch weights 1 block ahead
delay reduce_scatter 1 block
"""


@pytest.fixture(scope="module")
def sharded_step() -> Plan:
    """Of a Llama under FSDP and tensor parallelism, whose weights are gathered again for the backward."""
    device = policylang.load_device("h100-sxm")
    return plan(policylang.parse(LINES), load(DOCS / "graphs" / "fsdp.graph"), FLAT, device=device)


def test_what_is_alive_at_the_peak_of_an_order_sums_up_to_it(sharded_step: Plan) -> None:
    found = breakdown(sharded_step)
    at_peak = values_at_peak(found)
    assert at_peak.bytes == found.under.peak.bytes == sum(share.bytes for share in at_peak.shares)
    assert {"saved", "parameter", "backward"} <= {share.what for share in at_peak.shares}


@pytest.mark.parametrize("able", [JOINT, FLAT])
@pytest.mark.parametrize("rules", ["recompute everything in block\nsave mm in block", "recompute everything"])
def test_an_order_that_moves_nothing_leaves_the_peak_and_the_lines_of_what_is_alive(
    able: Capabilities, rules: str
) -> None:
    """There, what runs again is a node of its own."""
    facts = facts_of(graph(4), GraphKind.FLAT if able is FLAT else None)
    lines = f"blocks layers.*\n{rules}\nundecided -> save\n"
    without, ordered = (plan(parsed(text), facts, able) for text in (lines, f"{lines}optional overlap collective"))
    assert ordered.order is not None
    one, other = (values_at_peak(breakdown(made)) for made in (without, ordered))
    assert "recomputed" in {share.what for share in other.shares}
    assert [(each.what, each.source, each.bytes) for each in other.shares] == [
        (each.what, each.source, each.bytes) for each in one.shares
    ]


def test_every_collective_starts_and_is_awaited_where_a_slow_search_finds_it(sharded_step: Plan) -> None:
    order, found = sharded_step.order, communication(sharded_step)
    assert order is not None
    assert found is not None
    for step in (found.planned, found.traced):
        places = places_of(step.facts, step.schedule)
        names = [step.facts.names[row] for row in step.collectives]
        assert sorted(places) == sorted(names)
        for name in names[::7]:
            shown = placed(found, name)
            slow = shown.planned if step is found.planned else shown.traced
            assert slow is not None
            assert places[name] == (slow.before, slow.awaited_before)


def test_the_page_about_json_has_every_key(sharded_step: Plan) -> None:
    data = json.loads(plan_json(breakdown(sharded_step), (), ()))["order"]
    page = (DOCS / "plan.md").read_text(encoding="utf-8").split("## The order in JSON\n")[1].split("\n## ")[0]
    rows = [re.findall(r"`(\w+)`", row) for row in re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE)]
    assert {key for row in rows for key in row} == {*data}
    words = set(re.findall(r"`(\w+)`", page))
    entries = [data["as_traced"], *data["lines"], *data["collectives"], *data["lines"][0]["buckets"]]
    entries += [data["lines"][0]["buckets"][0]["proof"], *data["steps"]]
    assert {key for entry in entries for key in entry} - words - {"claim"} == set()
    assert {step["kind"] for step in data["steps"]} <= words


# --- the picture ---


def drawn(count: int = 4) -> tuple[DrawnStep, ...]:
    made = ordered_plan(count)
    found = communication(made)
    assert found is not None
    return drawn_steps(found, made.order.block_names)


def test_a_picture_has_what_the_totals_have() -> None:
    made = ordered_plan(4)
    found = communication(made)
    assert found is not None
    for step, side in zip(drawn(), (found.planned, found.traced), strict=True):
        compute, *groups = step.lanes
        assert sum(end - start for start, end in step.waits) == pytest.approx(step.exposed)
        assert sum(each.end - each.start for each in compute.stretches) == pytest.approx(step.step - step.exposed)
        assert sum(each.exposed for lane in groups for each in lane.stretches) == pytest.approx(step.exposed)
        assert [len(lane.stretches) for lane in groups] == [len(side.collectives)]
        assert max(size for _, size in step.memory) == side.peak.bytes
        assert all(
            a.end <= b.start + 1e-12
            for lane in step.lanes
            for a, b in zip(lane.stretches, lane.stretches[1:], strict=False)
        )


@given(flat(), st.data())
@settings(max_examples=examples(40, 400), deadline=None)
def test_any_step_is_drawn_as_it_is_timed(facts: Facts, data: st.DataObject) -> None:
    """What is exposed is where nothing computes; nothing of a lane overlaps; the curve reaches the peak."""
    rows = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    schedule = build_schedule(facts, data.draw(st.lists(st.sampled_from(rows), unique=True)) if rows else [])
    times = node_times(facts, DEVICE)
    step = step_in_order(facts, schedule, times)
    (drawn,) = drawn_steps(Communication(step, step), ())
    walked = step_time(facts, schedule, times)
    assert (drawn.step, drawn.exposed) == (pytest.approx(walked.step), pytest.approx(walked.exposed))
    assert sum(end - start for start, end in drawn.waits) == pytest.approx(walked.exposed, abs=1e-6)
    computes = sum(each.end - each.start for each in drawn.lanes[0].stretches)
    assert computes == pytest.approx(walked.step - walked.exposed, abs=1e-6)
    for lane in drawn.lanes:
        assert all(one.end <= other.start + 1e-6 for one, other in pairwise(lane.stretches))
        assert all(one.exposed <= one.end - one.start + 1e-6 for one in lane.stretches)
    assert max((size for _, size in drawn.memory), default=0) == step.peak.bytes
    assert lane_chart(drawn, LaneScale.of([drawn]), 0).count("<svg") == 1


def test_a_large_graph_stays_light(sharded_step: Plan) -> None:
    """What computes in one block is one stretch, at most some hundred of them a step; bars that touch are one."""
    found = as_decided(sharded_step)
    assert found is not None
    (step,) = drawn_steps(found, sharded_step.block_names)
    compute, *groups = step.lanes
    assert found.planned.lanes is not None
    assert len(compute.stretches) <= 400 + 2 * len(step.waits) < len(found.planned.lanes.compute)
    assert sum(len(lane.stretches) for lane in groups) == len(found.collectives) == 448, "gathers twice, scatters once"
    assert len(step.memory) <= 1000
    assert any(re.fullmatch(r".* to .* in layers\.3, \d+ operators", each.words) for each in compute.stretches)
    text = lane_chart(step, LaneScale.of([step]), 0)
    assert len(text) < 60_000


def test_the_page_without_a_script() -> None:
    text = without_scripts(plan_page(breakdown(ordered_plan(4, left=LEFT, barriers=BARRIERS)), (), "a.graph"))
    assert "as planned: a step of 96 ms, 16 ms of it exposed (16.7%); 4 collectives in group dp:4." in text
    assert "as traced: a step of 148 ms, 68 ms of it exposed (45.9%); 8 collectives in group dp:4." in text
    assert text.count('<input type="radio"') == 2
    assert "mylib.scan.default ×3" in text
    assert "each bucket proven on 4 ranks" in text
    assert "<td>all-gather of 2</td>" in text


def test_the_page_of_a_policy_that_schedules_nothing() -> None:
    made = plan(parsed("undecided -> save"), facts_of(layers(2)), JOINT, device=SLOW)
    text = without_scripts(plan_page(breakdown(made), (), "a.graph"))
    assert "as traced: a step of 74 ms, 34 ms of it exposed" in text
    assert '<input type="radio"' not in text
    silent = plan(parsed("undecided -> save"), facts_of(layers(2)), JOINT)
    assert "Compute and communication" not in plan_page(breakdown(silent), (), "a.graph")
    in_eager = plan(parsed("undecided -> save"), facts_of(layers(2)), EAGER, device=SLOW)
    assert "Compute and communication" not in plan_page(breakdown(in_eager), (), "a.graph")
    untimed = plan_page(breakdown(ordered_plan(2, device=None)), (), "a.graph")
    assert "each bucket proven on 4 ranks" in untimed
    assert data_of(untimed)["order"] is None


@in_browser
def test_the_lanes_in_a_browser(tmp_path) -> None:
    path = tmp_path / "plan.html"
    path.write_text(plan_page(breakdown(ordered_plan(4)), (), "a.graph"), encoding="utf-8")
    with browser(600) as it:
        it.open(path)
        assert it.errors() == []
        assert it.run("return document.documentElement.scrollWidth") <= 600
        assert it.run(WORDS) == 0
        shown = "return [...document.querySelectorAll('#order .view')].map((each) => each.offsetHeight > 0)"
        assert it.run(shown) == [True, False]
        it.type("#order .view-0 svg", KEYS["right"])
        (told,) = it.texts("#order + .legend .told")
        assert told == (
            "group dp:4: bucket1: all_gather_into_tensor of 2, 2 KiB, in layers.1, mine.apl:2, 3; "
            "16 ms from 16 ms, hidden; 7.8 KiB alive"
        )
        assert it.run("return document.querySelector('#order .view-0 svg').getAttribute('aria-valuetext')") == told
        it.type("#order .view-0 svg", KEYS["up"])
        assert it.texts("#order + .legend .told")[0].startswith("compute: h0 in layers.0; 10 ms from 16 ms")
        notes = "return [...document.querySelectorAll('#policy .note')].map((each) => each.textContent).filter(Boolean)"
        assert it.run(notes) == ["8 of 8", "3 of 4", "0 of 4"]
        it.click("#order-1")
        assert it.run(shown) == [False, True]
        it.type("#order .view-1 svg", KEYS["end"])
        assert "exposed 8.5 ms" in it.texts("#order + .legend .told")[0]
        move = """
            const svg = document.querySelector("#order .view-1 svg");
            const box = svg.getBoundingClientRect();
            const at = (x, y) => svg.dispatchEvent(new PointerEvent(
                "pointermove", { clientX: box.left + x * box.width, clientY: box.top + y }));
            const told = document.querySelector("#order + .legend .told");
            return [[0.01, 20], [0.01, 140], [0.01, 180]].map(([x, y]) => { at(x, y); return told.textContent; });
        """
        memory, compute, group = it.run(move)
        assert memory.endswith(" alive")
        assert "nothing computes" in compute
        assert group.startswith("group dp:4: gather_w0: all_gather_into_tensor, 1000 B")
        assert it.errors() == []


@pytest.mark.slow
@in_browser
def test_the_page_of_a_graph_of_seventeen_thousand_nodes(tmp_path) -> None:
    """A recorded backward of 128 ranks: two orders, their lanes in a page that opens and can be walked along."""
    lines = "optional bucket all_gather up to 256 MiB\noverlap collective up to 2 GiB in flight\nundecided -> save"
    device = policylang.load_device("h100-sxm")
    made = plan(parsed(lines), shared_facts(BACKWARD), JOINT, device=device)
    found = breakdown(made)
    assert found.communication is not None
    assert made.order is not None
    planned, traced = drawn_steps(found.communication, made.order.block_names)
    for step in (planned, traced):
        assert sum(end - start for start, end in step.waits) == pytest.approx(step.exposed)
        assert sum(len(lane.stretches) for lane in step.lanes) < 3000
    assert planned.exposed < traced.exposed
    path = tmp_path / "plan.html"
    path.write_text(plan_page(found, (), "a.graph"), encoding="utf-8")
    assert path.stat().st_size < 4_000_000
    with browser(1400) as it:
        it.open(path)
        size = "return JSON.stringify(JSON.parse(document.getElementById('data').textContent).order).length"
        assert it.run(size) < 700_000
        it.type("#order .view-0 svg", KEYS["end"])
        assert it.texts("#order + .legend .told")[0].startswith("group ")
        assert it.errors() == []
