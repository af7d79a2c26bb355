"""The order of a step: as text, JSON, picture and Chrome trace, what is alive, and where collectives start."""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import strategies as st

import policylang
from policylang.audit.outcome import combined, plan_report
from policylang.audit.report import Report
from policylang.backends.applied_plans import announce_cached
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.snapshot import load
from policylang.language.devices.profile import DeviceProfile
from policylang.language.plain_data import from_plain
from policylang.operators.names import WAIT
from policylang.planning.capabilities import EAGER, FLAT, JOINT
from policylang.planning.graph_edit import Refusal
from policylang.planning.inspection.breakdown import breakdown, values_at_peak
from policylang.planning.inspection.communication import (
    as_decided,
    collective_asked,
    communication,
    placed,
    places_of,
    step_in_order,
)
from policylang.planning.inspection.compare import compare
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.planning.schedule import build_schedule
from policylang.report.explain import CollectiveExplanation, LineExplanation
from policylang.report.plan_comparison import comparison_json, comparison_markdown, comparison_text
from policylang.report.plan_json import chrome_trace, plan_json, step_events
from policylang.report.plan_page import plan_page
from policylang.report.plan_text import order_details, order_totals, plan_text
from policylang.simulation.node_times import node_times
from policylang.simulation.streams import step_time
from tests.report.test_html import SLOW as PRODUCTS
from tests.report.test_html import WORDS, graph, in_browser, parsed, without_scripts
from tests.simulation.test_step_time import DEVICE, flat
from tests.support.browser import browser
from tests.support.drawn import drawn
from tests.support.orders import SLOW, layers, names_in_order, ordered_plan, schedule_of_names
from tests.support.shared_graphs import BACKWARD, shared_facts
from tests.support.textgraph import facts_of

TOTALS = """\
order                  as traced     as planned
all-gather                     8              4
exposed            68 ms (45.9%)  16 ms (16.7%)
step time                 148 ms          96 ms
peak                     5.9 KiB        8.8 KiB
in flight at most         1000 B          2 KiB

no order of these collectives exposes less than 16 ms
nothing is moved across unknown operators: mylib.scan.default ×3, mylib.tell.default"""
DETAILS = """\
line        scheduling line                           matched  moved  into
mine.apl:2  bucket all_gather per block                     8      8     4
mine.apl:3  prefetch all_gather 1 block ahead               4      3
mine.apl:4  overlap collective up to 4 KiB in flight        4      0
mine.apl:2: each bucket proven on 4 ranks
mine.apl:3 left bucket0 where it was: nothing computes before it

exposed  takes  collective  kind             bytes  group  block     bounded by  line
  16 ms  16 ms  bucket0     all-gather of 2  2 KiB  dp:4   layers.0  data        mine.apl:2

hidden: 3 all-gather; 48 ms in all"""
BARRIERS = {"mylib.scan.default": 3, "mylib.tell.default": 1}
LEFT = {"bucket0": "nothing computes before it"}


def test_what_an_order_comes_to() -> None:
    """By hand: four layers of two products of 10 ms each; a gather takes 1 ms and 7.5 ms for three shards, a bucket 1
    ms and 15 ms. As traced all gathers are waited for; of the buckets the first alone."""
    found = communication(ordered_plan(4, left=LEFT, barriers=BARRIERS))
    assert order_totals(found) == TOTALS
    assert order_details(found) == DETAILS
    page = without_scripts(plan_page(breakdown(ordered_plan(4, left=LEFT, barriers=BARRIERS)), (), "a.graph"))
    for shown in ("mylib.scan.default ×3", "each bucket proven on 4 ranks", "<td>all-gather of 2</td>"):
        assert shown in page


def test_without_a_device_there_are_counts_and_bytes_and_no_times() -> None:
    found = communication(ordered_plan(4, device=None))
    text = order_totals(found)
    assert re.search(r"all-gather +8 +4\n", text)
    assert re.search(r"in flight at most +1000 B +2 KiB", text)
    assert "without a device's times, exposed communication is not known" in text
    assert " ms" not in text + order_details(found)
    assert "exposed  " not in order_details(found)
    for shown in (order_details(found), plan_page(breakdown(ordered_plan(2, device=None)), (), "a.graph")):
        assert "each bucket proven on 4 ranks" in shown


def test_alike_collectives_are_one_row_and_the_most_of_reasons_are_told() -> None:
    """As traced, without scheduling lines, every gather is waited for; only the first has nothing to hide it."""
    made = plan(parsed("blocks layers.*\nundecided -> save"), facts_of(layers(4)), JOINT, device=SLOW)
    found = as_decided(made)
    rows = order_details(found).split("\n")
    assert rows[0].split()[:4] == ["exposed", "each", "takes", "collective"]
    assert rows[1].split()[:6] == ["59.5", "ms", "×7", "8.5", "ms", "8.5"]
    assert "gather_v0, and 6 more" in rows[1]
    assert rows[1].endswith("the traced order")
    assert re.search(r"8.5 ms +8.5 ms +gather_w0 .* layers.0 +data", rows[2])
    assert "layers.0–3" in rows[1]
    refused = [Refusal((f"gather_w{n}",), f"reason {n % 6}") for n in range(12)]
    text = order_details(communication(ordered_plan(4, refused=refused)))
    assert "mine.apl:2 left gather_w0, gather_w6 where they were: reason 0" in text
    assert "mine.apl:2 left 4 more, for 2 other reasons" in text


def test_the_totals_of_a_plan_are_those_of_the_order_that_is_carried_out() -> None:
    text = plan_text(breakdown(ordered_plan(4)), (), values=True)
    assert re.search(r"step time +96 ms +148 ms\n", text)
    assert re.search(r"exposed +16 ms \(16.7%\) +68 ms \(45.9%\)\n", text)
    assert re.search(r"peak, forward +8.8 KiB +5.9 KiB\n", text)
    assert "alive at the peak, 8.8 KiB: at x1, step 6 of 20" in text
    assert re.search(r"2 KiB +22.2% +bucket0 +_c10d_functional.all_gather", text)
    short = plan_text(breakdown(ordered_plan(4)), (), summary=True)
    assert text.startswith(short)
    assert "as planned" in short
    assert "scheduling line" not in short


def test_json_has_the_full_order() -> None:
    made = ordered_plan(2, left=LEFT)
    document = json.loads(plan_json(breakdown(made), (), ()))
    found = document["order"]
    assert found["as_traced"]["collectives"] == {"all-gather": 4}
    assert found["as_planned"]["collectives"] == {"all-gather": 2}
    assert found["as_planned"]["exposed_seconds"] == pytest.approx(0.016) == found["bound_seconds"]
    assert found["as_planned"]["step_seconds"] == pytest.approx(0.056)
    assert found["as_planned"]["in_flight_bytes"] == 2000
    assert found["as_planned"]["peak"]["forward"] == document["with"]["peak"]["forward"]
    bucket, prefetch, overlap = found["lines"]
    assert bucket["source"] == "mine.apl:2"
    assert bucket["matched"] == bucket["moved"] == ["gather_w0", "gather_v0", "gather_w1", "gather_v1"]
    assert bucket["buckets"][0]["collectives"] == ["bucket0"]
    assert bucket["buckets"][0]["members"] == ["gather_w0", "gather_v0"]
    assert bucket["buckets"][0]["proof"]["ranks"] == 4
    assert prefetch["left"] == [{"reason": "nothing computes before it", "collectives": ["bucket0"]}]
    assert overlap["moved"] == []
    first, second = found["collectives"]
    assert (first["name"], first["members"], first["block"], first["group"]) == ("bucket0", 2, "layers.0", "dp:4")
    assert (first["exposed_seconds"], first["exposed_by"]) == (pytest.approx(0.016), "data")
    assert (second["exposed_seconds"], second["exposed_by"], second["lines"]) == (0, None, ["mine.apl:2", "mine.apl:3"])
    steps = [(each["name"], each["kind"]) for each in found["steps"]]
    assert [name for name, _ in steps] == names_in_order(made.order)
    assert steps[:5] == [
        ("bucket0", "start"), ("wait_w0", "wait"), ("bucket1", "start"), ("h0", "compute"), ("wait_v0", "wait"),
    ]  # fmt: skip
    short = json.loads(plan_json(breakdown(made), (), (), summary=True))["order"]
    assert sorted(found.keys() - short.keys()) == ["collectives", "steps"]
    untimed = json.loads(plan_json(breakdown(ordered_plan(2, device=None)), (), ()))["order"]
    assert untimed["bound_seconds"] is untimed["as_planned"]["exposed_seconds"] is None
    assert untimed["collectives"][0]["start_seconds"] is None
    assert [each["name"] for each in untimed["steps"]] == [name for name, _ in steps]


@pytest.mark.parametrize(
    "text", ["output()", "%x = input bytes=10\noutput(%x)", "%x = input\n%a = aten.sin.default(%x)\noutput(%a)"]
)
@pytest.mark.parametrize("device", [None, SLOW])
def test_a_graph_with_nothing_to_order(text: str, device: DeviceProfile | None) -> None:
    lines = "optional bucket all_gather per block\noptional delay reduce_scatter 1 block\nundecided -> save"
    made = plan(parsed(lines), facts_of(text), JOINT, device=device)
    found = breakdown(made)
    assert "as planned" in plan_text(found, ())
    assert "no order of these" not in plan_text(found, ())
    assert json.loads(plan_json(found, (), ()))["order"]["collectives"] == []
    assert "what each scheduling line did" in plan_page(found, (), "empty.graph")
    assert str(plan_report(made))
    assert compare(made, made).same


# --- one collective, one line ---
def test_where_a_collective_starts_and_is_awaited_and_what_a_line_did() -> None:
    found = communication(ordered_plan(4, left=LEFT))
    assert collective_asked(found, "wait_v1") == "gather_v1"
    assert collective_asked(found, "h0") is collective_asked(found, "nothing") is None
    said = CollectiveExplanation(placed(found, "gather_v1"))
    assert str(said).split("\n") == [
        "gather_v1: _c10d_functional.all_gather_into_tensor.default in group dp:4",
        "  one with others as bucket1: gather_w1, gather_v1",
        "",
        "order       starts              awaited             takes   exposed  bounded by",
        "as traced   step 10, before x2  step 11, before x2  8.5 ms  8.5 ms   the traced order",
        "as planned  step 3, before h0   step 7, before h1   16 ms   hidden",
        "",
        "line        scheduling line",
        "mine.apl:2  bucket all_gather per block               joined: 2 in one",
        "mine.apl:3  prefetch all_gather 1 block ahead         moved",
        "mine.apl:4  overlap collective up to 4 KiB in flight  not moved",
    ]
    data = json.loads(json.dumps(said.to_dict()))["collective"]
    assert (data["traced"]["step"], data["planned"]["name"], data["planned"]["step"]) == (10, "bucket1", 3)
    assert (data["traced"]["exposed_by"], data["planned"]["exposed_by"]) == ("order", None)
    assert "left: nothing computes before it" in str(CollectiveExplanation(placed(found, "gather_w0")))
    untimed = communication(ordered_plan(4, device=None))
    assert "takes" not in str(CollectiveExplanation(placed(untimed, "bucket2")))
    bucket, prefetch, overlap = (str(LineExplanation(found.lines[at], found.planned.lanes.exposed)) for at in range(3))
    assert "  matches 8 collectives, moves 8 into 4\n  each bucket proven on 4 ranks\n" in bucket
    assert "  bucket3 <- gather_w3, gather_v3" in bucket
    assert "  left bucket0: nothing computes before it\n\nwhat it moves\n  bucket1, bucket2, bucket3" in prefetch
    assert overlap.endswith("what it leaves where it is\n  bucket0, bucket1, bucket2, bucket3")


# --- reports on what was carried out ---
def test_a_report_says_what_the_order_came_to() -> None:
    report = plan_report(ordered_plan(4, left=LEFT, barriers=BARRIERS))
    lines = [line for line in str(report).split("\n") if line.startswith(("order", "rewrite"))]
    proven = "4 rewritten, 4 collectives fewer, each proven on 4 ranks"
    assert lines == [
        f"rewrite     mine.apl:2 bucket all_gather per block: {proven}",
        "order       exposed 68 ms -> 16 ms of 96 ms (no order less than 16 ms), 8 -> 4 collectives, "
        "peak 5.9 KiB -> 8.8 KiB, at most 2 KiB in flight",
        "order       mine.apl:3 prefetch all_gather 1 block ahead: 4 collectives, 3 moved",
        "order         left: bucket0: nothing computes before it",
        "order       mine.apl:4 overlap collective up to 4 KiB in flight: 4 collectives, 0 moved",
        "order       nothing is moved across unknown operators: mylib.scan.default ×3, mylib.tell.default",
    ]
    assert from_plain(Report, json.loads(report.to_json())) == report


def test_numbers_of_the_order_for_a_logger_of_metrics() -> None:
    found = plan_report(ordered_plan(4)).scalars("")
    assert (found["buckets"], found["collectives_joined"], found["collectives_moved"]) == (4, 8, 3)
    assert (found["collectives"], found["collectives_as_traced"]) == (4, 8)
    assert found["exposed_seconds"] == pytest.approx(0.016)
    assert found["exposed_seconds_as_traced"] == pytest.approx(0.068)
    assert found["peak_bytes"] > found["peak_bytes_as_traced"]
    untimed = plan_report(ordered_plan(4, device=None))
    assert "exposed_seconds" not in untimed.scalars("")
    both = combined([untimed, untimed])
    assert both.scalars("")["collectives"] == 8
    assert "8 -> 4 collectives, peak 5.9 KiB -> 8.8 KiB, at most 2 KiB in flight, in 2 graphs each" in str(both)


def test_the_log_names_buckets_and_what_is_exposed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="policylang"):
        announce_cached(plan_report(ordered_plan(4)))
    assert "4 collectives fewer, 4 buckets, exposed 68 ms -> 16 ms" in caplog.messages[0]


# --- two plans ---
def test_what_changes_between_two_orders() -> None:
    """Without any line, and with the buckets and the prefetch."""
    new = ordered_plan(4)
    old = evolve(new, order=None)
    found = compare(old, new)
    assert not found.same
    text = comparison_text(found).split("\n")
    assert text[0] == "no decision changes: 16 decisions are the same"
    assert text[2].startswith("8 collectives joined into buckets: gather_w0, gather_v0, gather_w1, ")
    assert text[2].endswith(", and 2 more")
    rows = [" ".join(line.split()) for line in text]
    assert "collectives 8 4 -4" in rows
    assert "buckets 0 4 +4" in rows
    assert "exposed 68 ms 16 ms -52 ms" in rows
    assert "step time 148 ms 96 ms -52 ms" in rows
    assert "in flight at most 1000 B 2 KiB +1000 B" in rows
    assert comparison_text(compare(new, old)).split("\n")[2].startswith("8 collectives in a bucket no more: gather_w0")
    same = compare(new, new)
    assert same.same
    assert "no collective runs elsewhere" in comparison_text(same)
    assert json.loads(comparison_json(found))["order"]["new"]["buckets"] == 4
    assert json.loads(comparison_json(found))["same"] is False
    assert "8 collectives joined" in comparison_markdown(found)
    assert compare(old, old).order is None
    # The same buckets; in one of the plans each starts where it is read.
    late = [name for name, op in zip(new.order.facts.names, new.order.facts.ops, strict=True) if op == "call_function"]
    old = evolve(new, order=evolve(new.order, schedule=schedule_of_names(new.order.facts, late)))
    found = compare(old, new).order
    assert found.starts == ("gather_w1", "gather_v1", "gather_w2", "gather_v2", "gather_w3", "gather_v3")
    assert found.awaited == found.joined == found.parted == ()
    assert "6 collectives started elsewhere: gather_w1" in comparison_text(compare(old, new))


DOCS = Path(__file__).resolve().parents[2] / "docs"

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
def test_an_order_that_moves_nothing_leaves_the_peak_and_the_lines_of_what_is_alive(able, rules) -> None:
    """There, what runs again is a node of its own."""
    facts = facts_of(graph(4), GraphKind.FLAT if able is FLAT else None)
    lines = f"blocks layers.*\n{rules}\nundecided -> save\n"
    without, ordered = (plan(parsed(text), facts, able) for text in (lines, f"{lines}optional overlap collective"))
    assert ordered.order is not None
    one, other = (values_at_peak(breakdown(made)) for made in (without, ordered))
    assert "recomputed" in {share.what for share in other.shares}
    shares, before = ([(each.what, each.source, each.bytes) for each in found.shares] for found in (other, one))
    assert shares == before


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
        "operator": "all_gather_into_tensor", "bytes": 2000, "block": "layers.1", "collectives": 2,
        "issued_us": 16_000.0, "awaited_us": 36_000.0, "exposed_us": 0.0, "lines": ["mine.apl:2", "mine.apl:3"],
    }  # fmt: skip
    assert "exposed_by" in planned.collectives[0]["args"]
    assert planned.threads[0][0]["args"] == {
        "operator": "aten.mm.default",
        "module": "layers.0.mlp",
        "bytes": 1000,
        "block": "layers.0",
    }


@drawn(40, 400, flat(), st.data())
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


def test_a_policy_that_schedules_nothing() -> None:
    """It has a trace and, on a path that is timed, lanes on its page; no order."""
    facts, text = facts_of(layers(2)), parsed("undecided -> save")
    made = plan(text, facts, JOINT, device=SLOW)
    assert json.loads(plan_json(breakdown(made), (), ()))["order"] is None
    assert "as planned" not in plan_text(breakdown(made), ())
    (trace,) = traces(made)
    assert trace.title == "as planned"
    assert trace.exposed == pytest.approx(0.034)
    assert len(trace.collectives) == 4
    for able, device, has_lanes in ((JOINT, SLOW, True), (JOINT, None, False), (EAGER, SLOW, False)):
        page = plan_page(breakdown(plan(text, facts, able, device=device)), (), "a.graph")
        assert ("Compute and communication" in page) is has_lanes


def test_what_is_narrowed_has_its_bars() -> None:
    """Without them the lane would end before the step does."""
    device = policylang.load_device("h100-sxm")
    text = "undecided -> save\nsave mm in first block as float8_e4m3fn per row"
    made = plan(policylang.parse(text), load(DOCS / "graphs" / "llama3_8b.graph"), JOINT, device=device)
    (trace,) = traces(made)
    facts, forms = made.facts, made.schedule.forms
    bars = [
        (each["cat"], each["args"]["bytes"])
        for each in trace.threads[0]
        if each["cat"] not in ("compute", "recomputed")
    ]
    assert sorted(bars) == sorted(
        bar
        for row, form in forms.items()
        for bar in (
            ("scale", form.scale_bytes(facts.shapes[row] or (), facts.numel[row])),
            ("narrow", facts.numel[row]),
            ("widen", facts.bytes[row]),
        )
    )
    assert len(forms) == 2
    times = node_times(facts, device)
    assert trace.computes == pytest.approx(step_time(facts, made.schedule, times).step, rel=1e-6)
    assert not trace.overlaps()


def test_what_runs_again_is_marked(sharded_step: Plan) -> None:
    text = "blocks layers.*\nrecompute everything in block\nundecided -> save"
    facts = facts_of(graph(2))
    (trace,) = traces(plan(parsed(text), facts, JOINT, device=PRODUCTS))
    again = {each["name"] for each in trace.threads[0] if each["cat"] == "recomputed"}
    assert {"mm0", "mm1"} <= again
    planned, _ = traces(sharded_step)
    assert {each["cat"] for each in planned.threads[0]} == {"compute"}, "there, what runs again is a node of its own"


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
