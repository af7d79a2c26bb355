"""Architectures of Transformers, small and with random weights, and the bundled policies on their traced steps."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import policylang
from policylang.graph.blocks import blocks_of
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.language.diagnostics import is_error
from policylang.planning.capabilities import FLAT
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.planner import plan as make_plan

WORDS: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPED: dict[str, Any] = {**WORDS, "num_key_value_heads": 2}
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": True}
IMAGES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
PAIRS: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, **ENDS,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip
SOUNDS: dict[str, Any] = {
    "num_mel_bins": 8, "decoder_start_token_id": 1, "max_source_positions": 8, "max_target_positions": 32,
    "dropout": 0.1,
}  # fmt: skip
WINDOWS: dict[str, Any] = {
    "image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4,
    "drop_path_rate": 0.2,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("ForCausalLM", {**GROUPED, "attention_dropout": 0.1}),
    "Mistral": ("ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "Qwen3": ("ForCausalLM", {**GROUPED, "head_dim": 8}),
    "Qwen3Moe": ("ForCausalLM", {**GROUPED, **EXPERTS, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}),
    "Mixtral": ("ForCausalLM", {**GROUPED, **EXPERTS, "num_local_experts": 4}),
    "DeepseekV3": ("ForCausalLM", {**GROUPED, **LATENT}),
    "GPT2": ("LMHeadModel", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "GPTNeoX": ("ForCausalLM", {**WORDS, "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "OPT": ("ForCausalLM", {**WORDS, "ffn_dim": 48, "word_embed_proj_dim": 32, "layerdrop": 0.3}),
    "Bloom": ("ForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1}),
    "Falcon": ("ForCausalLM", {**WORDS, "hidden_dropout": 0.1, "alibi": False}),
    "Gemma2": ("ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "Gemma3": ("ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}),
    "Phi3": ("ForCausalLM", {**GROUPED, **ENDS}),
    "Mamba": ("ForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
    "RecurrentGemma": (
        "ForCausalLM",
        {**GROUPED, "lru_width": 32, "attention_window_size": 4, "block_types": ["recurrent", "attention"]},
    ),
    "Bert": ("ForMaskedLM", WORDS),
    "DebertaV2": ("ForMaskedLM", {**WORDS, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "Albert": ("ForMaskedLM", {**WORDS, "embedding_size": 16, "hidden_dropout_prob": 0.1}),
    "T5": (
        "ForConditionalGeneration",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "decoder_start_token_id": 0},
    ),
    "Bart": ("ForConditionalGeneration", {**PAIRS, "decoder_start_token_id": 2, "decoder_layerdrop": 0.3}),
    "Whisper": ("ForConditionalGeneration", {**PAIRS, **SOUNDS}),
    "ViT": ("ForImageClassification", {**IMAGES, "hidden_dropout_prob": 0.1}),
    "Swin": ("Model", WINDOWS),
    "ConvNext": ("Model", {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "patch_size": 2}),
    "CLIP": ("Model", {"text_config": {**WORDS, **ENDS}, "vision_config": IMAGES, "projection_dim": 16}),
}
POLICIES = (
    *("llama3_sac", "every_2nd_layer", "memory_staged", "save_all", "torchtitan_op_sac", "torchtitan_full"),
    *("torchtitan_default", "torchtitan_eager", "torchtitan_graph_full"),
)
DISTIL: dict[str, Any] = {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
EVERY: dict[str, tuple[str, dict[str, Any]]] = {
    **ARCHITECTURES,
    "Gemma": ("ForCausalLM", {**GROUPED, "head_dim": 8}),
    "Glm": ("ForCausalLM", {**GROUPED, "head_dim": 8, "pad_token_id": 0}),
    "Granite": ("ForCausalLM", GROUPED),
    "Olmo2": ("ForCausalLM", {**GROUPED, "pad_token_id": 0}),
    "Phi": ("ForCausalLM", WORDS),
    "Qwen2": ("ForCausalLM", GROUPED),
    "StableLm": ("ForCausalLM", GROUPED),
    "DistilBert": ("ForMaskedLM", {**DISTIL, "max_position_embeddings": 64}),
    "Electra": ("ForMaskedLM", {**WORDS, "embedding_size": 32}),
    "Roberta": ("ForMaskedLM", {**WORDS, **ENDS}),
}


def built(name: str, **other: Any) -> nn.Module:
    """An architecture in training, with other settings than its own where they are given."""
    kind, settings = EVERY[name]
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    model = getattr(transformers, name + kind)(config(**{**settings, **other}))
    assert isinstance(model, nn.Module)
    return model.train()


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words, an image and a sound; a model takes what it can."""
    chance = torch.Generator().manual_seed(step)
    words = torch.randint(3, 64, (2, 12), generator=chance)
    return words, torch.randn(2, 3, 16, 16, generator=chance), torch.randn(2, 8, 16, generator=chance)


def loss_of(name: str) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    def loss(model: Any, words: Tensor, image: Tensor, sound: Tensor) -> Tensor:
        if name == "CLIP":
            return model(input_ids=words, pixel_values=image, return_loss=True).loss
        if name == "Whisper":
            return model(input_features=sound, labels=words).loss
        if name in ("ViT", "Swin", "ConvNext"):
            output = model(pixel_values=image)
            return (output.logits if name == "ViT" else output.last_hidden_state).float().square().mean()
        return model(input_ids=words, labels=words).loss

    return loss


@cache
def facts_of(name: str) -> Facts:
    drawn = ("layerdrop", "decoder_layerdrop")  # decided by random numbers
    torch.manual_seed(0)
    model = built(name, **{key: 0.0 for key in drawn if key in EVERY[name][1]})
    return collect(policylang.trace_step(model, loss_of(name), *batch(0)).gm)


def outcome(name: str, policy: str) -> str:
    """The share of the bytes that are still saved, ``41%``; or the codes of the errors."""
    plan = make_plan(policylang.load(policy), facts_of(name), FLAT)
    if codes := sorted({found.code for found in plan.diagnostics if is_error(found)}):
        return ", ".join(codes)
    found = breakdown(plan)
    return f"{found.under.amounts.saved_bytes / found.without.amounts.saved_bytes:.0%}"


def table() -> str:
    """Architecture by policy, with the modules that a policy without a ``blocks`` line takes for blocks."""
    lines = [f"| architecture | blocks | {' | '.join(f'`{policy}`' for policy in POLICIES)} |"]
    lines.append("|---" * (len(POLICIES) + 2) + "|")
    for name in sorted(EVERY):
        first = next(iter(blocks_of(facts_of(name)).names))
        cells = " | ".join(outcome(name, policy) for policy in POLICIES)
        lines.append(f"| {name} | `{first.rpartition('.')[0]}.*` | {cells} |")
    return "\n".join(lines)
