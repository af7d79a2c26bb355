"""Chains of gathers over the dimensions of a mesh, by hand and made by DTensor, and what tests ask of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import permutations

import torch
import torch.distributed._functional_collectives as funcol
from attrs import frozen
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

from tests.support.sharded import ALL_GATHER, REDUCE_SCATTER

NAMES = ("dp", "tp", "cp")
FORMS = ("direct", "permuted", "joined")


@frozen
class Chain:
    """Gathers over mesh dimensions, the first one first.

    ``direct``: each along the leading dimension, the next one right after. ``permuted``: with a pair of permutes that
    cancel in between. ``joined``: along another dimension each, so that each but the first is split and joined again.
    """

    dims: tuple[int, ...]
    form: str

    def __call__(self, mesh: DeviceMesh, shard: Tensor) -> Tensor:
        value = shard
        for place, dim in enumerate(self.dims):
            along = place % value.ndim if self.form == "joined" else 0
            value = gather(value, along, mesh, dim)
            if self.form == "permuted" and place + 1 < len(self.dims):
                value = value.permute(1, 2, 0).permute(2, 0, 1)
        return value + 1

    def __str__(self) -> str:
        return f"{self.form} {'→'.join(NAMES[dim] for dim in self.dims)}"


def gather(value: Tensor, along: int, mesh: DeviceMesh, dim: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older name of the function, which torch 2.11 has too
        gathered: Tensor = funcol.all_gather_tensor(value, along, (mesh, dim))
        return gathered


def chains(ndim: int) -> list[Chain]:
    """Every ordered pair and triple of a mesh's dimensions, in every form."""
    lengths = range(2, ndim + 1)
    return [Chain(dims, form) for length in lengths for dims in permutations(range(ndim), length) for form in FORMS]


def traced(function: Callable[[Tensor], Tensor], example: Tensor) -> fx.GraphModule:
    def once(value: Tensor) -> Tensor:  # a plain function of one argument, whatever is given
        return function(value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DTensor advises to flatten the mesh; that is what is tested
        return make_fx(once)(example)


def shard_of(rank: int) -> Tensor:
    """Different on every rank, in every place."""
    return torch.arange(24.0).reshape(4, 3, 2) + 1000 * rank


def gathers(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=ALL_GATHER))


def scatters(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER))


class Whole(nn.Module):
    """A parameter from its shards; the gradients of all ranks are summed and scattered."""

    def forward(self, sharded: DTensor) -> Tensor:
        placements: Sequence[Placement] = [Replicate()] * sharded.device_mesh.ndim
        sums = [Partial()] * sharded.device_mesh.ndim
        return sharded.redistribute(placements=placements).to_local(grad_placements=sums)


class Layers(nn.Module):
    """Products of whole numbers, small enough for sums to be exact in any order."""

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement], layers: int = 2, width: int = 16) -> None:
        super().__init__()
        self.mesh = mesh
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        for layer in self.layers:
            weight = torch.randint(-2, 3, (width, width), generator=generator).float()
            layer.weight = nn.Parameter(distribute_tensor(weight, mesh, placements))
            parametrize.register_parametrization(layer, "weight", Whole(), unsafe=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def placements_of(ndim: int, kind: str) -> list[Placement]:
    """``one``: every mesh dimension cuts the leading dimension; ``both``: they take turns."""
    return [Shard(0 if kind == "one" else dim % 2) for dim in range(ndim)]
