"""The simulated peak and the saved bytes beside what PyTorch's ``MemTracker`` sees of the graphs that come out."""

from __future__ import annotations

from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from policylang.api.load import parse
from policylang.backends.flat import FlatPath
from policylang.backends.joint import JointPartitioner
from policylang.planning.liveness import saved_and_recomputed
from policylang.simulation.memory import estimate_peak
from tests.graph.captured import flat_of, joint_of
from tests.support.flat_graphs import copy_graph
from tests.support.joint import Joint, capture_joint
from tests.support.measured import measured, measured_flat
from tests.support.models import ZOO

TOLERANCE = 0.05
POLICIES = {
    "save": "undecided -> save",
    "recompute": "undecided -> recompute",
    "blocks": "optional recompute everything in block; save everything in block where crosses block; undecided -> save",
    "matmuls": "optional save matmul; optional save attention; undecided -> recompute",
}
WRITES_A_BUFFER = {"counter"}
"""Its forward reads what it writes: it may not be recomputed."""
NO_BLOCKS = {"counter", "aliased_output"}


def pairs() -> list[Any]:
    """Every policy on Llama; of the other quick models one policy each."""
    variants = {"qwen3", "mixtral", "bart", "gpt2"}
    marks: list[Any] = []
    for number, model in enumerate(ZOO):
        for at, policy in enumerate(POLICIES):
            quick = model == "llama" or (model not in variants and number % len(POLICIES) == at)
            marks.append(pytest.param(model, policy, marks=() if quick else pytest.mark.slow))
    return marks


@pytest.mark.parametrize(("model", "policy"), pairs())
def test_models_of_the_suite(model: str, policy: str) -> None:
    if model in WRITES_A_BUFFER and "-> recompute" in POLICIES[policy]:
        return
    text = "undecided -> save" if policy == "blocks" and model in NO_BLOCKS else POLICIES[policy]
    assert_close(joint_of(model), text)


@pytest.mark.parametrize(
    ("model", "policy"),
    [
        *(("llama", policy) for policy in ("save", "recompute", "blocks")),
        *(("resnet", "save"), ("mlp", "blocks")),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                *(("bart", policy) for policy in ("save", "recompute", "blocks")),
                *(("resnet", "recompute"), ("resnet", "blocks"), ("mlp", "save"), ("mlp", "recompute")),
            )
        ),
    ],
)
def test_flat_graphs(model: str, policy: str) -> None:
    gm = copy_graph(flat_of(model).gm)
    made = FlatPath().apply(gm, parse(POLICIES[policy])).plan
    peak = estimate_peak(made.facts, made.schedule)
    assert peak.bytes == pytest.approx(measured_flat(gm), rel=TOLERANCE)


def test_what_nobody_takes_of_a_recomputed_tuple_is_let_go() -> None:
    """BatchNorm gives its result and two statistics: taken one by one as the backward comes to them, the tuple would
    hold the result until the last."""
    gm = copy_graph(flat_of("resnet").gm)
    made = FlatPath().apply(gm, parse(POLICIES["recompute"])).plan
    measured_bytes = measured_flat(gm)
    peak = estimate_peak(made.facts, made.schedule)
    assert peak.bytes == measured_bytes
    pieces = [node for node in gm.graph.nodes if node.target is getitem and node.name.endswith("_recomputed")]
    assert len(pieces) > 8
    for node in reversed(pieces):
        min(node.users, key=list(gm.graph.nodes).index).prepend(node)
    gm.recompile()
    assert measured_flat(gm) > 1.2 * measured_bytes


def test_the_forward_keeps_the_order_that_it_was_traced_in() -> None:
    before = [node.name for node in flat_of("resnet").gm.graph.nodes]
    gm = copy_graph(flat_of("resnet").gm)
    FlatPath().apply(gm, parse(POLICIES["recompute"]))
    after = [node.name for node in gm.graph.nodes if not node.name.endswith("_recomputed")]
    stays = set(after)
    assert after == [name for name in before if name in stays]
    assert len(stays) > len(before) / 2


@pytest.mark.parametrize(
    "policy",
    [
        *(pytest.param(text, marks=pytest.mark.slow) for text in ("undecided -> save", "undecided -> recompute")),
        "include <llama3_sac>\nundecided -> save",
    ],
)
def test_two_layers_of_true_8b_shapes(policy: str) -> None:
    assert_close(llama_8b(2), policy, exactly="llama3_sac" in policy)


@pytest.mark.slow
def test_all_layers_of_true_8b_shapes() -> None:
    assert_close(llama_8b(32), "include <llama3_sac>\nundecided -> save", exactly=True)


def assert_close(joint: Joint, policy: str, *, exactly: bool = False) -> None:
    """``exactly``: the plan alone foretells the saved bytes. Elsewhere equal nodes are merged after it was made."""
    partition = JointPartitioner(parse(policy)).partition(
        copy_graph(joint.gm),
        num_fwd_outputs=joint.num_fwd_outputs,
        static_lifetime_input_indices=joint.static_lifetime_input_indices,
    )
    seen = measured(partition, joint.num_fwd_outputs)
    outcome = saved_and_recomputed(partition.plan)
    peak = estimate_peak(partition.plan.facts, partition.plan.schedule)
    assert partition.audit.saved_bytes == seen.saved
    if exactly:
        assert outcome.saved_bytes == seen.saved
    assert peak.forward == pytest.approx(seen.forward, rel=TOLERANCE)
    assert peak.backward == pytest.approx(seen.backward, rel=TOLERANCE)


_captured: dict[int, Joint] = {}


def llama_8b(layers: int) -> Joint:
    """A sequence of 8192 tokens through layers of Llama-3 8B, on fake tensors: nothing of it needs memory."""
    if layers not in _captured:
        with FakeTensorMode():
            _captured[layers] = capture_joint(_Llama(layers), (torch.zeros(1, 8192, dtype=torch.int64),))
    return _captured[layers]


class _Llama(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_attention_heads=32,
            num_key_value_heads=8,
            num_hidden_layers=layers,
            use_cache=False,
            attn_implementation="sdpa",
            dtype=torch.bfloat16,
        )
        self.model = LlamaForCausalLM._from_config(config).train()

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
