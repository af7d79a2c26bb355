"""Compilers without the policy around and inside an eager checkpoint: refused by name. Ours: `test_compiled_blocks`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import policylang
from tests.support import models
from tests.support.eager import POLICY, backward_of, blocks_of, differences, loss_of, train, twin

MEND = r"block\.compile\(backend=policylang\.backend"


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch.compiler.reset()


def checkpointed() -> nn.Module:
    return policylang.checkpoint_model(twin(models.mlp().module), POLICY)


def own_checkpoints() -> nn.Module:
    """As a user writes it: a checkpoint around each block, in the model's own code."""
    model = twin(models.mlp().module)
    context_fn = policylang.context_fn(POLICY, model)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = blocks_list(model)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=context_fn)
            return x

    return Model()


def blocks_list(model: nn.Module) -> nn.ModuleList:
    return nn.ModuleList(blocks_of(model))


AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "aot_eager": partial(torch.compile, backend="aot_eager"),
    "eager": partial(torch.compile, backend="eager"),
}


@pytest.mark.parametrize("make", [checkpointed, own_checkpoints])
@pytest.mark.parametrize("compiled", AROUND.values(), ids=AROUND)
def test_around_is_refused(make: Callable[[], nn.Module], compiled: Callable[[nn.Module], nn.Module]) -> None:
    loss = loss_of(models.mlp())
    with pytest.raises(Exception, match=r"APL396") as caught:
        loss(compiled(make()), 0).backward()
    assert caught.match("is compiled without a policy, and an eager checkpoint sees no operators of compiled code")
    assert caught.match(MEND)


def test_a_block_compiled_in_place_lies_around_its_checkpoint() -> None:
    model = checkpointed()
    blocks_of(model)[1].compile(backend="aot_eager")
    with pytest.raises(Exception, match="APL396"):
        loss_of(models.mlp())(model, 0)


def compiled_in_place(block: nn.Module) -> None:
    block.compile(backend="aot_eager")


def compiled_part(block: nn.Module) -> None:
    block.up = torch.compile(block.up, backend="aot_eager")


INSIDE = [(checkpointed, compiled_part), (own_checkpoints, compiled_part), (own_checkpoints, compiled_in_place)]


@pytest.mark.parametrize(("make", "compile_it"), INSIDE)
def test_inside_is_refused(make: Callable[[], nn.Module], compile_it: Callable[[nn.Module], None]) -> None:
    """Torch itself would run such a block without the compiler, and not say so."""
    model = make()
    compile_it(blocks_of(model)[1])
    with pytest.raises(policylang.PolicyGraphError, match=MEND) as caught:
        loss_of(models.mlp())(model, 0)
    assert [found.code for found in caught.value.diagnostics] == ["APL396"]
    assert "layers.1" in str(caught.value)


def test_a_compiled_part_outside_of_the_blocks_is_none_of_their_business() -> None:
    example = models.llama()
    run = backward_of(loss_of(example))

    def with_compiled_head() -> nn.Module:
        model = twin(example.module)
        model.model.lm_head = torch.compile(model.model.lm_head, backend="aot_eager")
        return model

    expected = train(with_compiled_head(), run)
    assert differences(expected, train(policylang.checkpoint_model(with_compiled_head(), POLICY), run)) == []


def test_a_part_that_is_compiled_after_the_first_step_is_refused_too() -> None:
    model, loss = checkpointed(), loss_of(models.mlp())
    loss(model, 0).backward()
    blocks_of(model)[1].up.compile(backend="aot_eager")
    with pytest.raises(policylang.PolicyGraphError, match=r"`layers\.1\.up` .* is a part of `layers\.1`"):
        loss(model, 1)
