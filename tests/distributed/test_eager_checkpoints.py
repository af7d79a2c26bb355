"""Eager checkpoints under a policy on real ranks, whatever shards them or communicates within: the same bits."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import policylang
from policylang.errors import PolicyGraphError
from tests.support import models
from tests.support.eager import POLICY, Loss, backward_of, blocks_of, differences, loss_of, train, twin
from tests.support.rank_cases import Net, Plain, batch
from tests.support.ranks import run_ranks
from tests.support.versions import needs_checkpoints_of_sharded_layers

Wrap = Callable[[nn.Module], nn.Module]
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


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
    some = ("checkpointed, then sharded", "by the model's switch")
    check_fsdp(rank, mesh, models.llama(), some, mp_policy=HALF, reshard_after_forward=False)
    check_ddp(rank, models.mlp())


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
def test_two_ranks_compute_the_same_bits(everything: bool) -> None:
    run_ranks(check_two, 2, everything)


@pytest.mark.slow
def test_four_ranks_compute_the_same_bits() -> None:
    run_ranks(check_four, 4)


SAVES_ALL = "undecided -> save"
POLICIES = (
    SAVES_ALL,
    "recompute everything in block",
    "undecided -> recompute\nsave addmm, mm",
    "offload everything in block",
)
STEPS = 2


def _run(rank: int) -> Callable[[nn.Module, int], Tensor]:
    def loss(model: nn.Module, step: int) -> Tensor:
        return model(batch() + step + rank).float().square().mean()

    return backward_of(loss)


def _sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer.up, mesh=mesh, **options)
        fully_shard(layer.down, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _sharded_ahead(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The gathers of each layer start in the one before it, in both directions."""
    _sharded(model, mesh)
    order = [part for layer in model.layers for part in (layer.up, layer.down)]
    for one, other in pairwise(order):
        one.set_modules_to_forward_prefetch([other])
        other.set_modules_to_backward_prefetch([one])
    return model


def _parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def _sharded_and_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return _sharded(_parallel(model, mesh["tp"]), mesh["dp"])


def _same_bits(
    rank: int, name: str, make: Callable[[], nn.Module], change: Wrap, policies: Sequence[str] = POLICIES
) -> None:
    """Whichever comes first, and whatever is saved."""
    expected = train(change(make()), _run(rank), STEPS)
    for text in policies:
        policy = policylang.parse(text)
        orders = {
            "checkpointed first": lambda policy=policy: change(
                policylang.checkpoint_model(make(), policy, strict=True)
            ),
            "checkpointed last": lambda policy=policy: policylang.checkpoint_model(change(make()), policy, strict=True),
        }
        for order, checkpointed in orders.items():
            model = checkpointed()
            assert differences(expected, train(model, _run(rank), STEPS)) == [], (name, text, order)
            audit = policylang.report(model).audit
            assert audit.differences == (), (name, text, order)


def _every_way_of_fsdp(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    changes: dict[str, Wrap] = {
        "as it comes": partial(_sharded, mesh=mesh),
        "kept for the backward": partial(_sharded, mesh=mesh, reshard_after_forward=False),
        "in half precision": partial(_sharded, mesh=mesh, mp_policy=HALF),
        "fetched ahead": partial(_sharded_ahead, mesh=mesh),
        "kept on the host": partial(_sharded, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    }
    for dp, tp in ((2, 1), (1, 2)):
        both = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        changes[f"{dp} x {tp}, with tensor parallelism"] = partial(_sharded_and_parallel, mesh=both)
    for name, change in changes.items():
        _same_bits(rank, name, Plain, change)


def _gathers_are_not_the_blocks(rank: int, mesh: DeviceMesh) -> None:
    """What is saved is what is saved without FSDP."""
    policy = policylang.parse(SAVES_ALL)
    alone, inside = (policylang.checkpoint_model(Plain(), policy) for _ in range(2))
    _sharded(inside, mesh)
    for model in (alone, inside):
        train(model, _run(rank), STEPS)
    reports = [policylang.report(model) for model in (alone, inside)]
    saved = [[name for name in report.saved.names if "view" not in name] for report in reports]  # those of its hooks
    assert saved[0] == saved[1] != []
    assert not any("gather" in name for report in reports for name in (*report.saved.names, *report.recomputed.names))


def _the_first_fsdp(rank: int) -> None:
    model = policylang.checkpoint_model(Plain(), policylang.parse(SAVES_ALL))
    for layer in model.layers:
        layer.up = FullyShardedDataParallel(layer.up, device_id=torch.device("cpu"))
    with pytest.raises(PolicyGraphError, match=r"layers\.0\.up.*FullyShardedDataParallel") as refused:
        model(batch())
    assert refused.value.diagnostics[0].code == "APL394"


def _what_runs_inside_an_operator(rank: int) -> None:
    """A product waits for its weight itself: where it is saved, nothing waits again, and the wait is no value."""
    done = {}
    for text in (SAVES_ALL, "undecided -> recompute"):
        model = policylang.checkpoint_model(Net([dist.group.WORLD] * 2), policylang.parse(text))
        train(model, _run(rank), 1)
        report = policylang.report(model)
        done[text] = " ".join(report.saved.names), " ".join(report.recomputed.names)
    saved, recomputed = done[SAVES_ALL]
    assert "all_gather" in saved
    assert "wait" not in saved + recomputed
    assert "wait" in done["undecided -> recompute"][1]


def _inside(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    _same_bits(rank, "fetched ahead", Plain, partial(_sharded_ahead, mesh=mesh), POLICIES[2:])
    _gathers_are_not_the_blocks(rank, mesh)
    _the_first_fsdp(rank)
    _same_bits(rank, "tensor parallel", Plain, partial(_parallel, mesh=mesh), POLICIES[1::2])
    _same_bits(rank, "gathered", lambda: Net([dist.group.WORLD] * 2), lambda model: model)
    _what_runs_inside_an_operator(rank)


@needs_checkpoints_of_sharded_layers
def test_blocks_that_communicate_compute_the_same_bits() -> None:
    run_ranks(_inside, 2)


@pytest.mark.slow
def test_blocks_under_every_way_of_fsdp_compute_the_same_bits() -> None:
    run_ranks(_every_way_of_fsdp, 2)
