"""The models of the cookbook (docs/cookbook.md), each a training step traced at its true size.

Weights and batches are fake tensors: they have shapes and no memory, so an 8B step is traced on any laptop, in half a
minute, and nothing is downloaded. Each function makes one snapshot of docs/graphs:

    policylang snapshot examples.cookbook_models:llama3_8b -o docs/graphs/llama3_8b.graph

The steps are traced as an H100 runs them, with the attention kernels that it would choose, on a machine with or without
a GPU. The tutorial's model alone is compiled and run, on the CPU that the tutorial is written for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

import policylang

LLAMA3_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@contextmanager
def _bfloat16() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _hugging_face(config: str, model: str, **settings: Any) -> nn.Module:
    import transformers

    found = getattr(transformers, config)(**settings)
    return getattr(transformers, model)(found).train()


def _tokens(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.int64)


def _traced(model: nn.Module, loss: Callable[..., Tensor], *batch: Tensor) -> policylang.TracedStep:
    """Says which GPU, so that a machine with another one makes the same graph."""
    return policylang.trace_step(model, loss, *batch, device="cuda", compute_capability="9.0")


def language_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def _language_model(make: Callable[[], nn.Module], batch: int, length: int) -> policylang.TracedStep:
    with FakeTensorMode():
        with _bfloat16():
            model = make()
        return _traced(model, language_loss, _tokens(batch, length))


def llama3_8b(length: int = 8192) -> policylang.TracedStep:
    """Llama-3 8B: 32 blocks, one sequence of 8,192 tokens, bfloat16."""
    return _language_model(lambda: _hugging_face("LlamaConfig", "LlamaForCausalLM", **LLAMA3_8B), 1, length)


def mixtral() -> policylang.TracedStep:
    """A mixture of experts: Mixtral's block, 8 experts of which a token takes 2, 8 blocks, 4,096 tokens, bfloat16."""
    settings = {
        **LLAMA3_8B,
        "num_hidden_layers": 8,
        "vocab_size": 32_000,
        "num_local_experts": 8,
        "sliding_window": None,
    }
    return _language_model(lambda: _hugging_face("MixtralConfig", "MixtralForCausalLM", **settings), 1, 4096)


def deepseek_v3() -> policylang.TracedStep:
    """Four layers of DeepSeek-V3 with experts, of one of 64 ranks that share out the 256 experts of a layer: a stage of
    a pipeline, one microbatch of 4,096 tokens, bfloat16."""
    from examples.experts import Stage

    _mesh()
    group = _expert_ranks()
    with FakeTensorMode(), _bfloat16():
        model, x = Stage(4, group), torch.zeros(1, 4096, 7168)
        return _traced(model, lambda model, x: model(x).float().square().mean(), x)


def gpt2() -> policylang.TracedStep:
    """GPT-2, 124M: 12 blocks with dropout, 8 sequences of 1,024 tokens, bfloat16."""
    return _language_model(lambda: _hugging_face("GPT2Config", "GPT2LMHeadModel", use_cache=False), 8, 1024)


def vit() -> policylang.TracedStep:
    """ViT-B/16: 12 blocks, 64 images of 224 × 224, bfloat16."""

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(pixel_values=images).logits.float(), labels)

    with _bfloat16():  # its constructor asks tensors for their values, which fake ones have not
        model = _hugging_face("ViTConfig", "ViTForImageClassification", num_labels=1000)
        images, labels = torch.zeros(64, 3, 224, 224), torch.zeros(64, dtype=torch.int64)
        return _traced(model, loss, images, labels)


def resnet50() -> policylang.TracedStep:
    """ResNet-50 with BatchNorm in train mode, 64 images of 224 × 224, float32."""

    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(pixel_values=images).logits, labels)

    with FakeTensorMode():
        model = _hugging_face("ResNetConfig", "ResNetForImageClassification", num_labels=1000)
        images, labels = torch.zeros(64, 3, 224, 224), torch.zeros(64, dtype=torch.int64)
        return _traced(model, loss, images, labels)


def t5() -> policylang.TracedStep:
    """T5-base, an encoder and a decoder of 12 blocks each, 8 pairs of 512 tokens, bfloat16."""

    def loss(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
        logits = model(input_ids=source, decoder_input_ids=target, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

    settings = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    with FakeTensorMode(), _bfloat16():
        model = _hugging_face("T5Config", "T5ForConditionalGeneration", **settings)
        return _traced(model, loss, _tokens(8, 512), _tokens(8, 512))


class Lora(nn.Module):
    """A frozen projection and the product of two thin ones beside it (arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def llama_lora() -> policylang.TracedStep:
    """Llama-3 8B with LoRA of rank 16 on the query and value projections, everything else frozen."""

    def make() -> nn.Module:
        model = _hugging_face("LlamaConfig", "LlamaForCausalLM", **LLAMA3_8B).requires_grad_(False)
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj, attention.v_proj = Lora(attention.q_proj), Lora(attention.v_proj)
        return model

    return _language_model(make, 1, 8192)


@torch.library.custom_op("mylab::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """A fused kernel of one's own, as a trainer registers it."""
    return F.silu(gate) * up


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(gate)


def _swiglu_saves(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = context.saved_tensors
    sigmoid = torch.sigmoid(gate)
    return gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), gradient * gate * sigmoid


swiglu.register_autograd(_swiglu_backward, setup_context=_swiglu_saves)


class Gated(nn.Module):
    """A feed-forward whose activation is the custom operator ``mylab::swiglu``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(swiglu(self.gate(y), self.up(y)))


class GatedStack(nn.Module):
    def __init__(self, width: int = 4096, hidden: int = 14_336, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Gated(width, hidden) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def custom_operator() -> policylang.TracedStep:
    """8 feed-forwards around a custom operator, 8,192 tokens, bfloat16."""
    with FakeTensorMode(), _bfloat16():
        model, x = GatedStack(), torch.zeros(1, 8192, 4096)
        return _traced(model, lambda model, x: model(x).float().square().mean(), x)


@cache
def _mesh() -> DeviceMesh:
    """One process plays rank 0 of 128, dp 16 × tp 8, in a fake process group. It stays: a snapshot asks it for the
    ranks of each group, and a second mesh would give them other names."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from examples import sharded_llama

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=128)
    return sharded_llama.make_mesh("cpu", 16, 8)


@cache
def _expert_ranks() -> dist.ProcessGroup:
    return dist.new_group([*range(64)])


def _sharded(tensor_parallel: bool, layers: int = 8, length: int = 8192, ranks: int = 0) -> policylang.TracedStep:
    """What one of the ranks runs: of all, or of the first ``ranks``."""
    from attrs import evolve

    from examples import sharded_llama

    config = evolve(sharded_llama.LLAMA3_8B, layers=layers, sequence=length)
    length = length // 8 if tensor_parallel else length

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())

    mesh = _mesh()
    if ranks:
        mesh = sharded_llama.make_mesh("cpu", ranks, 1)
    with FakeTensorMode():
        model = sharded_llama.Llama(config)
        model = sharded_llama.shard(model, mesh, tensor_parallel=tensor_parallel, dtype=torch.bfloat16)
        return _traced(model, loss, _tokens(1, length))


def fsdp() -> policylang.TracedStep:
    """8 blocks of Llama-3 8B whose weights are cut over 128 ranks and gathered for each use; 8,192 tokens a rank."""
    return _sharded(tensor_parallel=False)


def tensor_parallel() -> policylang.TracedStep:
    """The same on dp 16 × tp 8: the blocks are tensor-parallel, and weights are cut over dp as well."""
    return _sharded(tensor_parallel=True)


def long_context() -> policylang.TracedStep:
    """Llama-3 8B on one sequence of 131,072 tokens."""
    return llama3_8b(length=131_072)


def long_context_8_ranks() -> policylang.TracedStep:
    """Llama-3 8B whose weights are cut over the 8 GPUs of a host, each with a sequence of 131,072 tokens."""
    return _sharded(tensor_parallel=False, layers=32, length=131_072, ranks=8)


def tutorial() -> nn.Module:
    """The small Llama of examples/train.py under ``torch.compile``: a joint graph, after a first forward."""
    model = _hugging_face(
        "LlamaConfig",
        "LlamaForCausalLM",
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=8,
    )
    compiled = torch.compile(model, backend=policylang.backend("llama3_sac", inner="aot_eager"))
    compiled(input_ids=_tokens(4, 256), labels=_tokens(4, 256), use_cache=False)
    return compiled


MODELS: dict[str, Callable[[], policylang.TracedStep | nn.Module]] = {
    function.__name__: function
    for function in (
        tutorial,
        llama3_8b,
        long_context,
        mixtral,
        deepseek_v3,
        gpt2,
        vit,
        resnet50,
        t5,
        llama_lora,
        custom_operator,
        fsdp,
        tensor_parallel,
        long_context_8_ranks,
    )
}
