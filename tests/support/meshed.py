"""A model on a mesh whose every weight is gathered over the dimensions it is told, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, mesh: DeviceMesh, dims: Sequence[int]) -> None:
        super().__init__()
        self.groups = [(mesh, dim) for dim in dims]
        parts = 1
        for dim in dims:
            parts *= mesh.size(dim)
        self.shard = nn.Parameter(torch.full((WIDTH // parts, WIDTH), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.shard
        for mesh, dim in self.groups:
            weight = functional.all_gather_tensor_autograd(weight, 0, (mesh, dim))
        return x @ weight.t()


class Meshed(nn.Module):
    """``linear``: nothing but products, for which Inductor has no kernel to compile."""

    def __init__(self, mesh: DeviceMesh, dims: Sequence[int], layers: int = 2, linear: bool = False) -> None:
        super().__init__()
        self.linear = linear
        self.layers = nn.ModuleList(Layer(mesh, dims) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if self.linear else x + torch.sin(layer(x))
        return x
