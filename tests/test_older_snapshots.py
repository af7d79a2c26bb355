"""Snapshots that earlier versions wrote: read with what they have, planned as then, and honest about what they lack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import policylang
from policylang.commands.cli import main
from policylang.graph.facts import GraphKind
from policylang.planning.capabilities import capabilities_for
from policylang.planning.planner import plan

OLDER = Path(__file__).parent / "data" / "older_snapshots"
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


@pytest.mark.filterwarnings("ignore:.*is never used")
def test_what_nothing_asks_for_is_not_missed() -> None:
    facts = policylang.load_snapshot(WITHOUT)
    policy = policylang.parse("let noted = mm where annotated ap_must_save\nsave mm")
    assert not [each for each in plan(policy, facts, capabilities_for(facts.kind)).diagnostics if each.code == "APL358"]


def test_a_file_that_says_it_answers_no() -> None:
    facts = policylang.load_snapshot(OLDER / "joint.graph")
    found = plan(policylang.parse("save mm where annotated x"), facts, capabilities_for(facts.kind)).diagnostics
    assert [each.code for each in found] == ["APL301"]
