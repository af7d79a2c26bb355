"""What a graph tells of the device that it was traced on, and what is said where its kernels are not the training's."""

from __future__ import annotations

import pytest

import policylang
from policylang.graph.facts import Facts
from policylang.graph.textual import read_graph
from policylang.graph.traced_device import attention_kernels, kernel_findings, traced_on
from policylang.language.diagnostics import Source

ATTENTION = """
%scores = aten.bmm.default(%x, %w) layers.0 device={device}
%soft = aten._safe_softmax.default(%scores, -1) layers.0 device={device}
"""
FUSED = "%soft = aten._scaled_dot_product_flash_attention{cpu}.default(%x, %w, %w) layers.0 multi_output"


def graph(device: str, body: str, name: str = "parameter") -> Facts:
    inputs = f"%x = input device=cpu\n%w = {name} device={device}"
    text = f"{inputs}\n{body.format(device=device)}\n---\n%b = aten.cos.default(%soft)"
    facts, problems = read_graph(Source("graph", text))
    assert problems == ()
    assert facts is not None
    return facts


@pytest.mark.parametrize(
    ("device", "body", "expected"),
    [
        ("meta", ATTENTION, ["APL319"]),
        ("meta", "%soft = aten.sin.default(%w)", ["APL319"]),
        ("cpu", ATTENTION, ["APL320"]),
        ("cpu", FUSED.replace("{cpu}", "_for_cpu"), []),
        ("cpu", "%soft = aten._softmax.default(%w, -1)", []),
        ("cuda:0", ATTENTION, []),
        ("cuda:0", FUSED.replace("{cpu}", ""), []),
        ("cuda:0", "%soft = aten._thnn_fused_lstm_cell.default(%w) multi_output", ["APL319"]),
        ("cpu", "%soft = aten._thnn_fused_lstm_cell.default(%w) multi_output", []),
    ],
)
def test_what_is_said(device, body, expected):
    assert [found.code for found in kernel_findings(graph(device, body))] == expected


def test_the_parameters_say_where_a_graph_was_traced_and_the_inputs_where_there_are_none():
    assert traced_on(graph("cuda:0", ATTENTION)) == {"cuda"}
    assert traced_on(graph("cuda:0", ATTENTION, name="input")) == {"cpu", "cuda"}
    assert traced_on(read_graph(Source("graph", "%x = input"))[0]) == set()


def test_attention_is_counted_by_its_kernels_and_an_empty_graph_says_nothing():
    fused = attention_kernels(graph("cuda:0", FUSED.replace("{cpu}", "")))
    assert fused == {"aten._scaled_dot_product_flash_attention.default": 1}
    assert attention_kernels(graph("cpu", ATTENTION)) == {"aten._safe_softmax.default": 1}
    empty, _ = read_graph(Source("graph", ""))
    assert not list(kernel_findings(empty))


def test_check_says_it_once_for_all_policies_of_a_graph_and_plan_as_well(tmp_path):
    policy = tmp_path / "p.apl"
    policy.write_text("policy p\nrecompute bmm\n")
    (tmp_path / "q.apl").write_text("policy q\nsave bmm\n")
    result = policylang.check(tmp_path, graph=graph("meta", ATTENTION))
    assert [found.code for found in result.diagnostics] == ["APL319"]
    assert (result.errors, result.warnings) == (0, 1)
    assert "1 attention is written out in bmm and softmax" in result.diagnostics[0].details
    assert "--device cuda" in (result.diagnostics[0].help or "")
    result = policylang.check(policy, graph=graph("cpu", ATTENTION))
    assert [found.code for found in result.diagnostics] == ["APL320"]
    assert (result.errors, result.warnings) == (0, 0)
