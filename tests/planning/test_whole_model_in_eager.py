"""A plan of a whole model's graph for eager checkpoints decides, saves and recomputes what they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import policylang
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


def test_expectations_go_by_that() -> None:
    policy = policylang.parse(f"{POLICY}expect recomputed flops <= 10%\n")
    codes = {path.name: plan(policy, facts_of(GRAPH), path).expectations[0].found for path in (JOINT, EAGER)}
    assert codes == {JOINT.name: "0.9%", EAGER.name: "9.9%"}


def test_nothing_is_decided_outside_and_what_is_handed_on_stays() -> None:
    made = plan(policylang.parse(POLICY), facts_of(GRAPH), EAGER)
    reasons = {made.facts.names[row]: made.decisions[row].reason for row in made.facts.forward}  # type: ignore[union-attr]
    assert reasons["e"] == reasons["l"] == "outside the blocks, where there is no checkpoint"
    assert reasons["h"] == "what a block returns: the next checkpoint holds it"


def test_a_graph_without_blocks_is_one() -> None:
    made = plan(
        policylang.parse("save mm"),
        facts_of("%x = input\n%y = aten.mm.default(%x)\n---\n%b = aten.cos.default(%y)"),
        EAGER,
    )
    assert len(made.rules[0].decided) == 1


MODELS = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
                    num_key_value_heads=2, vocab_size=128, use_cache=False)
    ),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=128, use_cache=False, resid_pdrop=0.0, attn_pdrop=0.0,
                   embd_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
                    num_key_value_heads=2, head_dim=16, vocab_size=128, use_cache=False)
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_figures_are_those_of_the_checkpoints(name: str, tmp_path: Any) -> None:
    """Beside what they hold as the next block's input, which counts for no rule."""
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
        handed_on = len(made.block_names) * 2 * 32 * 64 * 4
        assert planned.recomputed_flops == report.recomputed.flops
        assert sum(planned.saved_bytes_by_block) - handed_on == report.saved.bytes
