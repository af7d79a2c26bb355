"""Models of eight billion parameters, traced for a GPU on whatever machine this is, held against a recorded graph."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import policylang
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Phase
from policylang.graph.traced_device import attention_kernels
from policylang.planning.capabilities import FLAT, JOINT
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from tests.support.shared_graphs import ONE_DEVICE, shared_graph

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU chooses for itself")

POLICY = "include <llama3_sac>\nundecided -> save"
MIB, GIB = 2**20, 2**30


def language_model(config: Any) -> nn.Module:
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-any-return]


def qwen3_8b(layers: int) -> nn.Module:
    return language_model(
        transformers.Qwen3Config(
            num_hidden_layers=layers,
            hidden_size=4096,
            intermediate_size=12288,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            vocab_size=151936,
        )
    )


def llama3_8b(layers: int) -> nn.Module:
    return language_model(
        transformers.LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            rope_theta=500000.0,
        )
    )


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss  # type: ignore[no-any-return]


def qwen_step(layers: int, **device: Any) -> Facts:
    ids = torch.zeros(1, 4096, dtype=torch.long, device="cpu" if device else "meta")
    return collect(policylang.trace_step(qwen3_8b(layers), loss, ids, **device).gm)


def outcome(facts: Facts, capabilities: Any = FLAT) -> Any:
    return saved_and_recomputed(plan(policylang.parse(POLICY), facts, capabilities))


def test_a_model_on_meta_and_a_batch_that_is_not_are_told_about_devices():
    ids = torch.zeros(1, 4, dtype=torch.long)
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    with pytest.raises(policylang.PolicyGraphError, match=r'trains on: `device="cuda"`'):
        policylang.trace_step(model, lambda model, ids: (model[1](model[0](ids)) + torch.ones(4, 8)).mean(), ids)


def test_what_a_block_of_qwen3_keeps_is_what_its_shapes_say():
    facts = qwen_step(2, device="cuda")
    assert attention_kernels(facts) == {"aten._scaled_dot_product_cudnn_attention.default": 2}
    hidden, keys, gate = 4096 * 4096 * 2, 4096 * 1024 * 2, 4096 * 12288 * 2
    attention = hidden + 32 * 4096 * 4 + 2 * 8  # its output, a logarithm a row and head, seed and offset of dropout
    # the products with q, v and gate; the first residual, and the hidden state that the block hands on
    assert outcome(facts).saved_bytes_by_block[0] == hidden + keys + gate + attention + 2 * hidden == 243_793_936


@pytest.mark.slow
def test_qwen3_8b_keeps_an_eighth_of_what_meta_says():
    fused = outcome(qwen_step(36, device="cuda", compute_capability="8.0")).saved_bytes / GIB
    with_scores = outcome(qwen_step(36)).saved_bytes / GIB
    assert (round(fused, 1), round(with_scores, 1)) == (10.6, 83.7)


@pytest.mark.slow
def test_llama3_8b_runs_the_kernels_of_the_recorded_step_and_keeps_its_bytes():
    """The recording is TorchTitan's model as AutoParallel traces it: products are `einsum`, casts an operator of
    AutoParallel's, SiLU is written out."""
    graph = shared_graph(ONE_DEVICE)
    for node in graph.graph.nodes:
        node.meta.pop("recompute", None)  # what its own checkpoint had tagged
    recorded = collect(graph)
    step = policylang.trace_step(
        llama3_8b(32),
        lambda model, ids: model(input_ids=ids).logits.float().mean(),
        torch.zeros(32, 8192, dtype=torch.long),
        device="cuda",
        compute_capability="8.0",
    )
    traced = collect(step.gm)
    assert attention_kernels(traced) == attention_kernels(recorded)
    assert counts(traced, "aten.mm.default") == counts(recorded, "aten.einsum.default")
    assert sum(counts(traced, "aten.mm.default")) == 3 * (7 * 32 + 1)
    for name in ("_scaled_dot_product_flash_attention_backward", "pow.Tensor_Scalar", "mean.dim", "rsqrt"):
        target = f"aten.{name}" if "." in name else f"aten.{name}.default"
        assert counts(traced, target) == counts(recorded, target)
    (first, *_), (other, *_) = (
        facts.by_target["aten._scaled_dot_product_flash_attention.default"] for facts in (traced, recorded)
    )
    assert kept_by(traced, first) == kept_by(recorded, other)

    here, there = outcome(traced), outcome(recorded, JOINT)
    assert here.recomputed_flops_by_block == there.recomputed_flops_by_block
    assert here.saved_bytes_by_block == there.saved_bytes_by_block


def counts(facts: Facts, target: str) -> tuple[int, int]:
    """In the forward, and in the backward."""
    found = Counter(phase for phase, each in zip(facts.phases, facts.targets, strict=True) if each == target)
    return found[Phase.FORWARD], found[Phase.BACKWARD]


def kept_by(facts: Facts, row: int) -> set[Any]:
    """The shapes of the large results of an operator."""
    return {facts.shapes[each] for each in facts.followers[row] if facts.bytes[each] > MIB}
