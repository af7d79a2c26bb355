"""Snapshots that earlier versions wrote: read with what they have, planned as then, and honest about what they lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from attrs import evolve, fields_dict

import policylang
from policylang.commands.cli import main
from policylang.graph.facts import GraphKind, LostMarker
from policylang.language import syntax
from policylang.planning.capabilities import capabilities_for
from policylang.planning.planner import plan
from tests.support.textgraph import facts_of

OLDER = Path(__file__).parent / "data" / "older_snapshots"
GATHERS = """
%x = input bytes=64
%w0 = parameter bytes=64
%w1 = parameter bytes=64
%g0 = _c10d_functional.all_gather_into_tensor.default(%w0) layers.0 collective group=dp:4 bytes=256
%t0 = _c10d_functional.wait_tensor.default(%g0) layers.0 bytes=256
%m0 = aten.mm.default(%x, %t0) layers.0 compute bytes=64
%g1 = _c10d_functional.all_gather_into_tensor.default(%w1) layers.1 collective group=dp:4 bytes=256
%t1 = _c10d_functional.wait_tensor.default(%g1) layers.1 bytes=256
%m1 = aten.mm.default(%m0, %t1) layers.1 compute bytes=64
---
%b = aten.mul.Tensor(%m1, %m0) bytes=64
output(%m1, %b)
"""
WITHOUT = OLDER / "joint_without_annotations.graph"


@pytest.mark.parametrize("kind", list(GraphKind), ids=lambda kind: kind.value)
def test_every_kind_of_graph_is_read(kind: GraphKind) -> None:
    facts = policylang.load_snapshot(OLDER / f"{kind.value}.graph")
    assert facts.kind is kind
    assert len(facts.annotations) == len(facts) > 10


@pytest.mark.parametrize("name", ["joint", "flat", "joint_without_annotations"])
def test_a_plan_says_what_it_said_then(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(OLDER)
    main(["plan", "policy.apl", "--graph", f"{name}.graph", "--output-format", "json"])
    said = json.loads(capsys.readouterr().out)
    del said["digest"]
    assert said["uncounted_operators"] is None  # they were written before anybody asked
    then = json.loads((OLDER / f"{name}.plan.json").read_text())
    found, before = (each.pop("diagnostics") for each in (said, then))
    codes = {each["code"] for each in before}
    # notes may have come since, and better advice
    kept = [(each["code"], each["message"]) for each in found if each["severity"] != "note" or each["code"] in codes]
    assert kept == [(each["code"], each["message"]) for each in before]
    assert _as_then(said, then) == then


def _as_then(said: Any, then: Any) -> Any:
    """Without the keys that have come since."""
    if isinstance(said, list) and isinstance(then, list) and len(said) == len(then):
        return [_as_then(*each) for each in zip(said, then, strict=True)]
    if isinstance(said, dict) and isinstance(then, dict):
        return {key: _as_then(value, then[key]) for key, value in said.items() if key in then}
    return said


@pytest.mark.parametrize(
    "text",
    [
        "save mm where annotated ap_must_save",
        "optional save mm where annotated ap_must_save",
        "save mm where not annotated ap_must_save",
        "save mm where is view or annotated ap_must_save",
        "let noted = mm where annotated ap_must_save\nundecided -> save\nexpect every noted saved",
    ],
)
def test_what_a_file_cannot_answer_is_refused_by_name(text: str) -> None:
    facts = policylang.load_snapshot(WITHOUT)
    assert not facts.annotations
    found = plan(policylang.parse(text), facts, capabilities_for(facts.kind)).diagnostics
    (refused,) = [each for each in found if each.code == "APL358"]
    assert refused.message.startswith("`annotated ap_must_save` has no answer: the snapshot is older than that")
    assert refused.span is not None
    assert refused.span.text == "annotated ap_must_save"


LINES: dict[type, str] = {
    syntax.Rule: "save {}",
    syntax.Let: "let picked = {}\noptional save picked",
    syntax.Bucket: "optional bucket ({}) per block",
    syntax.Prefetch: "optional prefetch ({}) 1 block ahead",
    syntax.Delay: "optional delay ({}) 1 block",
    syntax.Overlap: "device h100-sxm\noptional overlap ({})",
    syntax.KeepOrder: "optional keep order of ({})",
    syntax.ExpectCount: "expect at most 9 ({})",
    syntax.ExpectFate: "expect no ({}) recomputed",
}
ASKED = {
    "APL358": "all_gather where not annotated a",
    "APL310": "all_gather where not recorded saved",
    "APL370": "all_gather where not time >= 1 s",
    "APL369": "all_gather in first 20% of blocks",
}


def test_the_kinds_of_statements_below_are_all_that_pick_nodes() -> None:
    assert set(LINES) == {kind for kind in get_args(syntax.Statement) if "selector" in fields_dict(kind)}


@pytest.mark.parametrize("code", ASKED)
@pytest.mark.parametrize("kind", LINES, ids=lambda kind: kind.__name__)
def test_what_a_graph_cannot_answer_is_refused_in_every_statement(kind: type, code: str) -> None:
    line = LINES[kind].format(ASKED[code])
    if code == "APL370":
        line = line.removeprefix("device h100-sxm\n")
    if code == "APL369":
        line = line.replace("optional ", "")
    marker = LostMarker("value 1 of 1", "it is gone")
    facts = evolve(facts_of(GATHERS), annotations=(), lost_records=(marker,))
    text = f"blocks layers.*\n{line}\nundecided -> save"
    found = plan(policylang.parse(text), facts, capabilities_for(facts.kind)).diagnostics
    codes = [each.code for each in found]
    assert codes.count(code) == 1
    assert "APL301" not in codes or code != "APL369", "one mistake is one error"


@pytest.mark.filterwarnings("ignore:.*is never used")
def test_what_nothing_asks_for_is_not_missed() -> None:
    facts = policylang.load_snapshot(WITHOUT)
    policy = policylang.parse("let noted = mm where annotated ap_must_save\nsave mm")
    assert not [each for each in plan(policy, facts, capabilities_for(facts.kind)).diagnostics if each.code == "APL358"]


def test_a_file_that_says_it_answers_no() -> None:
    facts = policylang.load_snapshot(OLDER / "joint.graph")
    found = plan(policylang.parse("save mm where annotated x"), facts, capabilities_for(facts.kind)).diagnostics
    assert [each.code for each in found] == ["APL301"]
