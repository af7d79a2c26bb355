"""A traced step of a sharded model: DTensor parameters, gathered in the forward, gradients scattered back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

import policylang
from policylang import TracedStep, trace_step
from tests.support.ranks import run_ranks
from tests.tracing.test_against_eager import eager_step, mean_square, net, twin

RANKS = 2
c10d = torch.ops._c10d_functional


class Gather(nn.Module):
    """A parameter as its shards say it: gathered where it is used, its gradient scattered."""

    def forward(self, sharded: DTensor) -> Tensor:
        return sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def shard(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)]))
            module.register_parameter(name, sharded)
            parametrize.register_parametrization(module, name, Gather(), unsafe=True)
    return model


def count(step: TracedStep, target: Any) -> int:
    return sum(node.target is target for node in step.gm.graph.nodes)


def check_training(rank: int) -> None:
    model, x = net()
    x = x + rank
    model = shard(model)
    other = twin(model)
    step = trace_step(model, mean_square, x)
    assert count(step, c10d.all_gather_into_tensor.default) == 4
    assert count(step, c10d.reduce_scatter_tensor.default) == 4
    for _ in range(2):
        loss, gradients = step(x)
        eager_loss, eager_gradients = eager_step(other, mean_square, x)
        torch.testing.assert_close(loss, eager_loss)
        assert gradients.keys() == eager_gradients.keys()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                assert gradients[name].placements == eager_gradients[name].placements == (Shard(0),)
                torch.testing.assert_close(gradients[name].to_local(), eager_gradients[name].to_local())
                parameter.sub_(gradients[name], alpha=0.1)
            for name, parameter in other.named_parameters():
                parameter.sub_(eager_gradients[name], alpha=0.1)


def check_reshard_after_forward(rank: int) -> None:
    model, x = net()
    model = shard(model)
    step = trace_step(model, mean_square, x + rank)
    loss, gradients = step(x + rank)
    step.apply(policylang.parse("undecided -> save; must_recompute chain through all_gather where from parameter"))
    assert count(step, c10d.all_gather_into_tensor.default) == 5, "the second weight is gathered again, nothing else"
    again, gradients_again = step(x + rank)
    assert torch.equal(again, loss)
    for name, gradient in gradients.items():
        assert torch.equal(gradients_again[name].to_local(), gradient.to_local()), name


def check_optimizer(rank: int) -> None:
    model, x = net()
    model = shard(model)
    other = twin(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, other)]
    for each, optimizer in zip((model, other), optimizers, strict=True):
        eager_step(each, mean_square, x + rank)
        optimizer.step()
    step = trace_step(model, mean_square, x + rank, optimizer=optimizers[0])
    step(x + rank)
    eager_step(other, mean_square, x + rank)
    optimizers[1].step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.to_local(), two.to_local())


def check_all(rank: int) -> None:
    check_training(rank)
    check_reshard_after_forward(rank)
    check_optimizer(rank)


def test_two_ranks() -> None:
    run_ranks(check_all, RANKS)
