"""What comes out runs in the order of the plan's schedule: read off the graphs of every path, node by node."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import policylang
from policylang.backends.flat.path import apply_flat
from policylang.backends.half.path import plan_half
from policylang.backends.joint.partitioner import JointPartitioner, Partition
from policylang.backends.surgery.edits import carry_out
from policylang.graph.facts import GraphKind
from policylang.graph.reading.collect import collect
from policylang.planning.schedule.steps import StepKind
from tests.support.carried_out import flat_steps, half_steps, planned_half
from tests.support.flat_graphs import Flat, copy_graph, flat_graph
from tests.support.joint import Joint, capture_joint
from tests.support.models import ZOO
from tests.support.random_flat import random_flat
from tests.support.random_joint import random_joint
from tests.support.shared_graphs import BACKWARD, JOINT, ONE_DEVICE, shared_graph

BLOCKS = "optional recompute everything in block; optional save everything in block where crosses block"
POLICIES = (
    "undecided -> save",
    "optional recompute everything; undecided -> save",
    f"{BLOCKS}; undecided -> save",
    "undecided -> save; optional offload everything",
    "optional recompute everything; optional offload mm, addmm, gelu, convolution; undecided -> save",
)
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
    plan = apply_flat(gm, policylang.parse(text)).plan
    assert flat_steps(gm.graph, plan.facts) == plan.schedule.names(plan.facts)


@pytest.mark.parametrize("text", [*POLICIES, "optional save matmul; undecided -> auto"])
@pytest.mark.parametrize("model", ["llama", "bart", "gpt2", "resnet", "mlp", "flex", "dropout", "aliased_output"])
def test_the_halves_of_models(model: str, text: str) -> None:
    captured = joint(model)
    if model == "aliased_output" and "block" in text:
        return
    partition = JointPartitioner(policylang.parse(text)).partition(
        copy_graph(captured.gm),
        num_fwd_outputs=captured.num_fwd_outputs,
        static_lifetime_input_indices=captured.static_lifetime_input_indices,
    )
    assert_halves_in_order(partition)


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("model", ["llama", "gpt2", "resnet", "dropout", "mlp"])
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


@pytest.mark.parametrize("text", ["undecided -> recompute", "undecided -> save; optional offload mm"])
@pytest.mark.parametrize("name", [JOINT, ONE_DEVICE])
def test_the_halves_of_recorded_graphs(name: str, text: str) -> None:
    gm = shared_graph(name)
    for node in gm.graph.nodes:
        node.meta.pop("recompute", None)
    assert_halves_in_order(JointPartitioner(policylang.parse(text)).partition(gm, num_fwd_outputs=1))


def test_a_half_that_is_handed_over_keeps_its_order_but_for_what_is_rewritten() -> None:
    gm = shared_graph(BACKWARD)
    plan = plan_half(collect(gm, kind=GraphKind.BACKWARD), policylang.parse("optional fuse all_gather chains"))
    carry_out(gm, plan)
    ran = [node.name for node in gm.graph.nodes if node.op == "call_function"]
    assert plan.rewrites.done
    assert [name for _, name, _ in plan.schedule.names(plan.facts)] == ran
