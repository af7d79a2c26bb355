"""The bundled policies decide alike however a model's products and activations are written."""

from __future__ import annotations

import copy
from functools import cache

import pytest
from torch import Tensor

import policylang
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.planning.capabilities import FLAT
from policylang.planning.planner import plan as make_plan
from tests.support.flat_graphs import assert_bitwise_equal, copy_graph
from tests.support.forms import BLOCKS, FORMS, Form, decoder
from tests.support.models import Example
from tests.tracing.steps import trace

POLICIES = (
    *("llama3_sac", "torchtitan_op_sac", "torchtitan_full", "every_2nd_layer", "save_all"),
    *("torchtitan_default", "torchtitan_eager", "torchtitan_graph_full"),
)
PRODUCTS = {"aten.mm.default", "aten.bmm.default", "aten.einsum.default"}
IN_A_BLOCK = 2 + 7 + 1
"""What is looked at: its own sums, its products with weights, attention."""


@cache
def traced(form: Form) -> tuple[Example, policylang.TracedStep]:
    example = decoder(form)
    return example, trace(example)


@cache
def facts_of(form: Form) -> Facts:
    return collect(traced(form)[1].gm)


def decided(form: Form, policy: str) -> dict[str, str]:
    """The decision on every product with a weight, on attention and on every sum that a block makes, by place."""
    facts = facts_of(form)
    plan = make_plan(policylang.load(policy), facts, FLAT)
    assert not [found for found in plan.diagnostics if "matches nothing" in found.message]
    found: dict[str, str] = {}
    for row in facts.forward:
        module, target = facts.modules[row], facts.targets[row]
        own_sum = target == "aten.add.Tensor" and module.split(".")[-1].isdigit()
        product = target in PRODUCTS and module.split(".")[-1].startswith("w")
        if own_sum or product or "attention" in target:
            decision = plan.decisions[row]
            place = f"{module} {'sum' if own_sum else 'product' if product else 'attention'}"
            place += "'" * (place in found)
            if decision is None or decision.action is None:
                found[place] = "undecided"
            else:
                found[place] = "recomputed" if decision.action.recomputes else "saved"
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("form", [form for form in FORMS if form != "batched"])
def test_the_same_decisions(form: Form, policy: str) -> None:
    expected = decided("batched", policy)
    assert len(expected) == IN_A_BLOCK * BLOCKS
    assert decided(form, policy) == expected


@pytest.mark.parametrize("form", FORMS)
def test_llama3_sac_saves_the_attention_residual_and_every_other_product(form: Form) -> None:
    saved = {place for place, action in decided(form, "llama3_sac").items() if action == "saved"}
    for block in range(BLOCKS):
        here = {place.removeprefix(f"layers.{block}.") for place in saved if place.startswith(f"layers.{block}.")}
        products = {place.removesuffix(" product") for place in here if place.endswith(" product")}
        assert products == {"attention.wq", "attention.wv", "feed_forward.w1", "feed_forward.w2"}
        assert f"layers.{block} sum" in saved


@pytest.mark.parametrize("form", FORMS)
def test_a_step_gives_the_same_numbers(form: Form) -> None:
    example, plain = traced(form)
    step = copy.copy(plain)
    step.gm = copy_graph(plain.gm)
    step.apply("llama3_sac")
    report = policylang.report(step.gm)
    assert report.audit.agrees
    assert len(report.recomputed) > 20
    assert_bitwise_equal(outputs(step, example), outputs(plain, example))


def outputs(step: policylang.TracedStep, example: Example) -> list[Tensor]:
    loss, gradients = step(*example.inputs)
    return [loss, *gradients.values()]
