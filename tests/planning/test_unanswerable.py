"""Facts of a snapshot that lacks a column, and of a graph that lacks an answer: the question is refused by name."""

from __future__ import annotations

from typing import get_args

import pytest
from attrs import evolve, fields_dict

import policylang
from policylang.graph.facts import LostMarker
from policylang.language import syntax
from policylang.planning.capabilities import capabilities_for
from policylang.planning.planner import plan
from tests.support.textgraph import facts_of

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
LACKING = evolve(facts_of(GATHERS), annotations=(), uncounted=(), data_sizes=())


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
    found = plan(policylang.parse(text), LACKING, capabilities_for(LACKING.kind)).diagnostics
    (refused,) = [each for each in found if each.code == "APL358"]
    assert refused.message.startswith(
        "`annotated ap_must_save` cannot be evaluated: an older policylang wrote the snapshot"
    )
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
    facts = evolve(LACKING, lost_records=(marker,))
    text = f"blocks layers.*\n{line}\nundecided -> save"
    found = plan(policylang.parse(text), facts, capabilities_for(facts.kind)).diagnostics
    codes = [each.code for each in found]
    assert codes.count(code) == 1
    assert "APL301" not in codes or code != "APL369", "one mistake is one error"


@pytest.mark.filterwarnings("ignore:.*is never used")
def test_what_nothing_asks_for_is_not_missed() -> None:
    policy = policylang.parse("let noted = mm where annotated ap_must_save\nsave mm")
    made = plan(policy, LACKING, capabilities_for(LACKING.kind))
    assert not [each for each in made.diagnostics if each.code == "APL358"]
