"""Shares in eager: of the blocks of the whole model, though each is planned on its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import policylang
from policylang.errors import PolicyMatchError

TEXT = """
blocks layers.*
recompute everything in block
save mm in first half of blocks
save activation in last 40% of blocks
expect saved per block <= 60% of forward
expect recomputed operators per block <= 100%
expect exactly 1 activation per block
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trained(blocks: int, text: str) -> nn.Module:
    model = policylang.checkpoint_model(Stack(blocks), policylang.parse(text))
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    return model


@pytest.mark.parametrize(("blocks", "halves", "last"), [(5, 2, 2), (4, 2, 1), (3, 1, 1)])
def test_shares_are_of_the_blocks_of_the_model(blocks: int, halves: int, last: int) -> None:
    report = policylang.report(trained(blocks, TEXT))
    assert [rule.matched for rule in report.rules[1:]] == [2 * halves, last]
    assert {each.status for each in report.expectations} == {"held"}


def test_a_share_of_one_block_is_none() -> None:
    with pytest.raises(PolicyMatchError, match=r"`first half of blocks` of .* is no block: this graph has 1 block"):
        trained(1, TEXT)


def test_a_share_of_the_whole_forward_is_deferred() -> None:
    report = policylang.report(trained(3, TEXT + "expect saved <= 1% of forward\n"))
    assert "deferred" in {each.status for each in report.expectations}
    assert any("APL391" in found for found in report.warnings)
