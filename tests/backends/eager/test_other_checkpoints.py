"""Checkpoints of others around those of a policy, inside them and in their place, as trainers set them."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import checkpoint

import policylang
from policylang.errors import PolicyGraphError, PolicyWarning
from tests.backends.eager.test_observed import POLICY, Layer, Model, checkpointed, plainly
from tests.support import models
from tests.support.eager import differences, train


class Around(Model):
    """Checkpoints its blocks itself."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Around):
    reentrant = True


class Offloads(torch.autograd.Function):
    """Unsloth's checkpoint: the block's input waits on the host, and the block runs again in the backward."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x.to("cpu", non_blocking=True))
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.block(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


class Unsloth(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.layers:
            x = Offloads.apply(layer, x)
        return x


def wrapped(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Layer))
    return model


@pytest.mark.parametrize(
    ("kind", "wrap", "said"),
    [
        (Around, lambda model: model, r"the checkpoint of `layers\.0` \(Layer\) is inside another one"),
        (Reentrant, lambda model: model, r"`layers\.1` \(Layer\) runs with gradients only in the backward"),
        (Unsloth, lambda model: model, r"`layers\.1` \(Layer\) runs with gradients only in the backward"),
        (Model, wrapped, r"the checkpoint of `layers\.0` \(Layer\) is inside another one"),
    ],
)
def test_a_checkpoint_around_that_of_the_policy_is_named(kind: type[Model], wrap: Any, said: str) -> None:
    model = wrap(checkpointed(kind()))
    with pytest.warns(PolicyWarning, match=rf"{said}.*\(APL426\)") as caught:
        trained = train(model, plainly)
    assert differences(train(Model(), plainly), trained) == []
    assert sum("APL426" in str(each.message) for each in caught) == 1, "of all blocks once"
    assert sum("(APL426)" in warning for warning in policylang.report(model).warnings) == 1


class Inside(Layer):
    """As layers of Hugging Face: the class checkpoints its own forward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)


class InsideReentrant(Inside):
    reentrant = True


@pytest.mark.parametrize("kind", [Inside, InsideReentrant])
def test_a_block_all_of_which_runs_in_its_own_checkpoint_is_refused(kind: type[Layer]) -> None:
    model = checkpointed(Model(kind))
    with pytest.raises(PolicyGraphError, match=r"inside the policy's, runs all of `layers\.0`") as caught:
        plainly(model, 0)
    assert caught.value.diagnostics[0].code == "APL394"


def test_the_switch_of_a_trainer_beside_checkpoints_of_a_policy_is_refused() -> None:
    example = models.llama()
    inner: Any = example.module.model
    inner.gradient_checkpointing_enable()
    policylang.checkpoint_model(inner, "llama3_sac")
    for _ in range(2):
        with pytest.raises(PolicyGraphError, match="another checkpoint, inside the policy's"):
            example.module(*example.inputs)
        function = policylang.context_fn("llama3_sac", inner)
        inner.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": function})
    policylang.checkpoint_model(inner, None)
    example.module(*example.inputs).sum().backward()
    assert policylang.report(function).saved is not None


def test_a_switch_that_takes_the_place_of_the_function_is_named() -> None:
    example = models.llama()
    inner: Any = example.module.model
    function = policylang.context_fn("llama3_sac", inner)
    enable = inner.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": function})
    other = copy.deepcopy(inner)
    enable()  # as a trainer with the switch among its arguments
    with pytest.warns(PolicyWarning, match=r"none in a checkpoint with the policy's `context_fn` \(APL426\)"):
        example.module(*example.inputs).sum().backward()
    for subject in (inner, function):
        with pytest.raises(PolicyGraphError, match="none in a checkpoint with the policy's `context_fn`") as caught:
            policylang.report(subject)
        assert caught.value.diagnostics[0].code == "APL327"
    with warnings.catch_warnings():
        warnings.simplefilter("error", PolicyWarning)
        other(*example.inputs)
        policylang.context_fn(policylang.parse(POLICY), Model())
        inner.eval()(*example.inputs)
        with torch.no_grad():
            inner.train()(*example.inputs)
