"""Small models and losses that these tests share, and a step as eager PyTorch takes it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from policylang import TracedStep, trace_step
from policylang.graph import marks
from tests.support.models import Example


def loss_of(example: Example) -> Callable[..., Tensor]:
    return lambda model, *inputs: example.loss_fn(model(*inputs))


def trace(example: Example) -> TracedStep:
    return trace_step(example.module, loss_of(example), *example.inputs)


def eager_step(model: nn.Module, loss_fn: Callable[..., Tensor], *batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    for parameter in model.parameters():
        parameter.grad = None
    loss = loss_fn(model, *batch)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


def twin(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def phase(node: fx.Node) -> str | None:
    return marks.custom(node.meta).get(marks.PHASE)


def calls(step: TracedStep, *targets: Any) -> list[fx.Node]:
    return [node for node in step.gm.graph.nodes if node.op == "call_function" and node.target in targets]


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def net(width: int = 8) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(width), torch.randn(4, width)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()
