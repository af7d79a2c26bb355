"""DeepSeek-V3 (arXiv 2412.19437) as one rank of many computes it, to be traced: latent attention, experts, FSDP.

Every weight is a shard that is cast and gathered where it is used, as SimpleFSDP does. Experts are shared out over the
ranks of expert parallelism: tokens go there and back by ``all_to_all``, each expert takes a fixed number of them
(``capacity``), so every size is known. Without the prediction of further tokens.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


@frozen
class DeepSeekConfig:
    vocabulary: int = 129_280
    width: int = 7168
    layers: int = 61
    dense_layers: int = 3
    """The first so many have no experts."""
    hidden: int = 18_432
    heads: int = 128
    query_rank: int = 1536
    latent: int = 512
    """The width of what keys and values are made of."""
    content: int = 128
    rotated: int = 64
    """Of each head's query and key, the width without and with a position."""
    value: int = 128
    experts: int = 256
    expert_hidden: int = 2048
    chosen: int = 8
    """Experts of a token."""
    groups: int = 8
    chosen_groups: int = 4
    capacity: float = 1.25
    """Slots of an expert, as a multiple of an even share of the tokens."""
    sequence: int = 4096


class Sharded(nn.Module):
    """A weight (rows, columns) of which a rank has some rows, cast and gathered at each use."""

    def __init__(self, shape: tuple[int, ...], group: object, ranks: int) -> None:
        super().__init__()
        self.group, self.first = group, shape[0]
        self.weight = nn.Parameter(torch.empty(-(-shape[0] // ranks), *shape[1:]))

    def whole(self) -> Tensor:
        found = collectives.all_gather_tensor_autograd(self.weight.to(torch.bfloat16), 0, self.group)
        return found[: self.first]


class Linear(Sharded):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.whole())


class Norm(Sharded):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.whole())


class Ranks:
    """The mesh of one stage: ``edp`` ranks that have the same experts, each of ``ep`` that have others."""

    def __init__(self, device: str, ranks: int, experts: int) -> None:
        every = torch.arange(ranks, device="cpu")
        self.mesh = DeviceMesh(device, every.view(-1, experts), mesh_dim_names=("edp", "ep"))
        self.all = DeviceMesh(device, every, mesh_dim_names=("dp",))
        self.ep = experts

    def linear(self, given: int, made: int) -> Linear:
        return Linear((made, given), (self.all, 0), self.all.size())

    def norm(self, width: int) -> Norm:
        return Norm((width,), (self.all, 0), self.all.size())

    def experts(self, *shape: int) -> Sharded:
        """The weights of this rank's experts, stacked along the first dimension."""
        return Sharded(shape, (self.mesh, 0), self.mesh.size(0))


class Attention(nn.Module):
    """Multi-head latent attention: keys and values are made of one narrow value a token."""

    def __init__(self, config: DeepSeekConfig, ranks: Ranks) -> None:
        super().__init__()
        self.config = c = config
        self.q_down, self.q_norm = ranks.linear(c.width, c.query_rank), ranks.norm(c.query_rank)
        self.q_up = ranks.linear(c.query_rank, c.heads * (c.content + c.rotated))
        self.kv_down, self.kv_norm = ranks.linear(c.width, c.latent + c.rotated), ranks.norm(c.latent)
        self.kv_up = ranks.linear(c.latent, c.heads * (c.content + c.value))
        self.out = ranks.linear(c.heads * c.value, c.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.config
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(-1, (c.heads, -1)).transpose(1, 2)
        content, turned = q.split((c.content, c.rotated), dim=-1)
        q = torch.cat((content, _rotate(turned, cos, sin)), dim=-1)
        latent, turned = self.kv_down(x).split((c.latent, c.rotated), dim=-1)
        key = _rotate(turned.unsqueeze(1), cos, sin).expand(-1, c.heads, -1, -1)
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (c.heads, -1)).transpose(1, 2)
        content, value = kv.split((c.content, c.value), dim=-1)
        k = torch.cat((content, key), dim=-1)
        padded = F.pad(value, (0, c.content + c.rotated - c.value))  # kernels want one width of all three
        found = F.scaled_dot_product_attention(q, k, padded, is_causal=True)[..., : c.value]
        return self.out(found.transpose(1, 2).flatten(2))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int, ranks: Ranks) -> None:
        super().__init__()
        self.gate, self.up = ranks.linear(width, hidden), ranks.linear(width, hidden)
        self.down = ranks.linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Routed experts beside a shared one. Tokens beyond an expert's capacity skip it."""

    bias: Tensor

    def __init__(self, config: DeepSeekConfig, ranks: Ranks) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        own = config.experts // ranks.ep
        self.router = ranks.linear(config.width, config.experts)
        self.shared = FeedForward(config.width, config.expert_hidden, ranks)
        self.gate = ranks.experts(own, config.width, config.expert_hidden)
        self.up = ranks.experts(own, config.width, config.expert_hidden)
        self.down = ranks.experts(own, config.expert_hidden, config.width)
        self.register_buffer("bias", torch.zeros(config.experts))

    def forward(self, given: Tensor) -> Tensor:
        x = given.flatten(0, 1)
        slots, weights = self._routed(x)
        count, own = self.config.experts * self._capacity(len(x)), self.config.experts // self.ranks.ep
        token = torch.arange(len(x), device=x.device).repeat_interleave(self.config.chosen)
        sent = x.new_zeros(count + 1, x.shape[1]).index_add(0, slots, x[token])[:count]
        here = self._exchanged(sent).view(self.ranks.ep, own, -1, x.shape[1]).transpose(0, 1).flatten(1, 2)
        hidden = F.silu(torch.bmm(here, self.gate.whole())) * torch.bmm(here, self.up.whole())
        made = torch.bmm(hidden, self.down.whole()).unflatten(1, (self.ranks.ep, -1)).transpose(0, 1)
        back = F.pad(self._exchanged(made.reshape(count, -1)), (0, 0, 0, 1))
        routed = (back[slots] * weights.unsqueeze(-1)).view(len(x), self.config.chosen, -1).sum(1)
        return (routed + self.shared(x)).view(given.shape)

    def _capacity(self, tokens: int) -> int:
        return int(self.config.capacity * tokens * self.config.chosen / self.config.experts)

    def _exchanged(self, x: Tensor) -> Tensor:
        parts = [len(x) // self.ranks.ep] * self.ranks.ep
        return collectives.all_to_all_single_autograd(x, parts, parts, (self.ranks.mesh, 1))

    def _routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For each token and each of its experts, the slot that it takes there and its weight; the last slot is for
        those that have none."""
        c, capacity = self.config, self._capacity(len(x))
        scores = self.router(x).float().sigmoid()
        by_group = (scores + self.bias).unflatten(-1, (c.groups, -1))
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(c.chosen_groups, dim=-1).indices
        open_groups = torch.zeros_like(by_group[..., 0]).scatter(1, best, 1.0).unsqueeze(-1)
        expert = (by_group * open_groups).flatten(1).topk(c.chosen, dim=-1).indices
        weights = scores.gather(1, expert)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype).flatten()
        ordered, order = expert.flatten().sort(stable=True)
        load = ordered.new_zeros(c.experts).scatter_add(0, ordered, torch.ones_like(ordered))
        place = torch.arange(len(ordered), device=x.device) - (load.cumsum(0) - load)[ordered]
        slot = torch.where(place < capacity, ordered * capacity + place, c.experts * capacity)
        return torch.zeros_like(slot).scatter(0, order, slot), weights


class Block(nn.Module):
    def __init__(self, config: DeepSeekConfig, ranks: Ranks, dense: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = ranks.norm(config.width), Attention(config, ranks)
        self.ffn_norm = ranks.norm(config.width)
        self.ffn = FeedForward(config.width, config.hidden, ranks) if dense else Experts(config, ranks)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


class DeepSeek(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: DeepSeekConfig, ranks: Ranks) -> None:
        super().__init__()
        self.embedding = ranks.linear(config.width, config.vocabulary)
        self.layers = nn.ModuleList(Block(config, ranks, at < config.dense_layers) for at in range(config.layers))
        self.norm, self.output = ranks.norm(config.width), ranks.linear(config.width, config.vocabulary)
        angles = torch.zeros(config.sequence, config.rotated // 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, sequence, vocabulary) of tokens (batch, sequence)."""
        x = F.embedding(tokens, self.embedding.whole())
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.output(self.norm(x))
