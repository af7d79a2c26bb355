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


def test_blocks_that_are_compiled_as_torchtitan_compiles_them_follow_the_same_policy():
    """TorchTitan names a backend by a word; the policy is that of the checkpoints."""
    plain, compiled = model_of(2), model_of(2)
    policy_ac().Config(policy="torchtitan_op_sac").build(dump_folder="").apply(compiled)
    torch.compiler.reset()
    for block in compiled.layers.values():
        block.compile(backend="policylang", fullgraph=True, options={"inner": "aot_eager"})
    assert all(map(torch.equal, step(compiled)[0], step(plain)[0]))
    report = policylang.report(compiled)
    assert report.audit.agrees
    assert report.saved.names
    assert report.recomputed.names


class ThreeProducts(nn.Module):
    """A block of products of one, one and two units of work, and a sum: the last product's result is read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.third = nn.Linear(8, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x))).sum()


class OneBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": ThreeProducts()})

    def forward(self, x: Tensor) -> Tensor:
        return self.layers["0"](x)


def trained_once(config: Any) -> tuple[nn.Module, float]:
    """A model, and the work of the products that its backward runs, in products of 8 × 8 × 8."""
    model = OneBlock()
    config.build(dump_folder="").apply(model)
    loss = model(torch.randn(8, 8, requires_grad=True))
    with torch.profiler.profile(record_shapes=True) as profile:
        loss.backward()
    shapes = [event.input_shapes[:2] for event in profile.events() if event.name == "aten::mm"]
    return model, sum(rows * inner * columns for (rows, inner), (_, columns) in shapes) / 8**3


def test_full_checkpointing_runs_what_the_backward_reads_and_theirs_all_of_the_block():
    """TorchTitan's wrapper sets ``early_stop=False``: the last product runs again, which the backward never reads."""
    ours = policy_ac().Config(policy="torchtitan_full")
    from torchtitan.distributed.activation_checkpoint import FullAC

    assert trained_once(FullAC.Config())[1] == 8 + 4
    report = policylang.report(trained_once(ours)[0])
    assert report.audit.agrees
    assert report.recomputed.flops == (1 + 1) * 2 * 8**3


def test_options_that_would_have_no_effect_are_refused_by_name():
    config = policy_ac().Config(policy="torchtitan_full", debug=True)
    with pytest.raises(PolicyMeaningError, match="the option `debug` has no effect"):
        config.build().apply(model_of(2))


def test_a_policy_that_means_nothing_is_refused(tmp_path):
    path = tmp_path / "mine.apl"
    path.write_text("save mmm\n")
    with pytest.raises(PolicyMeaningError, match="mmm"):
        policy_ac().Config(policy=str(path)).build().apply(model_of(2))
