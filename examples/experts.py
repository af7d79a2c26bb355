"""Experts that lie on the ranks of a process group: tokens travel to them and back (expert parallelism, dropless).

:class:`DispatchedExperts` takes the place of the experts of a Transformers model. How many tokens a rank receives is
known once they are routed, so the sizes of what it computes come from data. :func:`deepseek_v3` makes a stage of
DeepSeek-V3 (arXiv 2412.19437) as that report trains it: 64 ranks share out the experts of a layer, and 16 stages the
layers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd


class DispatchedExperts(nn.Module):
    """The experts of this rank. Called with all its tokens, and for each the numbers and weights of its experts."""

    def __init__(self, experts: int, width: int, hidden: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group, group.size()
        here = experts // self.ranks
        self.gate_up = nn.Parameter(torch.randn(here, width, 2 * hidden) / width**0.5)
        self.down = nn.Parameter(torch.randn(here, hidden, width) / hidden**0.5)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Tokens are (T, width), the others (T, k); returns (T, width)."""
        order = chosen.reshape(-1).argsort(stable=True)
        token = order // chosen.shape[1]
        received, sent, got = self._counts(chosen)
        rows = all_to_all_single_autograd(tokens[token], got, sent, self.group)
        made = self._computed(rows, received)
        home = all_to_all_single_autograd(made, sent, got, self.group)
        home = home * weights.reshape(-1)[order, None].to(home.dtype)
        return torch.zeros_like(tokens).index_add(0, token, home)

    @torch.no_grad()
    def _counts(self, chosen: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """By rank and expert of this rank the tokens that come; how many go to each rank, and come from each."""
        here = self.down.shape[0]
        mask = torch.zeros(len(chosen), self.ranks * here, dtype=torch.int64, device=chosen.device)
        counts = mask.scatter_(1, chosen, 1).sum(0).view(self.ranks, here)
        received = all_to_all_single(counts, None, None, self.group).view(self.ranks, here)
        return received, counts.sum(1).tolist(), received.sum(1).tolist()

    def _computed(self, rows: Tensor, received: Tensor) -> Tensor:
        """Rows come rank by rank and are computed expert by expert."""
        numbers = torch.arange(received.shape[1], device=rows.device).repeat(self.ranks)
        expert = numbers.repeat_interleave(received.reshape(-1), output_size=rows.shape[0])
        by_expert = expert.argsort(stable=True)
        ends = received.sum(0).cumsum(0).to(torch.int32)
        gate, up = torch._grouped_mm(rows[by_expert].bfloat16(), self.gate_up.bfloat16(), offs=ends).chunk(2, -1)
        made = torch._grouped_mm(F.silu(gate) * up, self.down.bfloat16(), offs=ends).to(rows.dtype)
        return torch.zeros_like(made).index_copy(0, by_expert, made)


class Stage(nn.Module):
    """Some layers of DeepSeek-V3 with experts, between two others of a pipeline."""

    def __init__(self, layers: int, group: dist.ProcessGroup, **settings: Any) -> None:
        super().__init__()
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

        config = DeepseekV3Config(num_hidden_layers=layers, first_k_dense_replace=0, **settings)
        config._attn_implementation = "sdpa"
        self.layers = nn.ModuleList(deepseek.DeepseekV3DecoderLayer(config, at) for at in range(layers))
        sizes = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        for layer in self.layers:
            layer.mlp.experts = DispatchedExperts(*sizes, group)
        self.rotary = deepseek.DeepseekV3RotaryEmbedding(config)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)[None]
        turned = self.rotary(x, at)
        for layer in self.layers:
            x = layer(x, position_embeddings=turned, position_ids=at)
        return x
