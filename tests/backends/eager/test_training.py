"""What training does around a block: dropout, autocast, micro-batches, several backwards. Under a policy the bits are
those of the model without any checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import policylang
from policylang.language.syntax import Policy
from tests.support import eager, models

RECOMPUTE = policylang.parse("recompute everything in block")
SAVE = policylang.parse("save everything in block")
POLICIES = {
    "half of the products": eager.POLICY,
    "recompute": RECOMPUTE,
    "save": SAVE,
    "save random": policylang.parse("recompute everything in block; save random in block"),
}


def cast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def compare(
    example: models.Example, run: Callable[[nn.Module, int], Tensor], policy: Policy = eager.POLICY, plain: bool = True
) -> None:
    """Without checkpoints, with torch's own, and under the policy."""
    expected = eager.train(eager.twin(example.module), run)
    if plain:
        assert (
            eager.differences(expected, eager.train(eager.plainly_checkpointed(eager.twin(example.module)), run)) == []
        )
    under_policy = policylang.checkpoint_model(eager.twin(example.module), policy)
    assert eager.differences(expected, eager.train(under_policy, run)) == []
    report = policylang.report(under_policy)
    assert report.decisions
    assert bool(report.recomputed.names) == (policy != SAVE)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_dropout_draws_the_same_numbers_again(policy: Policy) -> None:
    example = models.gpt2()
    compare(example, eager.backward_of(eager.loss_of(example)), policy)


@pytest.mark.parametrize("example", [models.gpt2(), models.llama(), models.qwen3()], ids=["gpt2", "llama", "qwen3"])
def test_autocast(example: models.Example) -> None:
    compare(example, eager.backward_of(eager.loss_of(example), cast()))


def two_forwards_first(loss: eager.Loss, model: nn.Module, step: int) -> Tensor:
    """What each block holds for two backwards at a time."""
    first, second = loss(model, 2 * step), loss(model, 2 * step + 1)
    second.backward()
    first.backward()
    return first + second


def one_after_the_other(loss: eager.Loss, model: nn.Module, step: int) -> Tensor:
    first = loss(model, 2 * step)
    first.backward()
    second = loss(model, 2 * step + 1)
    second.backward()
    return first + second


def summed(loss: eager.Loss, model: nn.Module, step: int) -> Tensor:
    total = loss(model, 2 * step) + loss(model, 2 * step + 1)
    total.backward()
    return total


def twice_through(loss: eager.Loss, model: nn.Module, step: int) -> Tensor:
    value = loss(model, step)
    value.backward(retain_graph=True)
    value.backward()
    return value


@pytest.mark.parametrize("run", [two_forwards_first, one_after_the_other, summed, twice_through])
def test_several_backwards_a_step(run: Callable[..., Tensor]) -> None:
    example = models.gpt2()
    compare(example, partial(run, eager.loss_of(example)))


def test_backward_under_autocast() -> None:
    """Torch advises against it, and it is common: the recomputation then finds the weights cast."""
    example = models.llama()

    def run(model: nn.Module, step: int) -> Tensor:
        with cast():
            value = loss(model, step)
            value.backward()
        return value

    loss = eager.loss_of(example)
    compare(example, run)


def under_one_autocast(loss: eager.Loss, model: nn.Module, step: int, cached: bool = False) -> Tensor:
    """Two micro-batches under one autocast."""
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
        total = loss(model, 2 * step) + loss(model, 2 * step + 1)
    total.backward()
    return total


@pytest.mark.parametrize("example", [models.gpt2(), models.shared_parameters()], ids=["gpt2", "a block used twice"])
def test_a_weight_used_twice_under_one_autocast(example: models.Example) -> None:
    """Every call of a block casts its weights itself, so that all calls run the same operators. The gradients are
    those of an autocast that remembers no casts: summed in float32, not in bfloat16."""
    loss = eager.loss_of(example)
    expected = eager.train(eager.twin(example.module), partial(under_one_autocast, loss))
    under_policy = policylang.checkpoint_model(eager.twin(example.module), eager.POLICY)
    found = eager.train(under_policy, partial(under_one_autocast, loss, cached=True))
    ours = [
        difference
        for difference in eager.differences(expected, found)
        if "layers." in difference or ".h." in difference
    ]
    assert ours == []


def test_batches_of_other_shapes_and_evaluation_in_between() -> None:
    example = models.gpt2()

    def run(model: nn.Module, step: int) -> Tensor:
        model.eval()
        with torch.no_grad():
            evaluated = example.loss_fn(model(example.inputs[0]))
        model.train()
        value = example.loss_fn(model(example.inputs[0][:, : 8 - 2 * step])) + 0 * evaluated
        value.backward()
        return value

    compare(example, run)


def test_frozen_weights() -> None:
    example = models.llama()
    for block in eager.blocks_of(example.module)[:1]:
        block.self_attn.requires_grad_(False)

    def run(model: nn.Module, step: int) -> Tensor:
        value = loss(model, step)
        value.backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return value

    loss = eager.loss_of(example)
    compare(example, run)


@pytest.mark.parametrize("policy", [eager.POLICY, RECOMPUTE], ids=["half of the products", "recompute"])
def test_dropout_without_preserve_rng_state(policy: Policy) -> None:
    """Torch's own checkpoint then draws other numbers in the recomputation; a policy sees to it itself."""
    example = models.gpt2()
    run = eager.backward_of(eager.loss_of(example))
    expected = eager.train(eager.twin(example.module), run)
    without = eager.plainly_checkpointed(eager.twin(example.module), preserve_rng_state=False)
    assert eager.differences(expected, eager.train(without, run)) != []
    under_policy = eager.twin(example.module)
    for block in eager.blocks_of(under_policy):
        context_fn = policylang.context_fn(policy, under_policy)
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn
        )
    assert eager.differences(expected, eager.train(under_policy, run)) == []
