"""`save … as` on real ranks, to the bits of narrowing by hand: FSDP2 and DDP around eager checkpoints, and tensor
parallel blocks, whose products are DTensors of which each rank narrows its part, in eager and under torch.compile."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import policylang
from policylang.language.syntax import NarrowForm
from tests.distributed.test_eager_checkpoints import HALF, Wrap, shard
from tests.support import models
from tests.support.by_hand import BF16, ROWS8, narrowed_by_hand
from tests.support.compiled import backend_for
from tests.support.eager import backward_of, blocks_of, differences, loss_of, train, twin
from tests.support.ranks import run_ranks

CROSSING = "save everything in block where crosses block"
POLICY = (
    f"recompute everything in block; save matmul in block as {{0}}; {CROSSING}; {CROSSING} outside last block as {{0}}"
)


def eager(form: NarrowForm, model: nn.Module) -> nn.Module:
    return policylang.checkpoint_model(model, policylang.parse(POLICY.format(form.text)), strict=True)


def compiled(form: NarrowForm, model: nn.Module) -> nn.Module:
    torch.compiler.reset()
    return torch.compile(model, backend=backend_for(POLICY.format(form.text)))


def tensor_parallel(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    for block in blocks_of(model):
        up, down = ColwiseParallel(use_local_output=False), RowwiseParallel(input_layouts=Shard(-1))
        parallelize_module(block, mesh, {"up": up, "down": down})
    return model


def compare(example: models.Example, rank: int, form: NarrowForm, make: Wrap, others: dict[str, Wrap]) -> None:
    run = backward_of(loss_of(example, rank))
    expected = train(make(narrowed_by_hand(twin(example.module), form, crossing=True)), run)
    assert differences(train(make(twin(example.module)), run), expected), "narrowing changes nothing"
    for name, other in others.items():
        model = other(twin(example.module))
        assert differences(expected, train(model, run)) == [], name
        report = policylang.report(model)
        assert report.audit.agrees
        assert all(report.rules[number].narrowed_bytes for number in (1, 3))


def check_sharded(mesh: DeviceMesh, rank: int, example: models.Example, form: NarrowForm, **options: object) -> None:
    under, sharded = partial(eager, form), partial(shard, mesh=mesh, **options)
    orders: dict[str, Wrap] = {
        "checkpointed, then sharded": lambda model: sharded(under(model)),
        "sharded, then checkpointed": lambda model: under(sharded(model)),
    }
    compare(example, rank, form, sharded, orders)


def check_form(mesh: DeviceMesh, rank: int, form: NarrowForm) -> None:
    under, parallel = partial(eager, form), partial(tensor_parallel, mesh)
    for example in (models.mlp(), models.gpt2()):
        check_sharded(mesh, rank, example, form)
        spread: dict[str, Wrap] = {"DDP": lambda model: DistributedDataParallel(under(model))}
        compare(example, rank, form, DistributedDataParallel, spread)
    paths = {"eager": lambda model: under(parallel(model)), "joint": lambda model: compiled(form, parallel(model))}
    compare(models.mlp(), 0, form, parallel, paths)


def check(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    check_form(mesh, rank, ROWS8)
    check_form(mesh, rank, BF16)
    check_sharded(mesh, rank, models.gpt2(), ROWS8, mp_policy=HALF)


@pytest.mark.slow
def test_two_ranks_compute_the_bits_of_narrowing_by_hand() -> None:
    run_ranks(check, 2)
