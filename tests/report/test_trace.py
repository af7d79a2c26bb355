"""The order of a sharded model's step: what is alive, where collectives start, its JSON and its Chrome trace."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import policylang
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.snapshot import load
from policylang.operators.names import WAIT
from policylang.planning.capabilities import EAGER, FLAT, JOINT, Capabilities
from policylang.planning.inspection.breakdown import breakdown, values_at_peak
from policylang.planning.inspection.communication import communication, placed, places_of, step_in_order
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.planning.schedule import build_schedule
from policylang.report.plan_json import chrome_trace, plan_json, step_events
from policylang.report.plan_page import plan_page
from policylang.simulation.node_times import node_times
from policylang.simulation.streams import step_time
from tests.report.test_html import SLOW as PRODUCTS
from tests.report.test_html import WORDS, graph, in_browser, parsed, without_scripts
from tests.simulation.test_step_time import DEVICE, flat
from tests.support.browser import browser
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
    found = communication(sharded_step)
    for step in (found.planned, found.traced):
        facts, rows = step.facts, list(step.schedule.rows)
        places = places_of(facts, step.schedule)
        names = [facts.names[row] for row in step.collectives]
        assert sorted(places) == sorted(names)
        for name in names[::7]:
            start = rows.index(facts.index[name])
            waits = (at for at, row in enumerate(rows) if facts.targets[row] == WAIT)
            end = next(at for at in waits if facts.index[name] in facts.inputs[rows[at]])
            shown = placed(found, name)
            assert places[name] == evolve(shown.planned if step is found.planned else shown.traced, run=None)
            assert (places[name].step, places[name].awaited_step) == (start + 1, end + 1)
            for at, before in ((start, places[name].before), (end, places[name].awaited_before)):
                after = [row for row in rows[at + 1 :] if facts.names[row] not in places]
                assert before == next((facts.names[row] for row in after if facts.storage_roots[row] == row), "")


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


# --- the Chrome trace ---


class Trace:
    """A Chrome trace as a viewer reads it: one process."""

    def __init__(self, events: Sequence[dict[str, Any]], process: int = 0) -> None:
        mine = [each for each in events if each["pid"] == process]
        self.names = {each["tid"]: each["args"]["name"] for each in mine if each["name"] == "thread_name"}
        (self.title,) = (each["args"]["name"] for each in mine if each["name"] == "process_name")
        runs = [each for each in mine if each["ph"] == "X"]
        self.threads = {thread: [each for each in runs if each["tid"] == thread] for thread in self.names}
        self.memory = [(each["ts"], each["args"]["bytes"]) for each in mine if each["ph"] == "C"]
        assert len(mine) == 1 + len(self.names) + len(runs) + len(self.memory)
        assert all(each["ts"] >= 0 and each["dur"] >= 0 for each in runs)

    @property
    def collectives(self) -> list[dict[str, Any]]:
        return [each for thread, runs in self.threads.items() if thread for each in runs]

    @property
    def computes(self) -> float:
        """Seconds."""
        return sum(each["dur"] for each in self.threads[0]) / 1e6

    @property
    def exposed(self) -> float:
        return sum(each["args"]["exposed_us"] for each in self.collectives) / 1e6

    def overlaps(self) -> bool:
        beside = (pair for runs in self.threads.values() for pair in pairwise(runs))
        return any(one["ts"] + one["dur"] > other["ts"] + 1e-3 for one, other in beside)


def traces(made: Plan) -> list[Trace]:
    document = json.loads(chrome_trace(breakdown(made)))
    events = document["traceEvents"]
    return [Trace(events, process) for process in sorted({each["pid"] for each in events})]


def test_a_trace_has_what_the_totals_have() -> None:
    made = ordered_plan(4)
    found = communication(made)
    planned, traced = traces(made)
    assert (planned.title, traced.title) == ("as planned", "as traced")
    for trace, side in zip((planned, traced), (found.planned, found.traced), strict=True):
        assert trace.names == {0: "compute", 1: "group dp:4"}
        assert trace.exposed == pytest.approx(side.lanes.exposed)
        assert trace.computes == pytest.approx(side.lanes.step - side.lanes.exposed)
        assert [each["name"] for each in trace.collectives] == [side.facts.names[row] for row in side.collectives]
        assert max(size for _, size in trace.memory) == side.peak.bytes
        assert not trace.overlaps()
    first = planned.collectives[1]
    assert (first["name"], first["cat"], first["ts"], first["dur"]) == ("bucket1", "collective", 16_000.0, 16_000.0)
    assert first["args"] == {
        "operator": "all_gather_into_tensor",
        "bytes": 2000,
        "block": "layers.1",
        "collectives": 2,
        "issued_us": 16_000.0,
        "awaited_us": 36_000.0,
        "exposed_us": 0.0,
        "lines": ["mine.apl:2", "mine.apl:3"],
    }
    assert "exposed_by" in planned.collectives[0]["args"]
    assert planned.threads[0][0]["args"] == {
        "operator": "aten.mm.default",
        "module": "layers.0.mlp",
        "bytes": 1000,
        "block": "layers.0",
    }


@given(flat(), st.data())
@settings(max_examples=examples(40, 400))
def test_any_step_is_traced_as_it_is_timed(facts: Facts, data: st.DataObject) -> None:
    """What is exposed is where nothing computes; nothing of a thread overlaps; the counter reaches the peak."""
    rows = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    schedule = build_schedule(facts, data.draw(st.lists(st.sampled_from(rows), unique=True)) if rows else [])
    times = node_times(facts, DEVICE)
    step = step_in_order(facts, schedule, times)
    trace = Trace(list(step_events("any", step)))
    walked = step_time(facts, schedule, times)
    assert trace.computes == pytest.approx(walked.step - walked.exposed, abs=1e-6)
    assert trace.exposed == pytest.approx(walked.exposed, abs=1e-6)
    assert not trace.overlaps()
    assert max((size for _, size in trace.memory), default=0) == step.peak.bytes
    assert all(one[0] <= other[0] and one[1] != other[1] for one, other in pairwise(trace.memory))


def test_the_trace_of_a_policy_that_schedules_nothing() -> None:
    facts = facts_of(layers(2))
    (trace,) = traces(plan(parsed("undecided -> save"), facts, JOINT, device=SLOW))
    assert trace.title == "as planned"
    assert trace.exposed == pytest.approx(0.034)
    assert len(trace.collectives) == 4


def test_what_runs_again_is_marked(sharded_step: Plan) -> None:
    text = "blocks layers.*\nrecompute everything in block\nundecided -> save"
    facts = facts_of(graph(2))
    (trace,) = traces(plan(parsed(text), facts, JOINT, device=PRODUCTS))
    again = {each["name"] for each in trace.threads[0] if each["cat"] == "recomputed"}
    assert {"mm0", "mm1"} <= again
    planned, _ = traces(sharded_step)
    assert {each["cat"] for each in planned.threads[0]} == {"compute"}, "there, what runs again is a node of its own"


def test_the_page_of_an_order() -> None:
    text = without_scripts(plan_page(breakdown(ordered_plan(4, left=LEFT, barriers=BARRIERS)), (), "a.graph"))
    assert "mylib.scan.default ×3" in text
    assert "each bucket proven on 4 ranks" in text
    assert "<td>all-gather of 2</td>" in text
    assert "each bucket proven on 4 ranks" in plan_page(breakdown(ordered_plan(2, device=None)), (), "a.graph")


def test_the_page_of_a_policy_that_schedules_nothing() -> None:
    titles = [
        "Compute and communication" in plan_page(breakdown(made), (), "a.graph")
        for made in (
            plan(parsed("undecided -> save"), facts_of(layers(2)), able, device=device)
            for able, device in ((JOINT, SLOW), (JOINT, None), (EAGER, SLOW))
        )
    ]
    assert titles == [True, False, False]


@in_browser
def test_the_lines_of_an_order_have_notes_in_a_browser(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text(plan_page(breakdown(ordered_plan(4)), (), "a.graph"), encoding="utf-8")
    with browser(600) as it:
        it.open(path)
        assert it.errors() == []
        assert it.run("return document.documentElement.scrollWidth") <= 600
        assert it.run(WORDS) == 0
        notes = "return [...document.querySelectorAll('#policy .note')].map((each) => each.textContent).filter(Boolean)"
        assert it.run(notes) == ["8 of 8", "3 of 4", "0 of 4"]


@pytest.mark.slow
def test_the_trace_of_a_graph_of_seventeen_thousand_nodes() -> None:
    """A recorded backward of 128 ranks in two orders."""
    lines = "optional bucket all_gather up to 256 MiB\noverlap collective up to 2 GiB in flight\nundecided -> save"
    device = policylang.load_device("h100-sxm")
    planned, traced = traces(plan(parsed(lines), shared_facts(BACKWARD), JOINT, device=device))
    assert planned.exposed < traced.exposed
    assert not planned.overlaps()
    assert not traced.overlaps()
