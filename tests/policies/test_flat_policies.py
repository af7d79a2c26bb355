"""The bundled policies on whole steps that `policylang.trace_step` traced: the numbers of the step without a policy."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import policylang
from policylang import TracedStep
from policylang.errors import PolicyMatchError
from policylang.language.resources import policies_folder
from policylang.language.syntax import Policy
from tests.support.flat_graphs import assert_bitwise_equal, copy_graph
from tests.support.models import ZOO, Example
from tests.tracing.steps import trace

BY_BLOCKS = ("torchtitan_full", "torchtitan_op_sac", "every_2nd_layer")
FOR_ANYTHING = ("memory_staged", "save_all")
TRANSFORMERS = ("llama", "qwen3", "mixtral", "gpt2", "bart", "flex", "shared_parameters")
OTHERS_WITH_BLOCKS = ("resnet", "dropout", "mlp")
WITHOUT_BLOCKS = ("aliased_output", "counter")
WORKS = [
    *((policy, model) for model in TRANSFORMERS for policy in ("llama3_sac", *BY_BLOCKS, *FOR_ANYTHING)),
    *((policy, model) for model in OTHERS_WITH_BLOCKS for policy in (*BY_BLOCKS, *FOR_ANYTHING)),
    *(("llama3_sac", model) for model in ("mlp", "dropout")),  # their residuals are flat
    *((policy, model) for model in WITHOUT_BLOCKS for policy in FOR_ANYTHING),
]


class Zoo(NamedTuple):
    """A traced step, and what two calls of it give: losses, gradients and the buffers after them."""

    example: Example
    step: TracedStep
    state: dict[str, Tensor]
    expected: list[Tensor]

    def with_policy(self, policy: Policy | str) -> TracedStep:
        """The policy on a copy of the step: a graph takes one policy."""
        step = copy.copy(self.step)
        step.gm = copy_graph(step.gm)
        return step.apply(policy)

    def run(self, step: TracedStep) -> list[Tensor]:
        return two_calls(self.example, step, self.state)


def two_calls(example: Example, step: TracedStep, state: dict[str, Tensor]) -> list[Tensor]:
    example.module.load_state_dict(state)
    seen: list[Tensor] = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # what dropout draws
        loss, gradients = step(*example.inputs)
        assert gradients
        seen += [loss, *gradients.values()]
    return seen + [buffer.clone() for buffer in example.module.buffers()]


@pytest.fixture(scope="module")
def zoo() -> Callable[[str], Zoo]:
    known: dict[str, Zoo] = {}

    def look_up(name: str) -> Zoo:
        if name not in known:
            example = ZOO[name]()
            if name == "mixtral":  # the grouped matmul takes bfloat16 alone where nothing is really computed
                example.module.model.set_experts_implementation("batched_mm")
            state = copy.deepcopy(example.module.state_dict())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step = trace(example)
            known[name] = Zoo(example, step, state, two_calls(example, step, state))
        return known[name]

    return look_up


@pytest.mark.parametrize(("policy", "model"), WORKS)
def test_loss_gradients_and_buffers_are_bitwise_those_without_a_policy(policy, model, zoo):
    traced = zoo(model)
    step = traced.with_policy(policy)
    assert_bitwise_equal(traced.run(step), traced.expected)
    report = step.report
    assert report.policy == policy
    assert report.audit.agrees
    assert all(rule.matched or rule.text.startswith("optional") for rule in report.rules)
    assert bool(report.recomputed) == (policy != "save_all")


@pytest.mark.parametrize("model", [*TRANSFORMERS, *OTHERS_WITH_BLOCKS])
def test_stages_small_enough_to_cut_a_small_model(model, zoo):
    traced = zoo(model)
    text = (policies_folder() / "memory_staged.apl").read_text(encoding="utf-8")
    size = "16 KiB" if model in TRANSFORMERS else "4 KiB"  # more than a single value, less than the forward
    staged = traced.with_policy(policylang.parse(text.replace("per 2 GiB", f"per {size}")))
    assert_bitwise_equal(traced.run(staged), traced.expected)
    whole = traced.with_policy("memory_staged").report
    assert staged.report.rules[1].decided > whole.rules[1].decided == 0
    assert whole.saved.bytes < staged.report.saved.bytes < traced.with_policy("save_all").report.saved.bytes


@pytest.mark.parametrize(
    ("policy", "model"),
    [
        ("llama3_sac", "resnet"),  # its sums are not made by the blocks themselves
        *((policy, model) for model in WITHOUT_BLOCKS for policy in ("llama3_sac", *BY_BLOCKS)),
        ("replay", "llama"),  # nothing was recorded
    ],
)
def test_a_policy_for_another_model_says_so_and_leaves_the_step_as_it_was(policy, model, zoo):
    traced = zoo(model)
    step = copy.copy(traced.step)
    step.gm = copy_graph(step.gm)
    with pytest.raises(PolicyMatchError) as caught:
        step.apply(policy)
    assert {found.code for found in caught.value.diagnostics if found.severity.value == "error"} <= {"APL301", "APL302"}
    assert [node.name for node in step.gm.graph.nodes] == [node.name for node in traced.step.gm.graph.nodes]
