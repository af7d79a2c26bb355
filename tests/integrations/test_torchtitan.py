"""Policies in TorchTitan 0.3.0: through its own functions, on graphs of its own tracer, and in its eager trainer."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import policylang
from policylang.errors import PolicyError, PolicyGraphError, PolicyMatchError, PolicyMeaningError, PolicyWarning
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.integrations import torchtitan
from policylang.integrations.torchtitan import parameters_of
from policylang.planning.capabilities import FLAT
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from policylang.planning.value_outcome import Why
from tests.support.drawn import slow
from tests.support.joint import capture_joint
from tests.support.models import ZOO, Function
from tests.support.titan import (
    Traced,
    config,
    deepseek,
    experts_of,
    graph_trainer,
    llama,
    model_of,
    stages_of,
    step_of,
    tokens_and_labels,
)
from tests.support.versions import VERSION

POLICIES = {"torchtitan_default": "default", "torchtitan_eager": "eager", "torchtitan_graph_full": "full"}
LAYERS = [2, *map(slow, (8, 32))]
ORDERS_ANEW = "joint_transformer_block_bucketing_reordering_pass"
CPU_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def qwen3() -> Traced:
    return step_of(experts_of("qwen3"))


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


@pytest.mark.slow
@pytest.mark.parametrize("model", [deepseek, qwen3])
def test_the_same_tag_on_every_node_of_a_mixture_of_experts(model: Callable[[], Traced]):
    """But for the counter of tokens, which a second run would count again, and for the routing under `full`."""
    gm = model().gm
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
    seeds = [name for name, target in zip(facts.names, facts.targets, strict=True) if "ones_like" in target]
    names = {seeds[-1]}  # the backward begins with it: no forward value
    other = "aten.topk.default" if memory_policy == "full" else CPU_ATTENTION  # `full` saves it, as a random operator
    owners = facts.by_target.get(other, [])
    names |= {name for name, owner in zip(facts.names, facts.owners, strict=True) if owner in owners}
    return names | turning_point(facts)


def turning_point(facts: Facts) -> set[str]:
    """The final norm, and the sum that the last layer hands to it: what the backward begins with, behind the loss."""
    last = max(facts.modules, key=lambda path: int(path.removeprefix("layers.")) if path[7:].isdigit() else -1)
    norm = {row for row in facts.forward if facts.modules[row] == "norm"}
    handed_on = {read for row in norm for read in facts.inputs[row] if facts.modules[read] == last}
    assert len(norm) > 5
    assert len(handed_on) == 1
    return {facts.names[row] for row in norm | handed_on}


def test_what_their_tags_come_to_on_this_graph():
    """A list of attention kernels lacks the one that is used: it is to be recomputed, and the next pass refuses it."""
    gm = llama(2).gm
    assert their_tags(gm, "default")["_scaled_dot_product_flash_attention_for_cpu"] == "PREFER_RECOMPUTE"
    with pytest.raises(RuntimeError, match="RNG") if VERSION < (2, 15) else nullcontext():
        graph_trainer("selective_activation_remat").selective_activation_remat_pass(gm)


def through_their_passes(traced: Traced, memory_policy: str) -> fx.GraphModule:
    passes = graph_trainer("passes")
    traced.result.gm = passes.apply_graph_passes(
        traced.gm,
        traced.result.example_inputs,
        [
            passes.eliminate_dead_code_pass,
            passes.canonicalize_graph_pass,
            passes.deduplicate_fsdp_unshard_chains_pass,
            partial(passes.tag_with_memory_policy_pass, config=config(memory_policy)),
            passes.apply_cpu_offload_pass,
            passes.selective_activation_remat_pass,
        ],
    )
    return traced.gm


@pytest.mark.parametrize(
    "policy", ["llama3_sac", "torchtitan_graph_full", *map(slow, ("torchtitan_full", "torchtitan_eager"))]
)
def test_a_step_through_their_passes_gives_the_same_numbers(policy: str, registry: dict[str, object]):
    traced = llama(2)
    expected = traced.run()
    gm = through_their_passes(traced, torchtitan.register(policy))
    report = policylang.report(gm)
    assert report.audit.agrees
    assert len(report.recomputed) > 50
    copies = [node.name for node in gm.graph.nodes if node.name.endswith("_recomputed")]
    assert len(copies) > 50
    assert not [name for name in copies if name.endswith("_recomputed_recomputed")]  # theirs did nothing to ours
    assert not [node.name for node in gm.graph.nodes if "recompute" in node.meta]
    assert bitwise_equal(traced.run(), expected)


@pytest.mark.slow
def test_experts_are_chosen_and_counted_once(registry: dict[str, object]):
    traced = deepseek()
    (counts,) = [buffer for name, buffer in traced.module.named_buffers() if name.endswith("tokens_per_expert_E")]
    before = counts.clone()
    expected = traced.run()
    counted = counts - before
    assert counted.sum() > 0
    gm = through_their_passes(traced, torchtitan.register("torchtitan_graph_full"))
    assert len(policylang.report(gm).recomputed) > 50
    assert [str(node.target) for node in gm.graph.nodes].count("aten.topk.default") == 1
    assert bitwise_equal(traced.run(), expected)
    assert torch.equal(counts, before + 2 * counted)


def test_recomputed_attention_which_their_pass_refuses(registry: dict[str, object]):
    traced = llama(2)
    expected = traced.run()
    recomputed_attention = policylang.parse("blocks /layers.*\nrecompute everything in block")
    gm = through_their_passes(traced, torchtitan.register(recomputed_attention))
    targets = [str(node.target) for node in gm.graph.nodes]
    assert targets.count(CPU_ATTENTION) == 2 * 2
    assert bitwise_equal(traced.run(), expected)


def recomputed_by(traced: Traced, memory_policy: str) -> set[str]:
    gm = through_their_passes(traced, memory_policy)
    return {node.name for node in gm.graph.nodes if node.name.endswith("_recomputed")}


@pytest.mark.parametrize("ours", ["torchtitan_default", slow("torchtitan_eager"), slow("torchtitan_graph_full")])
def test_the_same_nodes_run_again(ours: str, registry: dict[str, object], monkeypatch: pytest.MonkeyPatch):
    memory_policy = graph_trainer("memory_policy")
    listed = memory_policy._get_default_save_ops() | {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default  # its list is for GPUs
    }
    monkeypatch.setattr(memory_policy, "_get_default_save_ops", lambda: listed)
    recomputed = recomputed_by(llama(2), torchtitan.register(ours))
    assert len(recomputed) > 100
    assert recomputed_by(llama(2), POLICIES[ours]) == recomputed


@pytest.mark.slow
def test_without_chunks_of_the_loss_their_pass_also_recomputes_the_final_norm(registry: dict[str, object]):
    """Its backward region begins behind the last node that is labelled as loss. In chunks that is a sum of gradients in
    the norm's backward; otherwise it is the loss's own backward, and what the norm's reads is run again."""
    ours, theirs = llama(2, chunked=False), llama(2, chunked=False)
    facts = collect(ours.gm)
    recomputed = recomputed_by(ours, torchtitan.register("torchtitan_graph_full"))
    all_of_theirs = recomputed_by(theirs, "full")
    assert recomputed < all_of_theirs
    more = {name.removesuffix("_recomputed") for name in all_of_theirs - recomputed}
    assert len(more & turning_point(facts)) > 5
    assert {facts.modules[facts.index[name]] for name in more} == {"norm", "layers.1", "layers.1.feed_forward.w2"}


@pytest.mark.slow
def test_without_simple_fsdp_which_it_always_applies_their_pass_recomputes_nothing(registry: dict[str, object]):
    """Then every sum of gradients is labelled as loss, down to the first layer's."""
    assert recomputed_by(llama(2, sharded=False, chunked=False), "full") == set()


PARAMETERS = 7 + 3  # of a layer qkv, wo, w1, w2, w3 and two norms; the embedding, the last norm, the head


def gathers(gm: fx.GraphModule) -> int:
    return sum("all_gather_into_tensor" in str(node.target) for node in gm.graph.nodes)


@pytest.mark.parametrize(("reshard", "after"), [("always", 2 * PARAMETERS - 1), slow("never", PARAMETERS)])
def test_fsdp_includes_know_the_parameters(reshard: str, after: int, registry: dict[str, object], tmp_path):
    """Each gathered once; or twice, but for the embedding, whose weight no backward reads."""
    path = tmp_path / "mine.apl"
    path.write_text(f"include <torchtitan_default>\ninclude <fsdp_reshard_{reshard}>\n")
    traced = llama(1, ranks=2)
    gm = through_their_passes(traced, torchtitan.register(path))
    assert policylang.report(gm).audit.agrees
    assert gathers(gm) == after


@pytest.mark.parametrize(
    ("trained", "ranks"),
    [
        ("layers.0", 2),
        *(slow(*each) for each in (("", 1), ("", 2), ("norm", 2), ("lm_head", 1))),
    ],
)
def test_the_parameters_of_a_step_are_found(trained: str, ranks: int):
    """Frozen ones too, which have no gradient: only `trained` is."""
    model = model_of(1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    traced = step_of(model, ranks=ranks, chunked=False)
    positions = parameters_of(traced.gm)
    assert len(positions) == PARAMETERS == len(list(model.parameters()))
    placeholders = [node for node in traced.gm.graph.nodes if node.op == "placeholder"]
    shapes = [tuple(placeholders[position].meta["val"].shape) for position in positions]
    assert shapes == [tuple(parameter._local_tensor.shape) for parameter in model.parameters()]


def test_a_graph_without_gradients_has_no_parameters():
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    assert parameters_of(fx.GraphModule({}, graph)) == []


def test_the_name_changes_with_the_policy_and_with_nothing_else(registry: dict[str, object], tmp_path):
    """TorchTitan knows a precompiled step by the name of its memory policy."""
    path = tmp_path / "mine.apl"
    path.write_text("save mm  # as it was\n")
    before = torchtitan.register(path)
    path.write_text("save mm\n")
    assert torchtitan.register(path) == before
    path.write_text("save bmm\n")
    assert torchtitan.register(path) != before
    assert before.startswith("apl_")
    named = torchtitan.register("llama3_sac", "mine")
    assert named.startswith("mine_")
    assert {"default", "full", "eager", before, named, "mine"} <= registry.keys()


def test_the_name_without_a_digest_is_refused_where_a_step_is_precompiled(registry: dict[str, object]):
    name = torchtitan.register("llama3_sac", "mine")
    traced = llama(2)
    with pytest.raises(PolicyGraphError, match="the name `mine`, which does not identify the policy") as caught:
        registry["mine"](traced.gm, config=_choosing("mine", "somewhere"))
    assert caught.value.diagnostics[0].code == "APL385"
    assert registry["mine"] is registry[name]
    registry[name](traced.gm, config=_choosing(name, "somewhere"))
    assert policylang.report(traced.gm).recomputed
    registry["mine"](llama(2).gm, config=_choosing("mine", ""))


def _choosing(memory_policy: str, precompile_artifact_dir: str) -> SimpleNamespace:
    options = SimpleNamespace(memory_policy=memory_policy, precompile_artifact_dir=precompile_artifact_dir)
    return SimpleNamespace(compile=options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, [ORDERS_ANEW]),
        ({"disable_passes": [ORDERS_ANEW], "enable_async_tensor_parallel": True}, ["async_tensor_parallel_pass"]),
        ({"ep_overlap": SimpleNamespace(enabled=True)}, [ORDERS_ANEW, "ep_overlap_schedule_pass"]),
        ({"disable_passes": [ORDERS_ANEW], "inductor_compilation": "full"}, ["full_inductor_compilation_pass"]),
        ({"disable_passes": [ORDERS_ANEW], "inductor_compilation": "regional"}, []),
    ],
)
def test_an_order_that_torchtitan_would_not_keep_is_refused(options: dict[str, object], told: list[str]):
    """Before anything is changed: its passes run behind the memory policy, one of them always."""
    traced = llama(2)
    nodes = [node.name for node in traced.gm.graph.nodes]
    memory_policy = torchtitan.MemoryPolicy(policylang.parse("undecided -> save; optional keep order of all_to_all"))
    chosen = SimpleNamespace(compile=SimpleNamespace(**options))
    if not told:
        memory_policy(traced.gm, config=chosen)
        return
    with pytest.raises(PolicyGraphError) as caught:
        memory_policy(traced.gm, config=chosen)
    (found,) = caught.value.diagnostics
    assert found.code == "APL349"
    assert found.message.endswith(": " + " and ".join(f"`{name}`" for name in told))
    assert [node.name for node in traced.gm.graph.nodes] == nodes
    torchtitan.MemoryPolicy(policylang.parse("undecided -> save"))(traced.gm, config=chosen)


def test_a_policy_that_matches_nothing_stops_the_trainer(registry: dict[str, object]):
    traced = llama(2)
    name = torchtitan.register(policylang.parse("save mm in layers.*.atention.wo"))
    with pytest.raises(PolicyMatchError, match="atention"):
        through_their_passes(traced, name)


def test_a_policy_that_cannot_be_read_is_not_registered(registry: dict[str, object], tmp_path):
    path = tmp_path / "mine.apl"
    path.write_text("save mmm\n")
    before = dict(registry)
    with pytest.raises(PolicyMeaningError, match="mmm"):
        torchtitan.register(path)
    assert registry == before


@pytest.fixture
def registry():
    """TorchTitan's own, as it was before once the test is over."""
    found = graph_trainer("memory_policy").MEMORY_POLICY_REGISTRY
    before = dict(found)
    yield found
    found.clear()
    found.update(before)


def test_a_graph_that_is_not_a_whole_step_is_refused():
    joint = capture_joint(*ZOO["mlp"]())
    memory_policy = torchtitan.MemoryPolicy(policylang.load("llama3_sac"))
    with pytest.raises(PolicyGraphError, match="and this is a joint graph") as caught:
        memory_policy(joint.gm)
    assert caught.value.diagnostics[0].code == "APL384"


STAGED = (
    "blocks layers.*; recompute everything in block; save attention in block; save matmul in last stage\n"
    "offload attention in first stage"
)


@pytest.mark.slow
def test_stages_follow_a_policy_to_the_bit(registry: dict[str, object], tmp_path: Path):
    """What a stage saves crosses from its forward to its backward; what it recomputes is in either part of that."""
    plain = stages_of(torchtitan.register(policylang.parse("undecided -> save"), "plain"))
    ours = stages_of(torchtitan.register(policylang.parse(STAGED)))
    reports = torchtitan.reports()
    for number, (mine, other) in enumerate(zip(ours, plain, strict=True)):
        for how in ("split", "whole"):
            assert bitwise_equal(mine.run(how), other.run(how))
        graphs, report = mine.graphs.modules, reports[number]
        forward, backward = ({node.name for node in gm.graph.nodes} for gm in (graphs.fw, graphs.full_bw))
        assert report.audit is not None
        assert report.audit.agrees
        saved = {*mine.graphs.meta.partition.saved_for_backward_names} - {"fw", *placeholders(graphs.fw)}
        assert not saved & {*report.recomputed.names}
        assert {f"{name}_recomputed" for name in report.recomputed.names} <= backward - forward
        products = {name for name in report.saved.names if name.startswith("mm")}
        assert bool(products) is bool(number)
        assert products <= saved
        assert bool(report.offloaded.names) is not bool(number)
    parts = ours[1].graphs.modules
    assert any("recomputed" in node.name for node in parts.bw_dw.graph.nodes)
    snapshot = tmp_path / "stages.graph"
    policylang.snapshot([torchtitan.graphs()[number] for number in (0, 1)], snapshot)
    said = "schedule 1f1b into 2 stages of 4 microbatches\nexpect every attention in last stage saved"
    result = policylang.check(policylang.parse(f"{STAGED}; {said}"), graph=snapshot)
    assert not result.diagnostics
    assert result.plans[0].pipeline is not None
    assert [each.blocks for each in result.plans[0].pipeline.stages] == [(0, 1), (1, 2)]


def placeholders(gm: fx.GraphModule) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.op == "placeholder"]


@pytest.mark.slow
def test_the_weights_of_a_stage_are_gathered_by_a_graph_of_their_own(registry: dict[str, object]):
    """Which a policy orders, as it does the graph that reduces gradients."""
    ours = stages_of(torchtitan.register(policylang.parse(STAGED)), ranks=2)
    for stage in ours:
        graphs = stage.graphs.modules
        for gm in (graphs.fw, graphs.full_bw):
            assert not any("_c10d" in str(node.target) for node in gm.graph.nodes)
        for gm, kind, words in (
            (graphs.unshard, "all_gather", "(all_gather where from parameter)"),
            (graphs.reduce_grad, "reduce_scatter", "reduce_scatter"),
        ):
            before = sum(kind in str(node.target) for node in gm.graph.nodes)
            policylang.apply(gm, policylang.parse(f"bucket {words} up to 64 MiB"), agree=False)
            assert sum(kind in str(node.target) for node in gm.graph.nodes) == 1 < before


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("include <fsdp_reshard_always>", "APL658"),
        ("bucket all_gather up to 64 MiB", "APL306"),
        *(
            slow(*each)
            for each in [
                ("fuse all_gather chains", "APL306"),
                ("chunk loss into 4", "APL306"),
                ("save mm in first half of blocks", "APL656"),
                ("schedule 1f1b into 4 stages of 8 microbatches", "APL657"),
            ]
        ),
    ],
)
def test_a_line_that_a_stage_cannot_follow_is_refused(line: str, code: str, registry: dict[str, object]):
    name = torchtitan.register(policylang.parse(f"blocks layers.*; recompute everything in block\n{line}\n"))
    with pytest.raises(PolicyError) as caught:
        stages_of(name, ranks=2)
    found = next(each for each in caught.value.diagnostics if each.code == code)
    assert found.span is not None
    assert found.help


@pytest.mark.slow
def test_a_line_may_be_meant_for_another_stage(registry: dict[str, object]):
    """Here of a norm, in the last. A recomputed attention is told of: TorchTitan's forward graph has it too."""
    text = "blocks layers.*; recompute everything in block; save everything in /norm"
    with pytest.warns(PolicyWarning, match="APL662"):
        stages_of(torchtitan.register(policylang.parse(text)))
    first, last = (torchtitan.reports()[number].warnings for number in range(2))
    assert any("matches nothing in stage 0" in each and "APL359" in each for each in first)
    assert not any("APL359" in each for each in last)


def test_without_torchtitan_the_error_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    monkeypatch.setitem(sys.modules, "torchtitan.experiments.graph_trainer", None)
    with pytest.raises(PolicyGraphError, match="pip install torchtitan"):
        torchtitan.register("llama3_sac")


def policy_ac() -> Any:
    graph_trainer("common_utils")  # TorchTitan, or a skip
    from policylang.integrations.torchtitan_eager import PolicyAC

    return PolicyAC


def step(model: nn.Module) -> tuple[list[Tensor], int]:
    """Loss and gradients; and the bytes that autograd itself holds for the backward."""
    tokens, labels = tokens_and_labels()
    held: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *gradients], sum(held.values())


@pytest.mark.parametrize("policy", ["torchtitan_op_sac", "torchtitan_full"])
def test_a_step_gives_the_same_numbers(policy: str):
    config = policy_ac().Config(policy=policy)
    plain, checkpointed = model_of(2), model_of(2)
    names = [name for name, _ in checkpointed.named_parameters()]
    config.build(dump_folder="").apply(checkpointed)
    assert [name for name, _ in checkpointed.named_parameters()] == names
    expected, all_held = step(plain)
    found, held = step(checkpointed)
    assert len(expected) == len(names) + 1
    assert all(map(torch.equal, found, expected))
    assert held < all_held
    report = policylang.report(checkpointed)
    assert report.audit.agrees
    assert len(report.recomputed) > 50


def test_blocks_that_are_compiled_as_torchtitan_compiles_them_follow_the_same_policy():
    """TorchTitan names a backend by a word; the policy is that of the checkpoints."""
    plain, compiled = model_of(2), model_of(2)
    policy_ac().Config(policy="torchtitan_op_sac").build(dump_folder="").apply(compiled)
    torch.compiler.reset()
    for block in compiled.layers.values():
        block.compile(backend="policylang", fullgraph=True, options={"inner": "aot_eager"})
    assert all(map(torch.equal, step(compiled)[0], step(plain)[0]))
    report = policylang.report(compiled)
    assert report.audit.agrees
    assert report.saved.names
    assert report.recomputed.names


def one_block() -> nn.Module:
    """A block of products of one, one and two units of work, and a sum: the last product's result is read by nobody."""
    sizes = {"first": 8, "second": 8, "third": 16}
    products = {name: nn.Linear(8, size, bias=False) for name, size in sizes.items()}
    block = Function(lambda block, x: block.third(block.second(block.first(x))).sum(), **products)
    return Function(lambda model, x: model.layers["0"](x), layers=nn.ModuleDict({"0": block}))


def trained_once(config: Any) -> tuple[nn.Module, float]:
    """A model, and the work of the products that its backward runs, in products of 8 × 8 × 8."""
    model = one_block()
    config.build(dump_folder="").apply(model)
    loss = model(torch.randn(8, 8, requires_grad=True))
    with torch.profiler.profile(record_shapes=True) as profile:
        loss.backward()
    shapes = [event.input_shapes[:2] for event in profile.events() if event.name == "aten::mm"]
    return model, sum(rows * inner * columns for (rows, inner), (_, columns) in shapes) / 8**3


def test_full_checkpointing_runs_what_the_backward_reads_and_theirs_all_of_the_block():
    """TorchTitan's wrapper sets ``early_stop=False``: the last product runs again, which the backward never reads."""
    ours = policy_ac().Config(policy="torchtitan_full")
    from torchtitan.distributed.activation_checkpoint import FullAC

    assert trained_once(FullAC.Config())[1] == 8 + 4
    report = policylang.report(trained_once(ours)[0])
    assert report.audit.agrees
    assert report.recomputed.flops == (1 + 1) * 2 * 8**3


@pytest.mark.parametrize(
    ("options", "said"),
    [({"policy": "torchtitan_full", "debug": True}, "the option `debug` has no effect"), ({"policy": "{}"}, "mmm")],
)
def test_options_without_effect_and_a_policy_that_means_nothing_are_refused(tmp_path, options, said):
    path = tmp_path / "mine.apl"
    path.write_text("save mmm\n")
    config = policy_ac().Config(**{**options, "policy": options["policy"].format(path)})
    with pytest.raises(PolicyMeaningError, match=said):
        config.build().apply(model_of(2))
