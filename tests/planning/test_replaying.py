"""Records that are lost are the business of policies that read records."""

from __future__ import annotations

import pytest
from attrs import evolve

import policylang
from policylang.graph.facts import LostMarker
from policylang.language.diagnostics import Diagnostic
from policylang.planning.capabilities import Capabilities
from policylang.planning.planner import plan
from tests.support.textgraph import facts_of

GRAPH = """
    %x = input bytes=32
    %mm = aten.mm.default(%x, %x) bytes=32
    ---
    %t = tangent
    %mul = aten.mul.Tensor(%t, %mm)
    output(%mm, %mul)
"""


def lost(text: str, count: int = 1) -> list[Diagnostic]:
    records = tuple(
        LostMarker(f"silu_{number}", "no forward node of this graph was traced from it") for number in range(count)
    )
    facts = evolve(facts_of(GRAPH), lost_records=records)
    found = plan(policylang.parse(text), facts, Capabilities(name="a test", undecided="auto")).diagnostics
    return [diagnostic for diagnostic in found if diagnostic.code == "APL310"]


@pytest.mark.parametrize(
    "text",
    [
        "optional save everything where recorded saved",
        "optional save mm where is view or not recorded saved",
        "let earlier = everything where recorded saved\nlet them = earlier and mm\noptional save them",
        "expect no mm where recorded saved saved",
    ],
)
def test_a_policy_that_reads_records_is_told(text: str) -> None:
    (diagnostic,) = lost(text, count=3)
    assert "`silu_0` and 2 more are lost" in diagnostic.message
    assert diagnostic.span is not None
    assert len(diagnostic.details) == 3


@pytest.mark.parametrize("text", ["save mm", "let earlier = everything where recorded saved\nsave mm"])
def test_any_other_policy_is_not(text: str) -> None:
    assert lost(text) == []
