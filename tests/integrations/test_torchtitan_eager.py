"""A policy as the activation checkpointing of TorchTitan's eager trainer, applied as its `parallelize` functions do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policylang
from policylang.errors import PolicyMeaningError
from tests.support.titan import graph_trainer, model_of, tokens_and_labels


def policy_ac() -> Any:
    graph_trainer("common_utils")  # TorchTitan, or a skip
    from policylang.integrations.torchtitan_eager import PolicyAC

    return PolicyAC


def step(model: nn.Module) -> tuple[list[Tensor], int]:
    """Loss and gradients; and the bytes that autograd itself holds for the backward."""
    tokens, labels = tokens_and_labels()
    held: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        logits = model(tokens)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [loss.detach(), *gradients], sum(held.values())


@pytest.mark.parametrize("policy", ["torchtitan_op_sac", "torchtitan_full"])
def test_a_step_gives_the_same_numbers(policy: str):
    config = policy_ac().Config(policy=policy)
    plain, checkpointed = model_of(2), model_of(2)
    names = [name for name, _ in checkpointed.named_parameters()]
    config.build(dump_folder="").apply(checkpointed)
    assert [name for name, _ in checkpointed.named_parameters()] == names
    expected, all_held = step(plain)
    found, held = step(checkpointed)
    assert len(expected) == len(names) + 1
    assert all(map(torch.equal, found, expected))
    assert held < all_held
    report = policylang.report(checkpointed)
    assert report.audit.agrees
    assert len(report.recomputed) > 50


def test_options_that_would_have_no_effect_are_refused_by_name():
    config = policy_ac().Config(policy="torchtitan_full", debug=True)
    with pytest.raises(PolicyMeaningError, match="the option `debug` has no effect"):
        config.build().apply(model_of(2))


def test_a_policy_that_means_nothing_is_refused(tmp_path):
    path = tmp_path / "mine.apl"
    path.write_text("save mmm\n")
    with pytest.raises(PolicyMeaningError, match="mmm"):
        policy_ac().Config(policy=str(path)).build().apply(model_of(2))
