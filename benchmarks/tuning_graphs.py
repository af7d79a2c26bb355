"""The graphs on which policies are tuned: recorded ones, snapshots, and Hugging Face models without weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from benchmarks.graphs import JointGraph, joint_of, llama_joint
from benchmarks.tuning_peers import untagged
from policylang.api.planned_graphs import read_any
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Group


@frozen(eq=False)
class Subject:
    """A graph, with what PyTorch's partitioner wants to know of a joint one; of a snapshot the facts alone."""

    name: str
    gm: fx.GraphModule | None
    inputs: Sequence[Any]
    arguments: dict[str, Any]
    groups: dict[str, Group]
    known: Facts | None = None

    @classmethod
    def of(cls, name: str, joint: JointGraph) -> Subject:
        known = ("num_fwd_outputs", "static_lifetime_input_indices")
        arguments = {key: value for key, value in joint.arguments.items() if key in known}
        return cls(name, untagged(joint.module), joint.inputs, arguments, {})

    def facts(self) -> Facts:
        if self.gm is None:
            assert self.known is not None
            return self.known
        return collect(self.gm, groups=self.groups) if self.groups else collect(self.gm)


def recorded(path: Path) -> Subject:
    """A recorded graph, rebuilt with fake tensors, without the tags of its model's own checkpoint."""
    from tests.support.shared_graphs import process_groups, shared_graph

    groups = {name: Group(name, ranks, len(ranks)) for name, ranks in process_groups(path).items()}
    gm = untagged(shared_graph(path))
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    parameters = [at for at, node in enumerate(inputs) if "Param" in str(node.meta.get("desc"))]
    arguments = {"num_fwd_outputs": 1, "static_lifetime_input_indices": parameters}
    return Subject(path.name.split(".")[0], gm, [node.meta.get("val") for node in inputs], arguments, groups)


def snapshot(path: Path) -> Subject:
    """A graph of which there is a snapshot: PyTorch's partitioner cannot be asked."""
    return Subject(path.stem, None, (), {}, {}, read_any(path))


# --- models ----------------------------------------------------------------------------------------------------------


def llama(layers: int = 16, hidden: int = 2048, tokens: int = 8192, vocabulary: int = 128256) -> JointGraph:
    """Llama 3.2 1B's sizes, bfloat16, one sequence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 256),
        use_cache=False,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )
    return _causal(lambda: LlamaForCausalLM._from_config(config), 1, tokens)


def gpt2() -> JointGraph:
    """GPT-2 medium with its dropout, float32, eight sequences."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=24, n_embd=1024, n_head=16, use_cache=False, attn_implementation="sdpa")
    return _causal(lambda: GPT2LMHeadModel(config), 8, 1024)


def qwen3() -> JointGraph:
    """Qwen3 0.6B's sizes, bfloat16, two sequences."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        use_cache=False,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )
    return _causal(lambda: Qwen3ForCausalLM._from_config(config), 2, 4096)


def bamba() -> JointGraph:
    """A hybrid of state spaces and attention, as Bamba stacks them, bfloat16, two sequences: eight blocks."""
    from transformers import BambaConfig, BambaForCausalLM

    config = BambaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        attn_layer_indices=[3, 7],
        mamba_n_heads=32,
        mamba_d_head=64,
        mamba_d_state=64,
        mamba_chunk_size=256,
        use_cache=False,
        attn_implementation="sdpa",
        dtype=torch.bfloat16,
    )
    return _causal(lambda: BambaForCausalLM._from_config(config), 2, 1024)


def swin() -> JointGraph:
    """Swin-T, float32, 32 images."""
    from transformers import SwinConfig, SwinForImageClassification

    with FakeTensorMode():
        model = SwinForImageClassification(SwinConfig()).train()
        images = torch.zeros(32, 3, 224, 224)
        return joint_of(lambda: model(pixel_values=images).logits.square().mean())


def _causal(make: Callable[[], Any], batch: int, length: int) -> JointGraph:
    """A language model and its loss on fake tensors: nothing of it needs memory."""
    with FakeTensorMode():
        model = make().train()
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        return joint_of(lambda: next_token(model, tokens))


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


MODELS: dict[str, Callable[[], JointGraph]] = {
    "llama 1B": llama,
    "gpt2 medium": gpt2,
    "qwen3 0.6B": qwen3,
    "bamba": bamba,
    "swin": swin,
    "tiny": lambda: llama_joint(2),
}
