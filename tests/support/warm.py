"""Run once in the process that ranks are forked from: what torch and policylang set up at their first trace."""

import torch
from torch import nn

import policylang
import tests.support.unwatched  # noqa: F401


def _warm() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    batch = torch.ones(2, 4)
    policy = policylang.parse("recompute everything\noptional save mm\nundecided -> save\n")
    policylang.trace_step(model, lambda model, x: model(x).square().mean(), batch).apply(policy)
    step = torch.compile(model, backend=policylang.backend(policy, inner="aot_eager"))
    step(batch).sum().backward()
    torch._dynamo.reset()


if not torch.backends.cuda.is_built():  # a build for CUDA starts threads of autograd's, with which nothing is forked
    _warm()
