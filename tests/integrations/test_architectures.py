"""Architectures of Transformers, each a step or two with random weights, under ``checkpoint_model`` and drawn policies.

To the bit against the same model without checkpoints, dropout and routing included. Two policies are the same for all,
the others differ from one architecture to the next.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policylang
from tests.support.frameworks import Trained, differences

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("error::policylang.errors.PolicyWarning")]

DRAWN = 3
WORDS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED: dict[str, Any] = {**WORDS, "num_key_value_heads": 2}
ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "output_router_logits": True}
IMAGES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
PAIRS: dict[str, Any] = {
    "vocab_size": 64,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    **ENDS,
}
LATENT: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}

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
    "Whisper": (
        "ForConditionalGeneration",
        {
            **PAIRS,
            "num_mel_bins": 8,
            "decoder_start_token_id": 1,
            "max_source_positions": 8,
            "max_target_positions": 32,
            "dropout": 0.1,
        },
    ),
    "ViT": ("ForImageClassification", {**IMAGES, "hidden_dropout_prob": 0.1}),
    "Swin": (
        "Model",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "drop_path_rate": 0.2,
        },
    ),
    "ConvNext": ("Model", {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "patch_size": 2}),
    "CLIP": ("Model", {"text_config": {**WORDS, **ENDS}, "vision_config": IMAGES, "projection_dim": 16}),
}

OPERATORS = """
matmul mm addmm bmm attention softmax add mul gelu silu convolution layer_norm dropout transpose view clone embedding
topk cat split mean rsqrt
"""
FORMS = (
    "{verb} {operator} in block",
    "{verb} every 2nd {operator} per block",
    "{verb} first {operator} per block",
    "{verb} last {operator} per block",
    "{verb} {operator} where crosses block",
    "{verb} {operator} where feeds backward",
)


def _drawn(seed: str) -> str:
    chance = random.Random(seed)
    rules = [f"{chance.choice(['save', 'recompute'])} everything in block"]
    for _ in range(chance.randint(1, 6)):
        rule = chance.choice(FORMS).format(
            verb=chance.choice(["save", "recompute"]), operator=chance.choice(OPERATORS.split())
        )
        rules.append(f"optional {rule}")
    return "; ".join(rules)


def _policies(name: str) -> list[str]:
    fixed = ["recompute everything in block", "save everything in block"]
    return fixed + [_drawn(f"{name} {number}") for number in range(DRAWN)]


def _loss(model: Any, name: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, 64, (2, 12), generator=generator)
    image = torch.randn(2, 3, 16, 16, generator=generator)
    if name == "CLIP":
        return model(input_ids=tokens, pixel_values=image, return_loss=True).loss
    if name == "Whisper":
        return model(input_features=torch.randn(2, 8, 16, generator=generator), labels=tokens).loss
    if name in ("ViT", "Swin", "ConvNext"):
        output = model(pixel_values=image)
        return (output.logits if name == "ViT" else output.last_hidden_state).square().mean()
    return model(input_ids=tokens, labels=tokens).loss


def _loop(name: str) -> Callable[[nn.Module], list[Tensor]]:
    def loop(model: nn.Module) -> list[Tensor]:
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(2):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = _loss(model, name, step)
            loss.backward()
            optimizer.step()
            losses += [loss.detach(), torch.rand(())]
        return losses

    return loop


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_an_architecture(name: str) -> None:
    kind, settings = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, _config(name))(**settings)
    plain = getattr(transformers, name + kind)(config).train()
    expected = Trained.by(_loop(name), copy.deepcopy(plain))
    for text in _policies(name):
        model = policylang.checkpoint_model(copy.deepcopy(plain), policylang.parse(text), strict=True)
        assert differences(expected, Trained.by(_loop(name), model)) == [], text
        audit = policylang.report(model).audit
        assert audit is not None
        assert audit.differences == (), text


def _config(name: str) -> str:
    return "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
