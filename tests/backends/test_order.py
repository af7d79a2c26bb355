"""What comes out runs in the order of the plan's schedule: read off the graphs of every path, node by node."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import policylang
from policylang.backends.eager.checkpoint import sessions_of
from policylang.backends.flat import FlatPath
from policylang.backends.joint import JointPartitioner, Partition
from policylang.graph.schedule import StepKind
from tests.support.carried_out import flat_steps, half_steps, planned_half
from tests.support.flat_graphs import Flat, copy_graph, flat_graph
from tests.support.joint import Joint, capture_joint
from tests.support.models import ZOO
from tests.support.random_flat import random_flat
from tests.support.random_joint import random_joint
from tests.support.shared_graphs import JOINT, ONE_DEVICE, shared_graph

BLOCKS = "optional recompute everything in block; optional save everything in block where crosses block"
POLICIES = (
    "undecided -> save",
    "optional recompute everything; undecided -> save",
    f"{BLOCKS}; undecided -> save",
    "undecided -> save; optional offload everything",
    "optional recompute everything; optional offload mm, addmm, gelu, convolution; undecided -> save",
)


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


numbers = st.lists(st.integers(0, 63), min_size=12, max_size=150)
drawn_rules = st.sampled_from(
    [
        "undecided -> save\noptional recompute everything",
        "undecided -> save\noptional offload everything",
        "undecided -> save\noptional recompute sin, mul, getitem, frexp, native_dropout\noptional offload mm, t, cos",
        "undecided -> save\noptional recompute everything\noptional offload mul, frexp, native_dropout",
    ]
)
drawing = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@cache
def joint(model: str) -> Joint:
    return capture_joint(*ZOO[model]())


@cache
def flat(model: str) -> Flat:
    return flat_graph(ZOO[model]())


def assert_halves_in_order(partition: Partition) -> None:
    facts, schedule = partition.plan.facts, partition.schedule
    assert schedule is not None
    for half, backward in ((partition.forward, False), (partition.backward, True)):
        assert half_steps(half.graph, facts, backward=backward) == planned_half(schedule, facts, backward=backward)


def assert_flat_in_order(gm: fx.GraphModule, text: str) -> None:
    plan = FlatPath().apply(gm, policylang.parse(text)).plan
    assert flat_steps(gm.graph, plan.facts) == plan.schedule.names(plan.facts)


@pytest.mark.parametrize("text", [*POLICIES, "optional save matmul; undecided -> auto"])
@pytest.mark.parametrize(
    "model", ["llama", "resnet", "mlp", "flex", *map(slow, ("bart", "gpt2", "mixtral", "dropout"))]
)
def test_the_halves_of_models(model: str, text: str) -> None:
    captured = joint(model)
    partition = JointPartitioner(policylang.parse(text)).partition(
        copy_graph(captured.gm),
        num_fwd_outputs=captured.num_fwd_outputs,
        static_lifetime_input_indices=captured.static_lifetime_input_indices,
    )
    assert_halves_in_order(partition)


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("model", ["llama", "resnet", "mlp", *map(slow, ("bart", "gpt2", "dropout"))])
def test_flat_graphs_of_models(model: str, text: str) -> None:
    assert_flat_in_order(copy_graph(flat(model).gm), text)


@given(numbers, drawn_rules, st.integers(2, 6))
@drawing
def test_random_flat_graphs(drawn: list[int], text: str, segments: int) -> None:
    assert_flat_in_order(random_flat(drawn, segments).gm, text)


@given(numbers, drawn_rules)
@drawing
def test_the_halves_of_random_graphs(drawn: list[int], text: str) -> None:
    partition = JointPartitioner(policylang.parse(text)).partition(random_joint(drawn), num_fwd_outputs=1)
    for half in (partition.forward, partition.backward):
        half.graph.lint()
    assert_halves_in_order(partition)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (JOINT, "undecided -> recompute"),
        (ONE_DEVICE, "undecided -> save; optional offload mm"),
        slow(JOINT, "undecided -> save; optional offload mm"),
        slow(ONE_DEVICE, "undecided -> recompute"),
    ],
)
def test_the_halves_of_recorded_graphs(name: str, text: str) -> None:
    gm = shared_graph(name)
    for node in gm.graph.nodes:
        node.meta.pop("recompute", None)
    assert_halves_in_order(JointPartitioner(policylang.parse(text)).partition(gm, num_fwd_outputs=1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).sin().exp()
        return self.second(hidden.cos().sigmoid()) * hidden


class Ran(TorchDispatchMode):
    """Notes what runs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_eager_block_runs_again_in_its_own_order() -> None:
    block, x = Block(), torch.randn(2, 4, requires_grad=True)
    contexts = policylang.context_fn(policylang.parse("recompute everything; save addmm"), block)

    def run() -> Tensor:
        found = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        assert isinstance(found, Tensor)
        return found

    for first_time in (True, False):
        output = run()
        with Ran() as ran:
            output.sum().backward()
        (plan,) = [
            kept.instructions.plan
            for session in sessions_of(block)
            for region in session.regions.values()
            for kept in region.kept.values()
        ]
        again = [plan.facts.targets[row] for row in plan.schedule.rows_of(StepKind.SECOND_RUN)]
        own = {"aten.sin.default", "aten.exp.default", "aten.cos.default", "aten.sigmoid.default"}
        assert [name for name in again if name in own] == sorted(own, key=again.index)
        seen = ran.names[: ran.names.index("aten.sigmoid.default") + 1]
        assert [name for name in seen if name in own] == [name for name in again if name in own], first_time
