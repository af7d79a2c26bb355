"""Eager checkpoints under a policy on real ranks: FSDP2 and DDP, to the bits of the same training without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import policylang
from tests.support import models
from tests.support.eager import POLICY, Loss, backward_of, blocks_of, differences, loss_of, train, twin
from tests.support.ranks import run_ranks

Wrap = Callable[[nn.Module], nn.Module]


def shard(model: nn.Module, mesh: DeviceMesh, **options: object) -> nn.Module:
    """As a trainer does: each block by itself, then what is left."""
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def under_policy(model: nn.Module) -> nn.Module:
    return policylang.checkpoint_model(model, POLICY)


def wrapped(model: nn.Module) -> nn.Module:
    """Each block in torch's own wrapper, as TorchTitan does, with a `context_fn` for that block alone."""
    holder = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for name, block in list(holder.named_children()):
        context_fn = policylang.context_fn(POLICY, block)
        holder.register_module(name, checkpoint_wrapper(block, context_fn=context_fn))
    return model


def switched_on(model: nn.Module) -> nn.Module:
    """By the model's own switch, which has one `context_fn` for all blocks."""
    context_fn = policylang.context_fn(POLICY, model)
    model.model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": context_fn})
    return model


def compare(example: models.Example, make: Wrap, others: dict[str, Wrap], run: Callable[..., Tensor]) -> None:
    expected = train(make(twin(example.module)), run)
    for name, other in others.items():
        assert differences(expected, train(other(twin(example.module)), run)) == [], name


def check_fsdp(
    rank: int, mesh: DeviceMesh, example: models.Example, names: Sequence[str] = (), **options: object
) -> None:
    """Whichever comes first, and whoever puts the checkpoint there."""
    sharded = partial(shard, mesh=mesh, **options)
    orders: dict[str, Wrap] = {
        "checkpointed, then sharded": lambda model: sharded(under_policy(model)),
        "sharded, then checkpointed": lambda model: under_policy(sharded(model)),
        "in torch's wrapper, then sharded": lambda model: sharded(wrapped(model)),
        "by the model's switch": lambda model: sharded(switched_on(model)),
    }
    compare(example, sharded, {name: orders[name] for name in names or orders}, backward_of(loss_of(example, rank)))


def accumulated(loss: Loss, model: nn.Module, step: int) -> Tensor:
    """Two micro-batches of which only the second lets the ranks talk."""
    model.set_requires_gradient_sync(False)
    first = loss(model, 2 * step)
    first.backward()
    model.set_requires_gradient_sync(True)
    second = loss(model, 2 * step + 1)
    second.backward()
    return first.detach() + second


def check_accumulation(rank: int, mesh: DeviceMesh, example: models.Example) -> None:
    sharded = partial(shard, mesh=mesh)
    others: dict[str, Wrap] = {"policy": lambda model: sharded(under_policy(model))}
    compare(example, sharded, others, partial(accumulated, loss_of(example, rank)))


def check_ddp(rank: int, example: models.Example, **options: bool) -> None:
    def spread(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, **options)

    others: dict[str, Wrap] = {"policy": lambda model: spread(under_policy(model))}
    compare(example, spread, others, backward_of(loss_of(example, rank)))


def decided(model: nn.Module, run: Callable[..., Tensor]) -> dict[str, object]:
    train(model, run, steps=1)
    return policylang.report(model).to_json()


def check_decisions(rank: int, mesh: DeviceMesh, example: models.Example) -> None:
    """Sharding changes nothing of what is saved and recomputed."""
    run = backward_of(loss_of(example))
    alone = decided(under_policy(twin(example.module)), run)
    assert decided(shard(under_policy(twin(example.module)), mesh), run) == alone


def check_compiled(rank: int, mesh: DeviceMesh, *, everything: bool) -> None:
    """Each block compiled, its checkpoint around or inside: the compiler carries the policy out."""
    backend = policylang.backend(POLICY, inner="aot_eager")

    def compiled(model: nn.Module) -> nn.Module:
        torch.compiler.reset()
        for block in blocks_of(model):
            block.compile(backend=backend)
        return model

    def check(example: models.Example, make: Wrap, other: Wrap, run: Callable[..., Tensor]) -> None:
        compare(example, make, {"compiled": other}, run)
        recomputed = policylang.report(backend).recomputed
        assert recomputed.names

    mlp = models.mlp()
    sharded = partial(shard, mesh=mesh)
    accumulate, run = partial(accumulated, loss_of(mlp, rank)), backward_of(loss_of(mlp, rank))
    check(mlp, sharded, lambda model: compiled(under_policy(sharded(model))), accumulate)
    if everything:
        gpt2 = models.gpt2()
        check(gpt2, sharded, lambda model: sharded(compiled(under_policy(model))), backward_of(loss_of(gpt2, rank)))
        check(mlp, sharded, lambda model: sharded(compiled(wrapped(model))), accumulate)
        check(mlp, DistributedDataParallel, lambda model: DistributedDataParallel(compiled(under_policy(model))), run)


def check_two(rank: int, everything: bool) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    check_fsdp(rank, mesh, models.gpt2(), () if everything else ("by the model's switch",))
    check_fsdp(rank, mesh, models.mlp(), ("checkpointed, then sharded", "in torch's wrapper, then sharded"))
    check_decisions(rank, mesh, models.mlp())
    check_accumulation(rank, mesh, models.mlp())
    example = models.gpt2() if everything else models.mlp()
    check_ddp(rank, example, static_graph=True, gradient_as_bucket_view=True)
    check_compiled(rank, mesh, everything=everything)


def check_four(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    some = ("checkpointed, then sharded", "by the model's switch")
    check_fsdp(rank, mesh, models.llama(), some, mp_policy=half, reshard_after_forward=False)
    check_ddp(rank, models.mlp())


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_ranks_compute_the_same_bits(everything: bool) -> None:
    run_ranks(check_two, 2, everything)


@pytest.mark.slow
def test_four_ranks_compute_the_same_bits() -> None:
    run_ranks(check_four, 4)
