"""Blocks that a step leaves out, or runs without a checkpoint: what is said of them, and of rules without a match."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import policylang
from policylang.errors import PolicyMatchError, PolicyWarning


class Block(nn.Module):
    def __init__(self, *, rounds: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8) if rounds else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.sin(self.up(x)))
        return x if self.norm is None else torch.cos(self.norm(x))


class Model(nn.Module):
    """``last``: whether the last block is of another kind."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(rounds=last and at == 3) for at in range(4))
        self.context_fn: object = None

    def step(self, blocks: Collection[int], without: Collection[int] = ()) -> None:
        """Train a step through some of the blocks, with a checkpoint of the user's around each but for ``without``."""
        x = torch.ones(2, 8, requires_grad=True)
        for at in blocks:
            if self.context_fn is None or at in without:
                x = self.layers[at](x)
            else:
                x = checkpoint(self.layers[at], x, use_reentrant=False, context_fn=self.context_fn)
        x.sum().backward()


def checkpointed(rules: str, *, last: bool = False) -> Model:
    return policylang.checkpoint_model(Model(last=last), policylang.parse(f"recompute everything in block\n{rules}"))


RULES = ["save bmm", "save addmm in block 9", "save addmm in layers.9", "save cos in last block"]


@pytest.mark.parametrize("blocks", [(0,), (0, 2), (1, 2, 3)])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_matches_nothing_is_told_when_the_first_backward_begins(rule: str, blocks: tuple[int, ...]) -> None:
    with pytest.raises(PolicyMatchError, match=f"`{rule}` matches nothing") as error:
        checkpointed(rule).step(blocks)
    assert f"{4 - len(blocks)} of 4 blocks" in str(error.value)


@pytest.mark.parametrize("rule", ["save addmm in block 3", "save addmm in layers.3", "save addmm in last block"])
def test_what_is_for_a_block_that_runs_later_is_no_error(rule: str) -> None:
    model = checkpointed(rule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.step((0, 1))
        assert "2 of 4 blocks have not run so far: layers.2–3" in str(policylang.report(model))
        model.step((0, 1, 2, 3))
    assert "blocks have" not in str(policylang.report(model))
    assert policylang.report(model).rules[1].matched == 2


def test_a_block_of_another_kind_is_waited_for() -> None:
    model = checkpointed("save cos", last=True)
    with pytest.warns(PolicyWarning, match=r"`save cos` matches nothing .* layers.3 has not run \(APL359\)"):
        model.step((0, 1))
    model.step((0, 1))
    model.step((2, 3))
    typo = checkpointed("save bmm", last=True)
    with pytest.warns(PolicyWarning, match="APL359"):
        typo.step((0, 1))
    with pytest.raises(PolicyMatchError, match="`save bmm` matches nothing"):
        typo.step((0, 1, 2, 3))


@pytest.mark.parametrize("rule", ["save addmm in block 1", "save addmm in every 2nd block"])
def test_what_is_trained_without_a_checkpoint_is_not_under_the_policy(rule: str) -> None:
    """As with Transformers' ``every_n_layers``."""
    found = []
    for rules in ("save addmm in block 2", rule):
        model = Model()
        model.context_fn = policylang.context_fn(policylang.parse(f"recompute everything in block\n{rules}"), model)
        found.append(model)
    found[0].step(range(4), without=(1, 3))
    said = "2 of 4 blocks have run without a checkpoint, and not under the policy: layers.1, 3"
    assert said in policylang.report(found[0]).notes
    with pytest.raises(PolicyMatchError, match=f"`{rule}` matches nothing") as error:
        found[1].step(range(4), without=(1, 3))
    assert said in str(error.value)


def test_an_error_on_the_way_into_a_recomputation_is_none_of_the_next_model() -> None:
    """As in Transformers, where the checkpoint lies in the block's own call."""
    for rule in ("save bmm", "save addmm in block 1"):
        model = Model()
        context_fn = policylang.context_fn(policylang.parse(f"recompute everything in block\n{rule}"), model)
        for at, block in enumerate(model.layers):
            if at not in (1, 3):
                block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=context_fn)
        with pytest.raises(PolicyMatchError, match=f"`{rule}` matches nothing"):
            model.step(range(4))
