"""Policies under an active ``FakeTensorMode``, which compilers of whole steps keep on throughout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compilers import nop
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import policylang
from policylang.graph.collect import collect
from tests.support.compiled import fresh_dynamo
from tests.support.meshed import WIDTH, Meshed
from tests.support.sharded import ALL_GATHER
from tests.support.versions import needs_groups_in_any_order

FUSE = "fuse all_gather chains over dp, tp"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def model(mesh: DeviceMesh) -> Meshed:
    return Meshed(mesh, (0, 1), linear=True)


def gathered_twice(mesh: DeviceMesh, mode: FakeTensorMode) -> fx.GraphModule:
    layer = model(mesh).layers[0]
    with mode:
        return make_fx(lambda x: layer(x) + 1)(torch.empty(2, WIDTH))


def gathers(gm: fx.GraphModule) -> int:
    return len(gm.graph.find_nodes(op="call_function", target=ALL_GATHER))


Way = Callable[[fx.GraphModule, DeviceMesh], object]
WAYS: dict[str, Way] = {
    "apply": lambda gm, mesh: policylang.apply(gm, policylang.parse(FUSE), mesh),
    "pass on a module": lambda gm, mesh: policylang.pass_(policylang.parse(FUSE), mesh=mesh)(gm),
    "pass on a graph": lambda gm, mesh: policylang.pass_(policylang.parse(FUSE), mesh=mesh)(gm.graph),
}


@needs_groups_in_any_order
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("same", [True, False], ids=["the graph's own mode", "another mode"])
def test_a_mesh_is_read_under_a_fake_mode(mesh: DeviceMesh, way: str, same: bool) -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    gm = gathered_twice(mesh, mode)
    assert gathers(gm) == 2
    with mode if same else FakeTensorMode():
        WAYS[way](gm, mesh)
        facts = collect(gm, mesh=mesh)
    assert gathers(gm) == 1
    assert [(found.dims, found.shape, found.ranks) for found in facts.meshes] == [(("dp", "tp"), (2, 2), (0, 1, 2, 3))]


def partition_with(
    gm: fx.GraphModule, joint_inputs: object, **options: object
) -> tuple[fx.GraphModule, fx.GraphModule]:
    with FakeTensorMode():
        policy = policylang.parse(f"undecided -> save\n{FUSE.removesuffix(' over dp, tp')}")
        return policylang.partition(gm, joint_inputs, policy=policy, **options)


@needs_groups_in_any_order
def test_a_joint_graph_is_partitioned_under_a_fake_mode(mesh: DeviceMesh) -> None:
    layer = model(mesh).layers[0]

    def loss(shard: Tensor, x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"shard": shard}, (x,))

    run = aot_function(loss, nop, partition_fn=partition_with)
    shard = layer.shard.detach().clone().requires_grad_()
    run(shard, torch.ones(2, WIDTH)).sum().backward()
    assert shard.grad is not None
    assert type(shard.grad) is Tensor


@needs_groups_in_any_order
def test_a_compiled_model_runs_on_a_mesh_under_a_fake_mode(mesh: DeviceMesh) -> None:
    backend = policylang.backend(policylang.parse("undecided -> save\nfuse all_gather chains"), inner="aot_eager")

    def under_a_mode(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with detect_fake_mode(inputs) or FakeTensorMode():
            return backend(gm, inputs)

    with fresh_dynamo():
        torch.compile(model(mesh), backend=under_a_mode)(torch.ones(2, WIDTH)).sum().backward()
    assert sum(each.done for each in policylang.report(backend).rewrites) == 2
