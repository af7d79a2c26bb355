"""A policy under CUDA graphs: what is replayed gives the bits of what runs without them."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import policylang

POLICIES = ["recompute everything", "recompute everything; save matmul"]


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("name", ["llama", "dropout"])
def test_compiled_the_halves_are_captured_and_give_the_same_bits(on_cuda, name: str, text: str):
    module, inputs, loss_fn = on_cuda(name)
    policy = policylang.parse(text.replace("save", "optional save"))
    found = []
    for options in ({}, {"triton.cudagraphs": True}):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(module, backend=policylang.backend(policy), options=options)
        torch.manual_seed(0)
        steps: list[torch.Tensor] = []
        for _ in range(4):  # the first warms up, the second records, the others replay
            torch.compiler.cudagraph_mark_step_begin()
            module.zero_grad()
            loss = loss_fn(compiled(*inputs))
            loss.backward()
            gradients = [each.grad for each in module.parameters() if each.grad is not None]
            steps += [each.detach().clone() for each in (loss, *gradients)]
        assert not counters["inductor"]["cudagraph_skips"]
        found.append(steps)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("text", POLICIES)
def test_a_step_with_eager_checkpoints_is_captured_and_replayed(on_cuda, text: str):
    """Nothing here draws random numbers; torch's own checkpoint reads the generators unless it is told not to."""
    module, inputs, loss_fn = on_cuda("llama")
    parameters = [each for each in module.parameters() if each.requires_grad]

    def step() -> tuple[torch.Tensor, ...]:
        loss = loss_fn(module(*inputs))
        return loss, *torch.autograd.grad(loss, parameters)

    policylang.checkpoint_model(module, policylang.parse(text), preserve_rng_state=False)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):  # the first call of a block is watched, what is captured follows its plan
            wanted = [each.detach().clone() for each in step()]
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for each in captured:
        each.detach().zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, wanted))
