"""A Llama, and its parameters sharded over a mesh of tensor and data parallelism: to copy and to change.

The model knows nothing of the mesh. ``shard`` gives it tensor parallelism by PyTorch's own styles, and keeps what each
rank stores as a DTensor that is cut over all ranks. Every use of a parameter gathers it, as SimpleFSDP does
(arXiv 2411.00284), so that gathers and scatters are operators of the traced graph, where a policy sees them.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

# --- the model -------------------------------------------------------------------------------------------------------


@frozen
class LlamaConfig:
    vocabulary: int = 512
    width: int = 64
    hidden: int = 192
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    sequence: int = 64
    """The longest sequence: rotary embeddings are computed for so many positions."""
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5


LLAMA3_8B = LlamaConfig(vocabulary=128_256, width=4096, hidden=14_336, layers=32, heads=32, kv_heads=8, sequence=8192)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (x.float() * scale).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Grouped-query attention. Heads are counted from what arrives, which under tensor parallelism is a rank's own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.shared_by = config.heads // config.kv_heads
        kv_width = config.kv_heads * self.head_width
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, kv_width, bias=False)
        self.wv = nn.Linear(config.width, kv_width, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (self._heads(project(x)) for project in (self.wq, self.wk, self.wv))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        k, v = (each.repeat_interleave(self.shared_by, dim=1) for each in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, sequence, width of a head)."""
    length = x.shape[2]
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = cos[:length], sin[:length]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.width, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.output = nn.Linear(config.width, config.vocabulary, bias=False)
        half = config.width // config.heads // 2
        frequencies = config.rope_theta ** (-torch.arange(half).float() / half)
        angles = torch.arange(config.sequence).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, sequence, vocabulary) of tokens (batch, sequence), or of a rank's own share of both."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))


# --- the mesh --------------------------------------------------------------------------------------------------------


def make_mesh(device: str, dp: int, tp: int) -> DeviceMesh:
    """Neighbouring ranks are tensor-parallel to each other.

    The dimension ``tp`` comes first, since DTensor cuts in the order of the dimensions: a weight is cut for tensor
    parallelism, and each piece of it for FSDP.
    """
    ranks = torch.arange(dp * tp).view(dp, tp)
    return DeviceMesh(device, ranks.T.contiguous(), mesh_dim_names=("tp", "dp"))


TENSOR_PARALLEL = {
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    ),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
    "feed_forward.w3": ColwiseParallel(),
}
"""Of a block. Between its attention and its feed-forward, each rank has its own part of the sequence."""


def shard(model: Llama, mesh: DeviceMesh, *, tensor_parallel: bool = True, dtype: torch.dtype | None = None) -> Llama:
    """Shards a model that is the same on every rank, in place.

    With ``tensor_parallel`` the blocks compute by :data:`TENSOR_PARALLEL`. Every other parameter, without it each of
    them, is cut over all ranks and gathered whole: over ``dp``, then over ``tp``. ``dtype`` is what a parameter is cast
    to before it is gathered, its own without.

    What a rank feeds the model is its share of the batch over ``dp``, and over ``tp`` its share of the sequence, or,
    without ``tensor_parallel``, of the batch again. Its loss has to be its share of the loss: gradients are summed.
    """
    if tensor_parallel:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], TENSOR_PARALLEL, src_data_rank=None)
    for module in list(model.modules()):
        parameters = dict(module.named_parameters(recurse=False))
        if parameters:
            _gather_on_use(module, {name: _shard(module, name, mesh, dtype) for name in parameters})
    return model


@frozen
class Gather:
    """How a parameter that is cut over all ranks becomes the tensor that a module computes with."""

    mesh: DeviceMesh
    tensor_parallel: Placement | None
    """How a module that is tensor-parallel wants it; it gets a DTensor over ``tp`` then, a plain tensor otherwise."""
    dtype: torch.dtype

    def __call__(self, parameter: DTensor) -> Tensor:
        wanted = self.tensor_parallel or Replicate()
        gradient = self.tensor_parallel or Partial()
        whole = parameter.to(self.dtype).redistribute(placements=[wanted, Replicate()])
        local = whole.to_local(grad_placements=[gradient, Partial()])
        if self.tensor_parallel is None:
            return local
        return DTensor.from_local(local, self.mesh["tp"], [self.tensor_parallel], run_check=False)


def _shard(module: nn.Module, name: str, mesh: DeviceMesh, dtype: torch.dtype | None) -> Gather:
    """Puts this rank's part in the place of a parameter. Nothing is communicated: every rank has the whole."""
    parameter = module.get_parameter(name)
    data, wanted = parameter.detach(), None
    if isinstance(data, DTensor):  # cut by a tensor-parallel style
        (wanted,), data = data.placements, data.to_local()
    there = [wanted or Replicate(), Replicate()]
    kept = [wanted or Shard(0), Shard(0)]
    cut = DTensor.from_local(data, mesh, there, run_check=False).redistribute(placements=kept)
    module.register_parameter(name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
    return Gather(mesh, wanted, dtype or parameter.dtype)


def _gather_on_use(module: nn.Module, gathers: dict[str, Gather]) -> None:
    """Parameters keep their names for the optimizer and for checkpoints; ``module.weight`` is the gathered one."""

    def read(name: str, self: nn.Module) -> Tensor:
        return gathers[name](self._parameters[name])

    kind = type(module)
    properties = {name: property(partial(read, name)) for name in gathers}
    module.__class__ = type(f"Sharded{kind.__name__}", (kind,), properties)
