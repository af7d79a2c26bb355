"""Training steps as bits: what a model gives without checkpoints, with plain ones, and under a policy, to be compared.

Of every step: the loss, the gradients (of a sharded parameter this rank's part), and the state that the generator of
random numbers is left in.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import policylang
from tests.support import models

POLICY = policylang.parse("recompute everything in block; save matmul in block; recompute every 2nd matmul per block")
"""Of any model of the zoo with blocks: half of its products are saved, what draws random numbers is recomputed."""

Loss = Callable[[nn.Module, int], Tensor]
"""From a model and the number of a batch to a scalar."""


@frozen(eq=False)
class Step:
    loss: Tensor
    gradients: dict[str, Tensor]
    generator: Tensor


def loss_of(example: models.Example, rank: int = 0) -> Loss:
    """The loss of the example on batches of their own: tokens that differ from batch to batch and from rank to rank."""

    def loss(model: nn.Module, batch: int) -> Tensor:
        inputs = [
            (tensor + batch + 7 * rank) % models.VOCABULARY if not tensor.is_floating_point() else tensor + batch
            for tensor in example.inputs
        ]
        return example.loss_fn(model(*inputs))

    return loss


def backward_of(loss: Loss, within: AbstractContextManager[Any] | None = None) -> Callable[[nn.Module, int], Tensor]:
    """Forward and backward of a batch; the forward ``within`` a context."""

    def run(model: nn.Module, batch: int) -> Tensor:
        with within or nullcontext():
            value = loss(model, batch)
        value.backward()
        return value

    return run


def train(model: nn.Module, run: Callable[[nn.Module, int], Tensor], steps: int = 2) -> list[Step]:
    """Plain SGD; ``run`` does forward and backward of a step and returns the loss."""
    done = []
    for number in range(steps):
        torch.manual_seed(number)
        loss = run(model, number).detach().clone()
        gradients = {own_name(name): local(tensor.grad) for name, tensor in model.named_parameters()}
        done.append(Step(loss, gradients, torch.get_rng_state()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
        model.zero_grad()
    return done


def differences(one: Iterable[Step], other: Iterable[Step]) -> list[str]:
    """The names of what is not the same to the last bit."""
    found = []
    for number, (left, right) in enumerate(zip(one, other, strict=True)):
        assert left.gradients.keys() == right.gradients.keys()
        assert any(gradient.any() for gradient in left.gradients.values()), "nothing is compared"
        if not torch.equal(left.loss, right.loss):
            found.append(f"loss of step {number}")
        if not torch.equal(left.generator, right.generator):
            found.append(f"generator after step {number}")
        found += [
            f"gradient of {name} in step {number}"
            for name, gradient in left.gradients.items()
            if not torch.equal(gradient, right.gradients[name])
        ]
    return found


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The members of its largest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len))


def plainly_checkpointed(model: nn.Module, **options: Any) -> nn.Module:
    """Each block under torch's own checkpoint, which recomputes all of it."""
    for block in blocks_of(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return model


def own_name(name: str) -> str:
    """A parameter's name without what wrappers add to it."""
    wrappers = ("_orig_mod", "_checkpoint_wrapped_module", "module")
    return ".".join(part for part in name.split(".") if part not in wrappers)


def local(tensor: Tensor | None) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()
