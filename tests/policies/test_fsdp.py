"""`fsdp`, on a model whose weights are sharded and gathered, as one rank of four sees it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

import policylang
from tests.support.joint import capture_joint

RANKS = 4


@pytest.fixture
def four_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


class Sharded(nn.Module):
    """A linear layer that holds a quarter of its weight, cast and gathered for each use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.randn(width // RANKS, width))

    def forward(self, x: Tensor) -> Tensor:
        weight = functional.all_gather_tensor(self.shard.to(torch.bfloat16), 0, dist.group.WORLD)
        return torch.sin(x @ weight.t())


class Model(nn.Module):
    def __init__(self, layers: int = 2, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sharded(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def gathers(gm: torch.fx.GraphModule) -> int:
    return sum("all_gather_into_tensor" in str(node.target) for node in gm.graph.nodes)


@pytest.mark.parametrize("before", ["save everything", "recompute everything", "save mm"])
def test_each_weight_is_gathered_again_whatever_stands_before(four_ranks, before):
    inputs = (torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True),)
    joint = capture_joint(Model(), inputs, lambda out: out.float().sum())
    assert gathers(joint.gm) == 2
    policy = policylang.parse(f"{before}\ninclude <fsdp>\n")
    forward, backward = policylang.partition(
        joint.gm,
        joint.joint_inputs,
        num_fwd_outputs=joint.num_fwd_outputs,
        static_lifetime_input_indices=joint.static_lifetime_input_indices,
        policy=policy,
    )
    assert (gathers(forward), gathers(backward)) == (2, 2)
    report = policylang.report(forward)
    assert report.rules[-1].text == "must_recompute fsdp_gather"
    line = {name for name, decision in report.decisions.items() if decision.rule == report.rules[-1].source}
    operators = {str(node.target) for node in joint.gm.graph.nodes if node.name in line}
    assert {"aten._to_copy.default", "_c10d_functional.wait_tensor.default", "aten.t.default"} <= operators
    assert line.isdisjoint(report.saved.names)
