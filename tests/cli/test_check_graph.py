"""`policylang check --graph`: a policy on graphs that nobody has at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import policylang as package
from policylang.graph.facts import GraphKind
from policylang.graph.snapshot import write
from tests.support.flat_graphs import flat_graph
from tests.support.models import llama
from tests.support.textgraph import facts_of

GRAPH = """
    %x = input
    %w = parameter
    %mm = aten.mm.default(%x, %w) layers.0 bytes=256
    %sin = aten.sin.default(%mm) layers.0 bytes=256
    %mm_1 = aten.mm.default(%sin, %w) layers.1 bytes=256
    ---
    %b = aten.mul.Tensor(%mm_1, %sin)
    %c = aten.mul.Tensor(%b, %mm)
    output(%mm_1, %c)
"""
OTHER = GRAPH.replace("aten.sin", "aten.cos")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(facts_of(GRAPH), "sin.graph")
    write(facts_of(OTHER), "cos.graph")
    return tmp_path


def policy(folder: Path, text: str) -> str:
    (folder / "p.apl").write_text(text)
    return "p.apl"


def test_a_policy_that_fits(policylang, folder):
    path = policy(folder, "blocks layers.*\nrecompute everything\nsave mm\nexpect saved <= 512 B\n")
    held = "line     expectation            found\np.apl:4  saved <= 512 B  holds  512 B\n\n"
    assert policylang("check", path, "--graph", "sin.graph") == (0, f"{held}checked 1 file on 1 graph: clean\n", "")


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("save mm\nsave bmm\n", 1, "error[APL301]: `save bmm` matches nothing in this graph"),
        ("save mm\nrecompute everything\n", 0, "warning[APL303]: `save mm` decides nothing"),
        ("save mm\nexpect saved < 512 B\n", 1, "error[APL305]: `expect saved < 512 B` does not hold"),
        ("save everything\nexpect peak <= 10 B\n", 1, "error[APL305]: `expect peak <= 10 B` does not hold"),
        ("blocks encoder.*\nsave mm\n", 1, "error[APL302]: `encoder.*` matches no module path"),
        ("must_save mm\nrecompute mm in layers.1\n", 0, "warning[APL314]: `must_save mm` loses 1 of its 2 nodes"),
        ("save mm in first 40% of blocks\n", 1, "error[APL369]: `first 40% of blocks` of `save mm in first 40%"),
        ("save mm\nexpect saved <= 60% of forward\n", 1, "does not hold: at least 66.7%"),
        ("recompute sin\nexpect recomputed operators < 33%\n", 1, "does not hold: at least 33.3%"),
        ("save mm\nexpect saved > 600 B\n", 0, "note[APL315]: `expect saved > 600 B` cannot be checked on a snapshot"),
    ],
)
def test_what_only_a_graph_can_tell(policylang, folder, text, code, said):
    path = policy(folder, text)
    assert "clean" in policylang("check", path).out
    outcome = policylang("check", path, "--graph", "sin.graph")
    assert outcome.code == code, outcome.out
    assert said in outcome.out


def test_a_name_that_people_use_is_told_once(policylang, folder):
    path = policy(folder, "save linear\n")
    assert "note[APL150]: graphs of a step seldom hold `linear`: it is traced as `mm` or `addmm`" in (
        policylang("check", path).out
    )
    outcome = policylang("check", path, "--graph", "sin.graph")
    assert "APL150" not in outcome.out
    assert "linear: 0 nodes; it is traced as `mm` (2 nodes) here" in outcome.out


def test_an_exception_is_no_conflict(policylang, folder):
    path = policy(folder, "recompute everything\nsave mm\nrecompute mm in layers.0\n")
    assert "clean" in policylang("check", path, "--graph", "sin.graph").out


def test_warnings_of_a_graph_are_denied_too(policylang, folder):
    path = policy(folder, "save mm\nrecompute everything\n")
    assert policylang("check", path, "--graph", "sin.graph", "--deny", "warnings").code == 1


def test_several_graphs_each_say_which_they_are(policylang, folder):
    path = policy(folder, "save mm\nsave sin\n")
    outcome = policylang("check", path, "--graph", "sin.graph", "--graph", "cos.graph")
    assert outcome.code == 1
    assert outcome.out.count("error[APL301]") == 1
    assert "= on `cos.graph`" in outcome.out
    assert "checked 1 file on 2 graphs: 1 error" in outcome.out


def test_of_the_graphs_of_one_model_a_rule_has_to_match_in_one(policylang, folder):
    graphs = ["--graph", "sin.graph", "--graph", "cos.graph", "--one-model"]
    assert policylang("check", policy(folder, "save mm\nsave sin\n"), *graphs).code == 0
    outcome = policylang("check", policy(folder, "save mm\nsave bmm\n"), *graphs)
    assert outcome.code == 1
    assert "matches nothing in any of the 2 graphs of this model" in outcome.out


@pytest.mark.parametrize(("content", "code"), [(b"nonsense", 1), (None, 2)])
def test_a_file_that_is_no_snapshot(policylang, folder, content, code):
    if content is not None:
        (folder / "bad.graph").write_bytes(content)
    outcome = policylang("check", policy(folder, "save mm\n"), "--graph", "bad.graph")
    assert outcome.code == code
    assert "`bad.graph`" in outcome.out


def test_the_path_is_what_the_graph_is_unless_it_is_said(policylang, folder):
    flat = facts_of(GRAPH, kind=GraphKind.FLAT)
    write(flat, "flat.graph")
    path = policy(folder, "save mm\nleave sin\nexpect every sin saved\n")
    assert policylang("check", path, "--graph", "flat.graph").code == 0
    outcome = policylang("check", path, "--graph", "flat.graph", "--path", "joint")
    assert "APL315" in outcome.out, "there PyTorch's partitioner decides"


@pytest.mark.parametrize(
    ("text", "path", "said"),
    [
        ("offload mm", "eager", []),
        ("offload mm", "hook", ["APL306"]),
        ("offload mm", "joint", []),
        ("optional fuse all_gather chains\nsave mm", "eager", ["APL306"]),
        ("recompute every 2nd mm per graph", "eager", ["APL306"]),
        ("recompute every 2nd mm per graph", "joint", []),
        ("undecided -> auto\nsave mm", "eager", []),
        ("save mm\nsave cos", "eager", ["APL301"]),
        ("save mm\nsave cos", "joint", []),
        ("override save sin in block\nsave mm", "eager", []),
        ("save mm\nexpect saved <= 700 B", "eager", []),
        ("save mm\nexpect saved <= 600 B", "eager", ["APL305"]),
        ("save sin\nexpect every sin saved", "eager", []),
    ],
)
def test_what_a_path_would_refuse(policylang, folder, text, path, said):
    """Eager checkpoints see one block each: what lies outside them, here the `cos`, is nobody's, and what they hand on,
    here the `sin`, is kept."""
    graph = GRAPH.replace("    ---", "    %cos = aten.cos.default(%mm_1) norm bytes=100\n    ---").replace(
        "%mm_1, %sin)", "%cos, %sin)"
    )
    write(facts_of(graph), "norm.graph")
    outcome = policylang("check", policy(folder, f"blocks layers.*\n{text}\n"), "--graph", "norm.graph", "--path", path,
                         "--output-format", "json")  # fmt: skip
    found = json.loads(outcome.out)["diagnostics"]
    assert [each["code"] for each in found if each["severity"] == "error"] == said, found
    outside = "all of it lies outside the blocks, where an eager checkpoint decides nothing"
    assert all(outside in each["details"] for each in found if each["code"] == "APL301")
    assert package.check("p.apl", graph="norm.graph", path=path).errors == len(said)


def test_the_models_own_checkpoint_gives_way_to_eager_ones(policylang, folder):
    write(facts_of(GRAPH.replace("layers.0 bytes", "layers.0 tag=MUST_SAVE bytes")), "tagged.graph")
    path = policy(folder, "blocks layers.*\nrecompute mm in layers.0\n")
    assert "APL307" in policylang("check", path, "--graph", "tagged.graph").out
    assert "clean" in policylang("check", path, "--graph", "tagged.graph", "--path", "eager").out


def test_expectations_that_hold_are_shown(policylang, folder):
    path = policy(
        folder, "recompute everything\nsave mm\nexpect saved <= 512 B\nexpect every mm saved\nexpect saved > 1 TiB\n"
    )
    graphs = ("--graph", "sin.graph", "--graph", "cos.graph")
    lines = [" ".join(line.split()) for line in policylang("check", path, *graphs).out.splitlines()]
    at = lines.index("line expectation found on")
    assert lines[at + 1 : at + 6] == [
        "p.apl:3 saved <= 512 B holds 512 B sin.graph",
        "p.apl:4 every mm saved holds all 2 nodes saved sin.graph",
        "p.apl:3 saved <= 512 B holds 512 B cos.graph",
        "p.apl:4 every mm saved holds all 2 nodes saved cos.graph",
        "",
    ]
    found = json.loads(policylang("check", path, *graphs, "--output-format", "json").out)["expectations"]
    assert [(each["graph"], each["status"]) for each in found] == [
        (graph, status) for graph in ("sin.graph", "cos.graph") for status in ("held", "held", "failed")
    ]
    assert found[0]["found"] == "512 B"


def test_in_python(folder):
    path = policy(folder, "save mm\nsave bmm\n")
    for graph in ("sin.graph", ["sin.graph"], Path("sin.graph"), package.load_snapshot("sin.graph")):
        result = package.check(path, graph=graph)
        assert [found.code for found in result.diagnostics] == ["APL301"]
        (made,) = result.plans
        assert len(made.rules[0].matched) == 2


def test_a_real_step(folder):
    step = flat_graph(llama()).gm
    assert package.snapshot(step, "step.graph") == (Path("step.graph"),)
    result = package.check("torchtitan_full", graph="step.graph")
    assert result.errors == 0
    assert result.plans[0].facts.kind is GraphKind.FLAT


def test_a_policy_of_thousands_of_rules_ends_with_its_verdict(folder: Path, policylang) -> None:
    rules = [f"optional save mm in layers.{number}" for number in range(2_999)]
    code, out, _ = policylang("check", policy(folder, "\n".join([*rules, "save sin"])), "--graph", "sin.graph")
    assert (code, out) == (0, "checked 1 file on 1 graph: clean\n")
