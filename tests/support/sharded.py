"""Models sharded as FSDP shards them: every parameter gathered where it is used, over a mesh too."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

from tests.support.models import Layers

ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default


class _Gather(nn.Module):
    """A parameter as its shards say it, in the dtype it is computed in; its gradient is averaged and scattered."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, sharded: DTensor) -> Tensor:
        whole = sharded.to(self.dtype).redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def sharded_stack(world: int, layers: int = 3, width: int = 128, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights on every rank before they are sharded over one mesh dimension, ``dp``."""
    torch.manual_seed(0)
    return shard_parameters(Layers(*(Block(width) for _ in range(layers))), world, dtype)


def shard_parameters(model: nn.Module, world: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Shard every parameter of a model in place, over one mesh dimension, ``dp``."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            local = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            module.register_parameter(name, local)
            parametrize.register_parametrization(module, name, _Gather(dtype), unsafe=True)
    return model


@contextmanager
def fake_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """One process that believes it is a rank of many: collectives return at once, with whatever is in memory."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


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
