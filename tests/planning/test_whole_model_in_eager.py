"""A plan of a whole model's graph for eager checkpoints decides, saves and recomputes what they do."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers

import policylang
from policylang.backends.eager.checkpoint import sessions_of
from policylang.graph.facts import Facts
from policylang.operators.names import STAND_INS
from policylang.planning.capabilities import EAGER, JOINT
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from tests.support.textgraph import facts_of

GRAPH = """
    %x = input bytes=8
    %w = parameter bytes=8
    %e = aten.embedding.default(%w, %x) embed bytes=8
    %q = aten.mm.default(%e, %w) layers.0 bytes=8 flops=100
    %c = aten.cos.default(%q) layers.0 bytes=8
    %o = aten.mm.default(%c, %w) layers.0 bytes=8 flops=1000
    %r = aten.add.Tensor(%o, %e) layers.0 bytes=8
    %n = aten.sin.default(%r) layers.0 bytes=8
    %d = aten.mm.default(%n, %w) layers.0 bytes=8 flops=10000
    %h = aten.add.Tensor(%d, %r) layers.0 bytes=8
    %l = aten.mm.default(%h, %w) head bytes=8 flops=5
    ---
    %g = tangent bytes=8
    %b = aten.mul.Tensor(%g, %h, %n, %r) bytes=8
    %b_1 = aten.mul.Tensor(%b, %c, %q, %e) bytes=8
    output(%l, %b_1)
"""
POLICY = "blocks layers.*\nrecompute everything\nsave first add per block, everything where crosses block\n"


def test_a_block_runs_again_up_to_the_last_value_that_is_needed() -> None:
    """The product before the saved sum too, whose result nobody asks for, and not the one at the end."""
    facts = facts_of(GRAPH)
    policy = policylang.parse(POLICY)
    joint, eager = (saved_and_recomputed(plan(policy, facts, path)) for path in (JOINT, EAGER))
    assert (joint.recomputed_flops, eager.recomputed_flops) == (100, 1100)
    assert [facts.names[row] for row in eager.recomputed] == ["q", "c", "o", "n"]
    assert [facts.names[row] for row in eager.saved] == ["e", "r", "h"]


def test_on_its_way_it_holds_what_is_saved_whether_or_not_the_backward_reads_it() -> None:
    """The product before the saved sum, decided to be saved; the one at the end, which no second run comes to, not."""
    facts = facts_of(GRAPH)
    policy = policylang.parse(f"{POLICY}save mm\n")
    joint, eager = (saved_and_recomputed(plan(policy, facts, path)) for path in (JOINT, EAGER))
    assert [facts.names[row] for row in joint.saved] == ["e", "q", "r", "h"]
    assert [facts.names[row] for row in eager.saved] == ["e", "q", "o", "r", "h"]
    assert [facts.names[row] for row in eager.recomputed] == ["c", "n"]


EXPERTS = """
    %x = input bytes=8
    %w = parameter bytes=8
    %g = transformers.grouped_mm_fallback.default(%x, %w) layers.0 bytes=8 flops=100
    %c = aten.cos.default(%g) layers.0 bytes=8
    %h = aten.sin.default(%c) layers.0 bytes=8
    %l = aten.sin.default(%h) head bytes=8
    ---
    %t = tangent bytes=8
    %b = aten.mul.Tensor(%t, %g, %c, %h) bytes=8
    output(%l, %b)
"""


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ("save matmul", 0),
        ("save {aten,transformers}.*grouped_mm*", 0),
        ("optional save aten._grouped_mm\nsave transformers.grouped_mm_fallback", 0),
        ("save transformers.grouped_mm_fallback", 1),
        ("optional save aten._grouped_mm", 1),
    ],
)
def test_a_rule_that_names_what_only_a_compiled_model_calls(rules: str, told: int) -> None:
    facts = facts_of(EXPERTS)
    policy = policylang.parse(f"blocks layers.*\nrecompute everything\n{rules}", graph=facts)
    said = [each for each in plan(policy, facts, EAGER).diagnostics if each.code == "APL319"]
    assert len(said) == told
    assert all("the model most likely runs `aten._grouped_mm.default` in eager" in each.message for each in said)
    assert not [each for each in plan(policy, facts, JOINT).diagnostics if each.code == "APL319"]


def test_matmul_is_the_product_of_experts_on_every_path() -> None:
    facts = facts_of(EXPERTS)
    policy = policylang.parse("blocks layers.*\nrecompute everything\nsave matmul")
    saved = saved_and_recomputed(plan(policy, facts, JOINT)).saved
    assert "g" in [facts.names[row] for row in saved]


def test_expectations_go_by_that() -> None:
    policy = policylang.parse(f"{POLICY}expect recomputed flops <= 10%\n")
    codes = {path.name: plan(policy, facts_of(GRAPH), path).expectations[0].found for path in (JOINT, EAGER)}
    assert codes == {JOINT.name: "0.9%", EAGER.name: "9.9%"}


def test_nothing_is_decided_outside_and_what_is_handed_on_stays() -> None:
    made = plan(policylang.parse(POLICY), facts_of(GRAPH), EAGER)
    reasons = {made.facts.names[row]: made.decisions[row].reason for row in made.facts.forward}  # type: ignore[union-attr]
    assert reasons["e"] == reasons["l"] == "outside the blocks, where there is no checkpoint"
    h = made.facts.index["h"]
    assert made.rule_of(h) is made.policy.rules[1]
    recomputed = plan(policylang.parse("blocks layers.*\nrecompute everything"), facts_of(GRAPH), EAGER).decisions[h]
    assert (recomputed.rule, recomputed.reason) == (None, "what a block returns: the next checkpoint holds it")


def test_a_graph_without_blocks_is_one() -> None:
    made = plan(
        policylang.parse("save mm"),
        facts_of("%x = input\n%y = aten.mm.default(%x)\n---\n%b = aten.cos.default(%y)"),
        EAGER,
    )
    assert len(made.rules[0].decided) == 1


def hugging_face(config: str, model: str, **settings: Any) -> Callable[[], Any]:
    def made() -> Any:
        torch.manual_seed(0)
        settings_of = getattr(transformers, config)(vocab_size=128, use_cache=False, **settings)
        return getattr(transformers, model)(settings_of)

    return made


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = {
    "llama": hugging_face("LlamaConfig", "LlamaForCausalLM", num_hidden_layers=4, **SMALL),
    "gpt2": hugging_face(
        *("GPT2Config", "GPT2LMHeadModel"), n_embd=64, n_layer=3, n_head=4, resid_pdrop=0.0, attn_pdrop=0.0,
        embd_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    ),
    "qwen3": hugging_face("Qwen3Config", "Qwen3ForCausalLM", num_hidden_layers=3, head_dim=16, **SMALL),
    "t5": hugging_face(
        *("T5Config", "T5ForConditionalGeneration"), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    ),
    "mixtral": hugging_face("MixtralConfig", "MixtralForCausalLM", num_hidden_layers=2, sliding_window=None, **SMALL),
    "qwen3_moe": hugging_face(
        *("Qwen3MoeConfig", "Qwen3MoeForCausalLM"), num_hidden_layers=3, head_dim=16, moe_intermediate_size=64,
        num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0], norm_topk_prob=True, **SMALL,
    ),
    "deepseek": hugging_face(
        *("DeepseekV3Config", "DeepseekV3ForCausalLM"), num_hidden_layers=3, moe_intermediate_size=64,
        n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=16,
        q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_shared_experts=1,
        **{**SMALL, "num_key_value_heads": 4},
    ),
}  # fmt: skip
"""The experts of the last two follow a dense first layer."""
IN_PLACE = {"aten.sum.dim_IntList", "aten.clone.default"}
HELD_BEYOND = {"mixtral": IN_PLACE, "qwen3_moe": IN_PLACE, "deepseek": {"builtin.getitem"}}
"""What eager holds beyond the plan: routers that normalise the chosen weights in place (what read them before is held
with them), and the places of a choice that autograd keeps for a gradient that a compiler sees is none."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_figures_are_those_of_the_checkpoints(name: str, tmp_path: Any) -> None:
    """Beside what the last block returns, which no checkpoint takes, and what the graph cannot know."""
    tokens = torch.randint(0, 128, (2, 32))

    def step(model: Any) -> torch.Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    compiled = torch.compile(MODELS[name](), backend=policylang.backend("save_all", inner="aot_eager"))
    step(compiled)
    (graph,) = policylang.snapshot(compiled, tmp_path / "whole.graph")
    for policy in ("llama3_sac", "torchtitan_full", "torchtitan_op_sac"):
        model = MODELS[name]()
        policylang.checkpoint_model(model, policy)
        step(model).backward()
        report = policylang.report(model)
        (made,) = policylang.check(policy, graph=graph, path="eager").plans
        planned = saved_and_recomputed(made)
        assert planned.recomputed_flops == report.recomputed.flops
        beyond = held_by_operator(model)
        beyond.subtract(by_operator(made.facts, [row for row in planned.saved if made.block_of[row] >= 0]))
        last = 2 * 32 * 64 * 4
        assert sum(planned.saved_bytes_by_block) - last + sum((+beyond).values()) == report.saved.bytes
        assert {operator for operator, size in beyond.items() if size > 0} <= HELD_BEYOND.get(name, set())


def held_by_operator(model: Any) -> Counter[str]:
    """Bytes, of all the blocks."""
    found: Counter[str] = Counter()
    for session in sessions_of(model):
        for region in session.regions.values():
            for kept in region.kept.values():
                found += by_operator(kept.instructions.plan.facts, kept.instructions.needs.saved)
    return found


def by_operator(facts: Facts, rows: Iterable[int]) -> Counter[str]:
    """Of distinct memory; what a compiler has in another form under eager's name."""
    found: Counter[str] = Counter()
    roots = facts.storage_roots
    for row in {roots[row] for row in rows}:
        if facts.ops[row] == "call_function":
            found[STAND_INS.get(facts.targets[row], facts.targets[row])] += facts.bytes[row]
    return found
