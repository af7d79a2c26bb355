"""A policy keeps nothing out of CUDA graphs: what its halves run can be captured wherever the traced step can.

Without a GPU: which nodes cannot be captured is Inductor's own account. How a GPU replays them is in ``tests/gpu``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch import partitioners
from torch._inductor.utils import get_first_incompatible_cudagraph_node

import policylang
from policylang.torch_compat import eager
from tests.support import models
from tests.support.joint import Joint, capture_joint

RECOMPUTE = "recompute everything\noptional save matmul"


def halves(joint: Joint, text: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    return policylang.partition(
        joint.gm,
        joint.joint_inputs,
        num_fwd_outputs=joint.num_fwd_outputs,
        static_lifetime_input_indices=joint.static_lifetime_input_indices,
        policy=policylang.parse(text),
    )


def not_captured(*graphs: fx.GraphModule) -> list[str]:
    return [str(node.target) for each in graphs if (node := get_first_incompatible_cudagraph_node(each)) is not None]


@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.slow), "resnet"])
def test_halves_can_be_captured_where_the_step_can(name: str) -> None:
    joint = capture_joint(*models.ZOO[name]())
    assert not_captured(joint.gm) == []
    assert not_captured(*halves(joint, RECOMPUTE)) == []


@pytest.mark.parametrize("safe", [True, False])
def test_random_numbers_are_drawn_again_by_a_generator_that_a_capture_knows(
    safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the state is a generator that both halves are given. A CPU has none such: its state is a
    tensor that is read as the step runs, which no capture allows."""
    joint = capture_joint(*models.ZOO["dropout"]())
    if safe:
        if not hasattr(partitioners, "supports_graphsafe_rng"):
            pytest.skip("this torch asks for CUDA itself")
        made = partitioners.apply_graphsafe_rng_functionalization

        def as_numbered(*arguments: object) -> object:  # a GPU has a number
            return made(*(torch.device("cpu", 0) if isinstance(each, torch.device) else each for each in arguments))

        monkeypatch.setattr(partitioners, "supports_graphsafe_rng", lambda _device: True)
        monkeypatch.setattr(partitioners, "get_default_generator", lambda _device: torch.Generator())
        monkeypatch.setattr(partitioners, "apply_graphsafe_rng_functionalization", as_numbered)
    forward, backward = halves(joint, "recompute everything")
    assert not_captured(forward, backward) == ([] if safe else ["run_and_save_rng_state", "run_with_rng_state"])
    given = [
        sum(isinstance(node.meta.get("val"), torch.Generator) for node in half.graph.find_nodes(op="placeholder"))
        for half in (forward, backward)
    ]
    assert given[0] == given[1]
    assert bool(given[0]) == safe


def test_an_eager_checkpoint_reads_no_generator_where_nothing_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture allows no reading of a generator, and torch's own checkpoint does it unless it is told not to."""

    def refused(*_arguments: object) -> Tensor:
        raise AssertionError("a generator is read")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    model = Model()
    policylang.checkpoint_model(model, policylang.parse("recompute everything"), preserve_rng_state=False)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        for module, name in ((torch, "get_rng_state"), (eager, "default_generator")):
            monkeypatch.setattr(module, name, refused)
