"""The fused gathers of a recorded Llama-3 8B, carried out: the graph that comes out is the one that was planned."""

from __future__ import annotations

import pytest
from attrs import evolve

import policylang
from policylang.backends import rewriting, runtime
from policylang.graph.collect import collect
from policylang.graph.facts import Group, Mesh
from policylang.planning.capabilities import HALF
from policylang.planning.planner import plan
from policylang.torch_compat import distributed
from tests.support.edited import assert_facts_hold
from tests.support.shared_graphs import BACKWARD, process_groups, shared_graph
from tests.support.versions import needs_groups_in_any_order


@pytest.mark.slow
@needs_groups_in_any_order
def test_the_graph_is_the_one_that_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 ranks are not here, so their groups are not made; all else is done."""
    monkeypatch.setattr(distributed, "group_backend", lambda name: "gloo")
    monkeypatch.setattr(runtime, "ensure_groups", lambda orders: None)
    known = {name: Group(name, ranks, len(ranks)) for name, ranks in process_groups(BACKWARD).items()}
    gm = shared_graph(BACKWARD)
    mesh = Mesh(("dp", "tp"), (16, 8), tuple(range(128)))
    facts = evolve(collect(gm, groups=known), meshes=(mesh,), rank=0)
    made = plan(policylang.parse("fuse all_gather chains"), facts, HALF)
    (order,) = rewriting.apply_edits(gm, made)  # one group for all 93
    assert order.ranks[:3] == (0, 8, 16)
    everyone = {**known, order.name: Group(order.name, order.ranks, len(order.ranks))}
    assert_facts_hold(gm, made, groups=everyone)
    assert len(gm.graph.nodes) == 16_097
    ran = [node.name for node in gm.graph.nodes if node.op == "call_function"]
    assert ran == [name for _, name, _ in made.schedule.names(made.facts)]
