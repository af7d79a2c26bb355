"""Models sharded as FSDP shards them, small enough to read: every parameter a DTensor, gathered where it is used.

The parametrisation that SimpleFSDP (arXiv 2411.00284) builds on: the gather, its wait and the scatter of the gradient
are operators of the traced graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
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
def fake_ranks(world: int) -> Iterator[None]:
    """One process that believes it is rank 0 of many: collectives return at once, with whatever is in memory."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
