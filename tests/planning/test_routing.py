"""Discrete choices that steer: saved on every path, unless somebody who knows better says otherwise."""

from __future__ import annotations

import pytest

from policylang.graph.facts import GraphKind
from policylang.language.loader import parse_policy
from policylang.planning.capabilities import EAGER, FLAT, HOOK, JOINT, Capabilities
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.planning.value_outcome import Why
from tests.support.textgraph import facts_of

ROUTED = """
    %x = input dtype=float32
    %w = parameter dtype=float32
    %scores = aten.mm.default(%x, %w) dtype=float32 {region}
    %topk = aten.topk.default(%scores) multi_output {region}
    %weights = builtin.getitem(%topk) dtype=float32 {region}
    %chosen = builtin.getitem(%topk) dtype=int64 {region}
    %sort = aten.sort.stable(%chosen) multi_output {region}
    %order = builtin.getitem(%sort) dtype=int64 {region}
    %rows = aten.index.Tensor(%x, %order) dtype=float32 {region}
    %most = aten.max.default(%scores) dtype=float32 {region}
    %kept = aten.where.self(%rows, %most) dtype=float32 {region}
    %y = aten.mul.Tensor(%kept, %weights) dtype=float32 {region}
    ---
    %t = tangent dtype=float32
    %g = aten.mul.Tensor(%t, %y, %order, %chosen, %weights, %most) dtype=float32
    output(%y, %g)
"""
PATHS = pytest.mark.parametrize("path", [JOINT, HOOK, EAGER, FLAT], ids=lambda path: path.name)


def planned(text: str, path: Capabilities, region: str = "") -> Plan:
    policy = parse_policy(text).policy
    assert policy is not None
    kind = GraphKind.FLAT if path is FLAT else GraphKind.JOINT
    return plan(policy, facts_of(ROUTED.format(region=region), kind), path)


def fate(made: Plan, name: str) -> str | None:
    decision = made.decisions[made.facts.index[name]]
    return None if decision.action is None else decision.action.name.lower()


def codes(made: Plan) -> list[str]:
    return [found.code for found in made.diagnostics]


@PATHS
def test_a_sweeping_rule_leaves_it_saved_with_a_note(path: Capabilities):
    made = planned("recompute everything", path)
    assert [fate(made, name) for name in ("topk", "weights", "chosen")] == ["save"] * 3
    decision = made.decisions[made.facts.index["chosen"]]
    assert (decision.rule, decision.why) == (0, Why.ROUTING)
    assert codes(made) == ["APL308"]
    assert made.diagnostics[0].message.startswith("`recompute everything` leaves 1 forward value saved that steer")


@PATHS
def test_whole_numbers_that_are_known_are_ordered_the_same_again(path: Capabilities):
    """Nor is the largest of some floats a choice, though `where` reads it."""
    made = planned("recompute everything", path)
    assert [fate(made, name) for name in ("sort", "order", "most")] == ["recompute"] * 3


@PATHS
def test_a_rule_that_names_it_has_the_last_word(path: Capabilities):
    made = planned("recompute everything; recompute topk", path)
    assert fate(made, "chosen") == "recompute"
    assert codes(made) == []


@PATHS
def test_the_users_own_checkpoint_has_its_say(path: Capabilities):
    """Where it stands: eager checkpoints under a policy take its place."""
    made = planned("undecided -> save", path, region="region=0 tag=PREFER_RECOMPUTE")
    assert fate(made, "chosen") == ("save" if path is EAGER else "recompute")
    assert codes(made) == []
    swept = planned("override recompute everything", path, region="region=0 tag=PREFER_RECOMPUTE")
    assert fate(swept, "chosen") == "save"
    assert codes(swept) == ["APL308"]


@PATHS
def test_what_is_undecided(path: Capabilities):
    """Min-cut decides where there is one; a checkpoint would recompute, and is not let."""
    expected = {JOINT: None, HOOK: None, EAGER: "save", FLAT: "save"}
    made = planned("save mm", path)
    assert fate(made, "chosen") == expected[path]
    notes = [found.message for found in made.diagnostics if found.code == "APL308"]
    assert [note.partition(" leaves")[0] for note in notes] == (["the checkpoint"] if path is EAGER else [])
    swept = planned("save mm; undecided -> recompute", path)
    assert fate(swept, "chosen") == "save"
    assert "`undecided -> recompute` leaves 1 forward value" in swept.diagnostics[-1].message
