"""Edits are carried out as planned or not at all, on a recorded Llama-3 8B too."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from attrs import evolve
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

import policylang
from policylang.backends import rewriting, runtime
from policylang.backends.joint import HalfPath
from policylang.backends.rewriting import apply_edits
from policylang.graph import marks
from policylang.graph.collect import collect
from policylang.graph.facts import Group, Mesh
from policylang.planning.capabilities import HALF
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.torch_compat import distributed
from tests.support.edited import assert_facts_hold
from tests.support.lines import NAMES, Chain, gathers, shard_of, traced
from tests.support.sharded import fake_ranks
from tests.support.shared_graphs import BACKWARD, process_groups, shared_graph
from tests.support.versions import needs_groups_in_any_order

POLICY = policylang.parse("fuse all_gather chains")
CHAIN = Chain((0, 1), "joined")


@pytest.fixture
def gm() -> Iterator[fx.GraphModule]:
    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES[:2])  # as long as it is there, it is known
        yield traced(partial(CHAIN, mesh), shard_of(0))


def planned(gm: fx.GraphModule) -> Plan:
    return HalfPath().plan(collect(gm), POLICY)


def names(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes]


def test_new_nodes_take_over_what_was_said_of_the_old_ones(gm: fx.GraphModule) -> None:
    for node in gm.graph.nodes:
        node.meta["nn_module_stack"] = {"1": ("L['self'].layers.0", torch.nn.Linear)}
        node.meta["seq_nr"] = 7
        node.meta["custom"] = {"mine": node.op, marks.PROVENANCE: "other.apl:1"}
    plan = planned(gm)
    apply_edits(gm, plan)
    assert_facts_hold(gm, plan)
    (gather,) = gathers(gm)
    assert gather.meta["nn_module_stack"] == {"1": ("L['self'].layers.0", torch.nn.Linear)}
    assert gather.meta["seq_nr"] == 7
    assert gather.meta["custom"]["mine"] == "call_function"
    assert gather.meta["custom"][marks.REWRITTEN] == "<policy>:1"
    assert gather.meta["val"].shape == (32, 3, 2)
    view = next(node for node in gm.graph.nodes if node.name == "fused_view")
    assert view.meta["val"].untyped_storage()._cdata == view.args[0].meta["val"].untyped_storage()._cdata


def test_that_a_value_was_saved_is_said_of_the_node_that_has_it_now(gm: fx.GraphModule) -> None:
    result = next(iter(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor))).args[0]
    result.meta["custom"] = {marks.SAVED: True}
    apply_edits(gm, planned(gm))
    saved = [node for node in gm.graph.nodes if marks.SAVED in marks.custom(node.meta)]
    (reader,) = saved[0].users
    assert (len(saved), reader.target) == (1, torch.ops.aten.add.Tensor)


def test_a_graph_that_changed_since_it_was_planned_is_left_alone(gm: fx.GraphModule) -> None:
    plan = planned(gm)
    last = next(iter(gm.graph.find_nodes(op="output")))
    with gm.graph.inserting_before(last):
        gm.graph.call_function(torch.ops.aten.sin.default, (last.args[0],))
    before = names(gm)
    with pytest.raises(policylang.PolicyAuditError, match="is not the one that was planned: it has `sin_default`"):
        apply_edits(gm, plan)
    assert names(gm) == before


def test_a_result_that_is_laid_out_otherwise_than_planned_is_an_error(gm: fx.GraphModule) -> None:
    plan = planned(gm)
    (edit,) = plan.edits.done
    first = edit.nodes[0]
    wrong = evolve(edit, nodes=(evolve(first, stride=(1, 1, 1)), *edit.nodes[1:]))
    with pytest.raises(policylang.PolicyAuditError, match=r"became float32\[32, 3, 2\] with strides \[6, 2, 1\]"):
        apply_edits(gm, evolve(plan, edits=evolve(plan.edits, done=(wrong,))))


def test_names_that_a_graph_has_used_before_are_given_again(gm: fx.GraphModule) -> None:
    """torch numbers on, also past the name of a node that is gone."""
    reader = next(iter(gm.graph.find_nodes(op="output")))
    with gm.graph.inserting_before(reader):
        gone = gm.graph.create_node("call_function", torch.ops.aten.sin.default, (reader.args[0],), name="fused_view")
    gm.graph.erase_node(gone)
    plan = planned(gm)
    apply_edits(gm, plan)
    assert names(gm) == list(plan.facts.names)
    assert gm(shard_of(0)).shape == (8, 12, 2)


def test_a_graph_is_rewritten_once(gm: fx.GraphModule) -> None:
    policylang.apply(gm, POLICY)
    before = names(gm)
    policylang.apply(gm, policylang.parse("optional fuse all_gather chains"))
    assert names(gm) == before
    with pytest.raises(policylang.PolicyMatchError, match="finds nothing to rewrite"):
        policylang.apply(gm, POLICY)


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
