"""A small model whose experts lie on several ranks, beside a shared one."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn

import policylang
from examples.experts import DispatchedExperts
from tests.support.titan import group_of

TOKENS, WIDTH, HIDDEN, CHOICES, RANKS, LOCAL = 24, 16, 32, 2, 4, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        experts = LOCAL * dist.get_world_size()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts, bias=False)
        self.experts = DispatchedExperts(experts, WIDTH, HIDDEN, dist.group.WORLD)
        self.shared_experts = nn.Sequential(nn.Linear(WIDTH, 4 * HIDDEN), nn.SiLU(), nn.Linear(4 * HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        scores, chosen = self.router(normed).softmax(-1).topk(CHOICES)
        return x + self.experts(normed, chosen, scores) + self.shared_experts(normed)


class Routed(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


@cache
def routed_step(layers: int = 2) -> policylang.TracedStep:
    """One step, traced on one of four ranks, of which the others are imagined."""
    with group_of(RANKS):
        return policylang.trace_step(Routed(layers), lambda model: model(torch.randn(TOKENS, WIDTH)))
