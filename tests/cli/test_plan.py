"""`policylang plan`: what it prints, what it exits with, what it writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from policylang.graph.snapshot import write
from tests.support.textgraph import facts_of

GRAPH = """
    %x = input bytes=100
    %w = parameter bytes=1073741824
    %a0 = aten.mm.default(%x, %w) layers.0 bytes=1073741824 flops=4000 shape=8x8 dtype=float32
    %b0 = aten.sin.default(%a0) layers.0 bytes=1073741824 shape=8x8 dtype=float32
    %a1 = aten.mm.default(%b0, %w) layers.1 bytes=1073741824 flops=4000 shape=8x8 dtype=float32
    %b1 = aten.sin.default(%a1) layers.1 bytes=1073741824 shape=8x8 dtype=float32
    ---
    %t = tangent bytes=8
    %g1 = aten.mul.Tensor(%t, %b1, %a1) bytes=8
    %g0 = aten.mul.Tensor(%g1, %b0, %a0) bytes=8
    output(%b1, %g0)
"""
POLICY = "blocks layers.*\nrecompute everything in block\nsave mm in block\n"


@pytest.fixture
def graph(tmp_path):
    path = tmp_path / "small.graph"
    write(facts_of(GRAPH), path)
    return str(path)


@pytest.fixture
def policy(tmp_path):
    def make(text: str = POLICY) -> str:
        path = tmp_path / "mine.apl"
        path.write_text(text)
        return str(path)

    return make


def test_what_is_saved_and_recomputed_by_which_line(policylang, graph, policy):
    outcome = policylang("plan", policy(), "--graph", graph, "--values")
    assert (outcome.code, outcome.err) == (0, "")
    assert "policy mine: 4 forward values, 2 blocks" in outcome.out
    assert re.search(r"saved +2 GiB +4 GiB", outcome.out)
    assert "layers.0–1 ×2: 1 GiB saved, 1 GiB and 0 FLOP recomputed, each" in outcome.out
    assert re.search(r"saved +aten.mm.default +8×8 float32 +1 GiB +mine.apl:3", outcome.out)
    assert re.search(r"recomputed +aten.sin.default +8×8 float32 +1 GiB +mine.apl:2", outcome.out)


def test_what_each_rule_is_worth(policylang, graph, policy):
    """Without `save mm` both products run twice; without the ground rule the two sines are kept."""
    outcome = policylang("plan", policy(), "--graph", graph, "--output-format", "json")
    ground, save = json.loads(outcome.out)["rules"]
    assert (save["worth"]["saved_bytes"], save["worth"]["recomputed_flops"]) == (2 << 30, -8000)
    assert (save["worth"]["verdict"], save["worth"]["flops_per_gib"]) == ("buys FLOPs", 4000)
    assert (ground["worth"]["saved_bytes"], ground["worth"]["recomputed_flops"]) == (-(2 << 30), 0)
    assert (ground["worth"]["verdict"], ground["worth"]["flops_per_gib"]) == ("frees memory", None)


def test_what_is_left_to_pytorch_counts_as_saved_and_is_told(policylang, graph, policy):
    outcome = policylang("plan", policy("save mm\n"), "--graph", graph)
    assert outcome.code == 0
    assert "2 GiB of what is saved is left to PyTorch's partitioner" in outcome.out


def test_json_is_one_document(policylang, graph, policy):
    outcome = policylang("plan", policy(), "--graph", graph, "--output-format", "json")
    found = json.loads(outcome.out)
    assert (outcome.code, outcome.err) == (0, "")
    assert found["with"]["saved_bytes"] == 2 << 30
    assert found["without"]["saved_bytes"] == 4 << 30
    (group,) = found["groups"]
    assert group["blocks"] == ["layers.0", "layers.1"]
    assert [value["fate"] for value in group["values"]] == ["saved", "recomputed"]
    assert found["diagnostics"] == []


def test_a_plan_without_options_fits_a_screen(policylang):
    graph = str(Path(__file__).parents[2] / "docs" / "graphs" / "llama3_8b.graph")
    out = policylang("plan", "llama3_sac", "--graph", graph, "--width", "80").out
    assert len(out.splitlines()) <= 45
    assert "\nmodel.layers.0–30 ×31: 497 MiB saved, " in out
    assert "aten." not in out
    assert out.endswith("\nevery value: --values; as a page: --html plan.html\n")


def test_what_is_alive_at_the_peak_by_line(policylang, graph, policy):
    outcome = policylang("plan", policy(), "--graph", graph, "--values")
    assert "alive at the peak, 5 GiB: at g1, step 6 of 8, in the backward" in outcome.out
    assert re.search(r"1 GiB +20% +a1 +aten.mm.default +layers.1 +saved +mine.apl:3 +3–6", outcome.out)
    assert re.search(r"1 GiB +20% +w +parameter +start–end", outcome.out)
    assert re.search(r"2 GiB +40% +2 +saved +mine.apl:3 +save mm in block", outcome.out)

    document = json.loads(policylang("plan", policy(), "--graph", graph, "--output-format", "json").out)
    found = document["at_peak"]
    assert found["bytes"] == max(document["with"]["peak"][half] for half in ("forward", "backward"))
    assert found["bytes"] == sum(each["bytes"] for each in found["values"]) + found["rest_bytes"]
    assert found["bytes"] == sum(each["bytes"] for each in found["shares"])
    assert [value["name"] for value in found["values"][:4]] == ["w", "a0", "a1", "b1"]
    assert found["values"][1]["made"] == {"step": 1, "node": "a0", "half": "forward", "again": False}
    assert found["values"][1]["source"].endswith("mine.apl:3")


EXPECTING = POLICY + "expect saved <= 3 GiB\nexpect recomputed flops <= 1%\nexpect every mm recomputed\n"


def test_expectations_with_what_was_found(policylang, graph, policy):
    out = policylang("plan", policy(EXPECTING), "--graph", graph).out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    at = lines.index("line expectation found")
    assert lines[at + 1 : at + 4] == [
        "mine.apl:4 saved <= 3 GiB holds 2 GiB",
        "mine.apl:5 recomputed flops <= 1% holds 0%",
        "mine.apl:6 every mm recomputed does not hold 2 of 2 nodes not recomputed",
    ]


def test_a_summary(policylang, graph, policy):
    whole = policylang("plan", policy(EXPECTING), "--graph", graph)
    short = policylang("plan", policy(EXPECTING), "--graph", graph, "--summary")
    assert short.code == whole.code == 1
    assert whole.out.startswith(short.out.rstrip("\n"))
    assert "worst moment" in short.out
    assert "layers.0" not in short.out
    found, all_of_it = (
        json.loads(policylang("plan", policy(EXPECTING), "--graph", graph, "--output-format", "json", *more).out)
        for more in (["--summary"], [])
    )
    assert "groups" not in found
    assert [each["worth"] for each in found["rules"]] == [None, None]
    for same in ("with", "without", "expectations", "diagnostics", "digest"):
        assert found[same] == all_of_it[same]


def test_a_plan_of_the_standard_input(policylang, graph, standard_input):
    standard_input(POLICY)
    outcome = policylang("plan", "-", "--graph", graph, "--values")
    assert outcome.code == 0
    assert re.search(r"saved +aten.mm.default +8×8 float32 +1 GiB +<stdin>:3", outcome.out)


def test_errors_between_policy_and_graph_are_printed_with_the_plan(policylang, graph, policy):
    outcome = policylang("plan", policy(POLICY + "save bmm\n"), "--graph", graph)
    assert outcome.code == 1
    assert outcome.out.startswith("error[APL301]")
    assert "layers.0–1 ×2" in outcome.out


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize(("case", "code"), [("syntax", 1), ("no policy", 2), ("no graph", 2), ("foreign graph", 1)])
def test_what_cannot_be_read(policylang, graph, policy, tmp_path, format, case, code):
    (tmp_path / "foreign.graph").write_text("a graph, it says")
    name = policy("save mm or\n" if case == "syntax" else POLICY)
    name = str(tmp_path / "nowhere.apl") if case == "no policy" else name
    where = {"no graph": "nowhere.graph", "foreign graph": "foreign.graph"}.get(case)
    outcome = policylang(
        "plan", name, "--graph", graph if where is None else str(tmp_path / where), "--output-format", format
    )
    assert "APL" in outcome.out
    assert outcome.err == ""
    assert outcome.code == code
    if format == "json":
        assert json.loads(outcome.out)["diagnostics"]


def test_the_page_is_written(policylang, graph, policy, tmp_path):
    out = tmp_path / "plan.html"
    outcome = policylang("plan", policy(), "--graph", graph, "--html", str(out))
    assert (outcome.code, outcome.err) == (0, f"wrote {out}\n")
    assert "<title>mine on small.graph</title>" in out.read_text()


def test_the_trace_is_written_where_there_is_a_device(policylang, graph, policy, tmp_path):
    out = str(tmp_path / "step.json")
    asked = ("plan", policy(), "--graph", graph, "--trace", out)
    for more, said in (
        ((), "a trace has times, and no device is given\nhelp: name one with `--device`"),
        (("--device", "h100-sxm", "--path", "eager"), "does not run in the order of its graph"),
    ):
        outcome = policylang(*asked, *more)
        assert outcome.code == 2
        assert said in outcome.err
    outcome = policylang(*asked, "--device", "h100-sxm")
    assert (outcome.code, outcome.err) == (0, f"wrote {out}\n")
    events = json.loads(Path(out).read_text(encoding="utf-8"))["traceEvents"]
    assert {each["ph"] for each in events} == {"M", "X", "C"}
