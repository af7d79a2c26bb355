"""A partition's forward and backward traced into one graph and partitioned again, as under a parallelizer.

The first backward runs forward operators again, with the metadata of the nodes that they repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import nop
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_function

import policylang
from policylang.audit.report import Report
from tests.support.twice import keep_meta
from tests.support.versions import needs_marked_backwards

pytestmark = pytest.mark.usefixtures("nothing_compiled")

FIRST = "blocks layers.*\nrecompute everything\nsave everything in block where crosses block"
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(self.up(x).relu().sin())
        return x + hidden


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def split_by(text: str, reports: list[Report]) -> Callable[..., Any]:
    policy = policylang.parse(text)

    def split(gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        halves = policylang.partition(gm, joint_inputs, policy=policy, **options)
        reports.append(policylang.report(halves[0]))
        return halves

    return split


def twice(first: str, second: str) -> tuple[list[Report], list[Tensor | None]]:
    """The reports of both partitions, and the gradients of a step."""
    torch.manual_seed(0)
    reports: list[Report] = []
    compiled: list[Callable[..., Any]] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        split = split_by(first, reports)
        compiled.append(aot_autograd(fw_compiler=keep_meta, bw_compiler=keep_meta, partition_fn=split)(gm, inputs))
        return compiled[0]

    torch.compile(Blocks(), backend=backend)(torch.randn(WIDTH, WIDTH, requires_grad=True))
    arguments = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(7)]
    split = split_by(second, reports)
    again = aot_function(lambda *values: compiled[0](*values), fw_compiler=nop, bw_compiler=nop, partition_fn=split)
    (result,) = again(*arguments)
    result.sum().backward()
    return reports, [argument.grad for argument in arguments]


@needs_marked_backwards
@pytest.mark.parametrize("second", [FIRST, f"{FIRST}\nsave mm in block", "blocks layers.*\nsave sin in block"])
def test_what_the_first_backward_runs_again_is_no_forward_value(second: str) -> None:
    (before, after), found = twice(FIRST, second)
    assert after.forward_nodes == before.forward_nodes - 3  # what autograd kept of each relu is made in the backward
    assert after.blocks == 3
    if second == FIRST:
        assert after.rules[1].matched == before.rules[1].matched == 2
        assert after.saved.bytes == before.saved.bytes
    _, wanted = twice("save everything", "save everything")
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)
