"""Policies in TorchTitan 0.3.0, through its own functions, on graphs that its own tracer made."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import fx

import policylang
from policylang.errors import PolicyGraphError, PolicyMatchError, PolicyMeaningError
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.integrations import torchtitan
from policylang.planning.paths import FLAT
from policylang.planning.plan import Plan, Why
from policylang.planning.planner import plan as make_plan
from tests.support.joint import capture_joint
from tests.support.models import ZOO
from tests.support.titan import Traced, config, experts_of, graph_trainer, llama, step_of

POLICIES = {"torchtitan_default": "default", "torchtitan_eager": "eager", "torchtitan_graph_full": "full"}
LAYERS = [2, *(pytest.param(layers, marks=pytest.mark.slow) for layers in (8, 32))]
CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def bitwise_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) > 2 and all(map(torch.equal, left, right))


def their_tags(gm: fx.GraphModule, memory_policy: str, reshard: str = "default") -> dict[str, str | None]:
    """What TorchTitan writes on every operator that it takes for forward; None where it writes nothing."""
    graph_trainer("memory_policy").tag_with_memory_policy_pass(gm, config=config(memory_policy, reshard))
    return {
        node.name: node.meta["recompute"].name if "recompute" in node.meta else None
        for node in gm.graph.nodes
        if node.op == "call_function" and not node.meta.get("autograd_backward")
    }


def our_tag(plan: Plan, name: str) -> str | None:
    decision = plan.decisions[plan.facts.index[name]]
    if decision is None or decision.action is None or decision.why is Why.UNDECIDED:
        return None
    return decision.action.value


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_tag_on_every_node(policy: str, layers: int):
    gm = llama(layers).gm
    plan = make_plan(policylang.load(policy), collect(gm), FLAT)
    theirs = their_tags(gm, POLICIES[policy])
    different = {name for name, tag in theirs.items() if our_tag(plan, name) != tag}
    assert len(theirs) > 60 * layers
    assert different == known_differences(plan.facts, POLICIES[policy])


@pytest.mark.parametrize("model", ["deepseek_v3", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_the_same_tag_on_every_node_of_a_mixture_of_experts(model: str):
    """But for the counter of tokens, which a second run would count again, and for the routing under `full`."""
    gm = step_of(experts_of(model)).gm
    facts = collect(gm)
    assert facts.by_target["aten.topk.default"]
    for policy, memory_policy in POLICIES.items():
        plan = make_plan(policylang.load(policy), facts, FLAT)
        theirs = their_tags(gm, memory_policy)
        different = {name for name, tag in theirs.items() if our_tag(plan, name) != tag}
        assert len(theirs) > 200
        assert different == known_differences(facts, memory_policy) | counters(facts)


def counters(facts: Facts) -> set[str]:
    """What is added to the counts of tokens by expert: the forward writes to a buffer."""
    added = [row for row in facts.by_target["aten.add_.Tensor"] if facts.modules[row].endswith(".moe")]
    assert added
    return {facts.names[row] for row in added}


def known_differences(facts: Facts, memory_policy: str) -> set[str]:
    """Where TorchTitan's code is shown wrong: see `test_what_their_tags_come_to_on_this_graph`."""
    names = {"ones_like"}  # begins the backward, and is no forward value
    other = "aten.topk.default" if memory_policy == "full" else CPU_ATTENTION  # `full` saves it, as a random operator
    owners = facts.by_target.get(other, [])
    return names | {name for name, owner in zip(facts.names, facts.owners, strict=True) if owner in owners}


def test_what_their_tags_come_to_on_this_graph():
    """A list of attention kernels lacks the one that is used: it is to be recomputed, and the next pass refuses it."""
    gm = llama(2).gm
    assert their_tags(gm, "default")["_scaled_dot_product_flash_attention_for_cpu"] == "PREFER_RECOMPUTE"
    with pytest.raises(RuntimeError, match="RNG"):
        graph_trainer("selective_activation_remat").selective_activation_remat_pass(gm)


def through_their_passes(traced: Traced, memory_policy: str) -> fx.GraphModule:
    passes = graph_trainer("passes")
    traced.result.gm = passes.apply_graph_passes(
        traced.gm,
        traced.result.example_inputs,
        [
            partial(passes.tag_with_memory_policy_pass, config=config(memory_policy)),
            passes.apply_cpu_offload_pass,
            passes.selective_activation_remat_pass,
        ],
    )
    return traced.gm


@pytest.mark.parametrize("policy", ["llama3_sac", "torchtitan_full", "torchtitan_eager", "torchtitan_graph_full"])
def test_a_step_through_their_passes_gives_the_same_numbers(policy: str, registry: dict[str, object]):
    traced = llama(2)
    expected = traced.run()
    torchtitan.register(policy)
    gm = through_their_passes(traced, "apl")
    report = policylang.report(gm)
    assert report.audit.agrees
    assert len(report.recomputed) > 50
    copies = [node.name for node in gm.graph.nodes if node.name.endswith("_recomputed")]
    assert len(copies) > 50
    assert not [name for name in copies if name.endswith("_recomputed_recomputed")]  # theirs did nothing to ours
    assert not [node.name for node in gm.graph.nodes if "recompute" in node.meta]
    assert bitwise_equal(traced.run(), expected)


def test_experts_are_chosen_and_counted_once(registry: dict[str, object]):
    traced = step_of(experts_of("deepseek_v3"))
    expected = traced.run()
    (counts,) = [buffer for name, buffer in traced.module.named_buffers() if name.endswith("tokens_per_expert_E")]
    counted = counts.clone()
    assert counted.sum() > 0
    torchtitan.register("torchtitan_graph_full")
    gm = through_their_passes(traced, "apl")
    assert len(policylang.report(gm).recomputed) > 50
    assert [str(node.target) for node in gm.graph.nodes].count("aten.topk.default") == 1
    assert bitwise_equal(traced.run(), expected)
    assert torch.equal(counts, 2 * counted)


def test_recomputed_attention_which_their_pass_refuses(registry: dict[str, object]):
    traced = llama(2)
    expected = traced.run()
    torchtitan.register(policylang.parse("blocks /layers.*\nrecompute everything in block"))
    gm = through_their_passes(traced, "apl")
    targets = [str(node.target) for node in gm.graph.nodes]
    assert targets.count(CPU_ATTENTION) == 2 * 2
    assert bitwise_equal(traced.run(), expected)


def recomputed_by(traced: Traced, memory_policy: str) -> set[str]:
    gm = through_their_passes(traced, memory_policy)
    return {node.name for node in gm.graph.nodes if node.name.endswith("_recomputed")}


def test_their_pass_recomputes_nothing_where_sums_of_gradients_pass_for_loss(registry: dict[str, object]):
    """The tracer labels a sum of gradients by the loss, and the pass takes the last such node for the loss's end."""
    ours, theirs, mended = llama(2), llama(2), llama(2)
    torchtitan.register("torchtitan_graph_full")
    recomputed = recomputed_by(ours, "apl")
    assert len(recomputed) > 50
    assert recomputed_by(theirs, "full") == set()
    for node in mended.gm.graph.nodes:
        if str(node.target) == "aten.add.Tensor" and node.meta.get("autograd_backward"):
            node.meta.pop("custom", None)
    assert recomputed_by(mended, "full") == recomputed


def test_another_name_and_what_was_built_in(registry: dict[str, object]):
    made = torchtitan.register("llama3_sac", "mine")
    assert registry["mine"] is made
    assert {"default", "full", "eager"} <= registry.keys()


def test_a_policy_that_matches_nothing_stops_the_trainer(registry: dict[str, object]):
    traced = llama(2)
    torchtitan.register(policylang.parse("save mm in layers.*.atention.wo"))
    with pytest.raises(PolicyMatchError, match="atention"):
        through_their_passes(traced, "apl")


def test_a_policy_that_cannot_be_read_is_not_registered(registry: dict[str, object], tmp_path):
    path = tmp_path / "mine.apl"
    path.write_text("save mmm\n")
    with pytest.raises(PolicyMeaningError, match="mmm"):
        torchtitan.register(path)
    assert "apl" not in registry


@pytest.fixture
def registry():
    """TorchTitan's own, as it was before once the test is over."""
    found = graph_trainer("memory_policy").MEMORY_POLICY_REGISTRY
    before = dict(found)
    yield found
    found.clear()
    found.update(before)


def test_a_graph_that_is_not_a_whole_step_is_refused():
    joint = capture_joint(*ZOO["llama"]())
    memory_policy = torchtitan.MemoryPolicy(policylang.load("llama3_sac"))
    with pytest.raises(PolicyGraphError, match="and this is a joint graph") as caught:
        memory_policy(joint.gm)
    assert caught.value.diagnostics[0].code == "APL384"


def test_without_torchtitan_the_error_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.setitem(sys.modules, "torchtitan.experiments.graph_trainer", None)
    with pytest.raises(PolicyGraphError, match="pip install torchtitan"):
        torchtitan.register("llama3_sac")
