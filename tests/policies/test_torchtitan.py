"""`torchtitan_op_sac` takes TorchTitan's decisions, operator by operator.

The reference is written out here from what TorchTitan 0.3.0 does (`SelectiveAC` with its default settings), for the
operators that these models have.
"""

from __future__ import annotations

import pytest

import policylang
from tests.support.joint import capture_joint
from tests.support.models import ZOO

SAVED = {
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.convolution.default",
    "aten.topk.default",
    "aten.max.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_attention_math.default",
}
COUNTED = {"aten.mm.default", "aten.linear.default"}
ONLY_ON_CPU = "aten._scaled_dot_product_flash_attention_for_cpu.default"
"""Attention all the same, and not on TorchTitan's list, which is for GPUs."""


def torchtitan(nodes: list[tuple[str, str, str]]) -> dict[str, str]:
    """Node name, operator and block in graph order, to node name and decision."""
    decisions = {}
    block, count = "", 0
    for name, operator, home in nodes:
        if home != block:
            block, count = home, 0
        count += operator in COUNTED
        skipped = operator in COUNTED and count % 2 == 0
        decisions[name] = "save" if operator in SAVED | {ONLY_ON_CPU} and not skipped else "recompute"
    return decisions


@pytest.mark.parametrize(
    "model", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "mixtral", "gpt2"))]
)
def test_the_decisions_of_torchtitan(model):
    joint = capture_joint(*ZOO[model]())
    report = policylang.report(policylang.apply(joint.gm, "torchtitan_op_sac"))
    nodes = [
        (node.name, str(node.target), home)
        for node in joint.gm.graph.nodes
        if node.name in report.decisions and (home := block_of(node)) and "getitem" not in node.name
    ]
    expected = torchtitan(nodes)
    assert sum(decision == "save" for decision in expected.values()) >= 8
    for name, decision in expected.items():
        ours = report.decisions[name]
        if ours.action != decision:  # TorchTitan gets the same from the wrapper: what a block returns lives on
            rule = next(rule for rule in report.rules if rule.source == ours.rule)
            assert rule.text == "save everything in block where crosses block", (name, ours, decision)


def block_of(node) -> str:
    path = next(reversed((node.meta.get("nn_module_stack") or {"": ("", None)}).values()))[0]
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part in ("layers", "h")), None)
    return "" if at is None or at + 1 == len(parts) else ".".join(parts[: at + 2])
