"""Every model of the zoo under policies that save, recompute and leave: the same step, bit by bit, as planned."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
import torch

from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.value_outcome import Why
from tests.support.compiled import assert_bitwise_equal
from tests.support.models import ZOO
from tests.support.run_partition import ONE_LAYER, assert_same_result, run_step, traced, unpartitioned

POLICIES = {
    "save all": "save everything",
    "recompute all": "optional recompute everything",
    "selective": """
        optional recompute everything
        optional save attention
        optional save mm, addmm
        optional recompute every 2nd mm
        optional save native_dropout
        """,
    "mixed with min-cut": "optional save mm, addmm; optional recompute add, mul, sin; undecided -> auto",
    "min-cut alone": "undecided -> auto",
}


LARGE = ("qwen3", "mixtral", "bart", "flex", "gpt2")
"""What sets them apart from a Llama and the small models shows in other fast tests, under one policy each."""


def some_slow(names: Iterable[str], slow: Container[str] = LARGE) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in names]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", some_slow(ZOO))
def test_computes_what_it_does_without_a_policy(model: str, policy: str) -> None:
    result = traced(model).run(POLICIES[policy])
    assert_same_result(unpartitioned(model), result)
    audit = result.audit
    assert audit.agrees
    if policy == "save all":
        assert audit.saved
        assert not audit.recomputed
    elif policy == "recompute all" and model != "counter":
        facts = result.partition.plan.facts
        kept = {facts.targets[facts.owners[facts.index[name]]] for name in audit.saved}
        assert kept == ({"aten.topk.default"} if model == "mixtral" else set())  # it is not chosen again
        assert audit.recomputed
    elif policy == "min-cut alone":
        plan = result.partition.plan
        decided = (plan.decisions[plan.facts.index[name]] for name in (*audit.saved, *audit.recomputed))
        assert all(decision is None or decision.why is Why.UNDECIDED for decision in decided)


@pytest.mark.parametrize("policy", ["save all", "recompute all", "selective"])
@pytest.mark.parametrize("model", some_slow(("llama", "mixtral", "gpt2", "resnet", "shared_parameters")))
def test_saves_what_the_plan_foresees(model: str, policy: str) -> None:
    partition = traced(model).partition(POLICIES[policy])
    foreseen = saved_and_recomputed(partition.plan)
    names = partition.plan.facts.names
    planned = {names[row] for row in foreseen.saved}
    assert set(partition.audit.saved) <= planned
    present = {node.name for half in (partition.forward, partition.backward) for node in half.graph.nodes}
    assert not (planned - set(partition.audit.saved)) & present, "only what was merged away may be missing"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", some_slow(ONE_LAYER, {"llama", "gpt2"}))
def test_dynamic_batch_and_sequence(model: str, policy: str) -> None:
    result = traced(model, dynamic=True).run(POLICIES[policy])
    assert_same_result(unpartitioned(model, dynamic=True), result)
    kept = result.partition.forward.graph.output_node().args[0]
    assert any(isinstance(value.meta["val"], torch.SymInt) for value in kept)


@pytest.mark.parametrize(
    ("model", "dynamic"),
    [
        pytest.param("llama", True, marks=pytest.mark.slow),
        ("mlp", True),
        pytest.param("gpt2", False, marks=pytest.mark.slow),
        ("resnet", False),
        ("counter", False),
        pytest.param("flex", False, marks=pytest.mark.slow),
    ],
)
def test_trains_under_the_runtime_of_aot_autograd(model: str, dynamic: bool) -> None:
    """Version counters, mutated buffers, sizes and generator states: what the graphs alone do not show.

    (Generator states in every run: see the dropout below.)
    """
    base, _ = run_step(ZOO[model](), dynamic=dynamic, steps=2)
    for policy in ("recompute all", "selective"):
        assert_bitwise_equal(base, run_step(ZOO[model](), POLICIES[policy], dynamic=dynamic, steps=2)[0])


def test_dropout_draws_the_same_mask_again_over_several_steps() -> None:
    base, _ = run_step(ZOO["dropout"](), steps=3)
    trained, (partition,) = run_step(ZOO["dropout"](), "recompute everything", steps=3)
    assert_bitwise_equal(base, trained)
    assert partition.audit.random_states == 2


def test_a_saved_mask_is_not_drawn_again() -> None:
    result = traced("dropout").run("recompute everything; save native_dropout")
    assert_same_result(unpartitioned("dropout"), result)
    assert result.audit.random_states == 0
    assert not result.partition.backward.graph.find_nodes(
        op="call_function", target=torch.ops.aten.native_dropout.default
    )
