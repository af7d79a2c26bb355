"""Eager checkpoints in the settings of DDP and under the first FSDP, on two ranks: the bits are those without them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import policylang
from tests.support import models
from tests.support.eager import backward_of, blocks_of, differences, loss_of, train, twin
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

POLICY = (
    "recompute everything in block; optional save first matmul per block; optional save dropout in block; "
    "optional offload everything in block where crosses block; optional offload last 2 addmm per block"
)
DDP: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "a static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "own buffers": {"broadcast_buffers": False},
    "gradients in buckets": {"gradient_as_bucket_view": True},
}


def _checkpointed(model: nn.Module) -> nn.Module:
    return policylang.checkpoint_model(model, policylang.parse(POLICY), strict=True)


def _check(make: Callable[..., nn.Module], example: models.Example, rank: int, autocast: bool = False) -> None:
    within = torch.autocast("cpu", torch.bfloat16) if autocast else None
    run: Callable[[nn.Module, int], Tensor] = backward_of(loss_of(example, rank), within)
    expected = train(make(change=lambda model: model), run)
    model = make()
    assert differences(expected, train(model, run)) == []
    report = policylang.report(model)
    assert report.audit.differences == ()


def _ddp(example: models.Example, settings: dict[str, Any], change: Any = _checkpointed) -> nn.Module:
    return DistributedDataParallel(change(twin(example.module)), **settings)


def _fsdp(example: models.Example, settings: dict[str, Any], change: Any = _checkpointed) -> nn.Module:
    model = change(twin(example.module))
    kinds = ModuleWrapPolicy({type(block) for block in blocks_of(model)})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=kinds, device_id=device, **settings)


def _ddp_settings(rank: int) -> None:
    for settings in DDP.values():
        for example in (models.gpt2(), models.resnet()):
            _check(partial(_ddp, example, settings), example, rank)
        _check(partial(_ddp, models.gpt2(), settings), models.gpt2(), rank, autocast=True)


def _first_fsdp(rank: int) -> None:
    example = models.mlp()
    half = MixedPrecision(torch.bfloat16, torch.float32)
    for settings in ({}, {"mixed_precision": half}, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}):
        _check(partial(_fsdp, example, settings), example, rank)


def test_the_settings_of_ddp() -> None:
    run_ranks(_ddp_settings, 2)


def test_the_first_fsdp_around_checkpoints() -> None:
    run_ranks(_first_fsdp, 2)
