"""Graphs written as text: what they say, and what is said of a line that cannot be read."""

from __future__ import annotations

import pytest

from policylang.graph.facts import Flag, GraphKind, InputKind, Phase
from policylang.graph.textual import read_graph
from policylang.language.diagnostics import Source

GRAPH = """
# the backward stands below the line
%x = input
%w = parameter shape=8x4 dtype=bf16 name=layers.0.wq.weight
%mm = aten.mm.default(%x, %w) layers.0.wq shape=8x8 dtype=bfloat16 flops=2KFLOP   # a comment
%sdpa = aten._scaled_dot_product_flash_attention.default(%mm, %mm, 1.0) layers.0 multi_output random bytes=2KiB
%out = builtin.getitem(%sdpa, 0) layers.0
%gather = _c10d_functional.all_gather_into_tensor.default(%w) collective group=dp:4
%wait = _c10d_functional.wait_tensor.default(%gather)
---
%t = tangent
%b = aten.cos.default(%t, %out)
output(%wait, %b)
"""


def facts_of(text: str, kind: GraphKind | None = None):
    facts, problems = read_graph(Source("graph", text), kind)
    assert problems == ()
    return facts


def said(text: str) -> list[tuple[str, str]]:
    """The code of each problem, and the text that it underlines."""
    facts, problems = read_graph(Source("graph", text))
    assert facts is None
    return [(problem.code, problem.span.text) for problem in problems]


def test_what_a_graph_says():
    facts = facts_of(GRAPH)
    row = facts.index
    assert facts.kind is GraphKind.JOINT
    assert facts.input_kinds[row["w"]] == InputKind.PARAMETER
    assert facts.input_names[row["w"]] == "layers.0.wq.weight"
    assert facts.modules[row["mm"]] == "layers.0.wq"
    assert (facts.shapes[row["mm"]], facts.dtypes[row["mm"]]) == ((8, 8), "bfloat16")
    assert (facts.numel[row["mm"]], facts.bytes[row["mm"]], facts.flops[row["mm"]]) == (64, 128, 2000)
    assert facts.bytes[row["sdpa"]] == 2048
    assert facts.flags[row["sdpa"]] == Flag.MULTI_OUTPUT | Flag.RANDOM | Flag.FEEDS_BACKWARD
    assert facts.owners[row["out"]] == row["sdpa"]
    assert facts.owners[row["wait"]] == row["gather"]
    assert facts.groups[facts.group_names[row["gather"]]].size == 4
    assert facts.has(row["wait"], Flag.FORWARD_OUTPUT)
    assert facts.phases[row["b"]] == Phase.BACKWARD
    assert facts.inputs[row["sdpa"]] == (row["mm"],)


def test_a_graph_without_a_backward_is_the_forward_half():
    assert facts_of("%x = input").kind is GraphKind.FORWARD
    assert facts_of("%x = input", GraphKind.FLAT).kind is GraphKind.FLAT


def test_a_scalar_has_one_element():
    facts = facts_of("%x = input shape=scalar dtype=f32")
    assert (facts.shapes[0], facts.numel[0], facts.bytes[0]) == ((), 1, 4)


def test_an_operator_of_a_library_nobody_knows_here():
    assert facts_of("%x = input\n%y = my_library.fused.default(%x)").targets[1] == "my_library.fused.default"


@pytest.mark.parametrize(
    ("line", "code", "underlined"),
    [
        ("%y = aten.mn.default(%x)", "APL503", "aten.mn.default"),
        ("%y = aten.mm(%x)", "APL503", "aten.mm"),
        ("%y = mm(%x)", "APL503", "mm"),
        ("%y = aten.sin.default(%z)", "APL502", "%z"),
        ("%x = input", "APL502", "%x"),
        ("%y = aten.sin.default(x)", "APL501", "x"),
        ("%y = aten.sin.default(%x) byte=8", "APL503", "byte=8"),
        ("%y = aten.sin.default(%x) bytes=many", "APL501", "many"),
        ("%y = aten.sin.default(%x) bytes=2GFLOP", "APL501", "2GFLOP"),
        ("%y = aten.sin.default(%x) dtype=bf17", "APL501", "bf17"),
        ("%y = aten.sin.default(%x) tag=SAVE", "APL501", "SAVE"),
        ("%y = aten.sin.default(%x) randon", "APL503", "randon"),
        ("%y = aten.sin.default(%x) layers.0 layers.1", "APL503", "layers.1"),
        ("%y = aten.sin.default(%x) follows=%z", "APL501", "%z"),
        ("%y = aten.sin.default(%x) region=9999999999", "APL501", "9999999999"),
        ("%y = aten.sin.default(%x) shape=99999999999x99999999999", "APL501", "99999999999x99999999999"),
        ("%y = aten.sin.default(%x", "APL501", "%y = aten.sin.default(%x"),
        ("aten.sin.default(%x)", "APL501", "aten.sin.default(%x)"),
    ],
)
def test_a_line_that_cannot_be_read(line: str, code: str, underlined: str):
    assert said(f"  %x = input\n  {line}  # said here\n") == [(code, underlined)]


def test_all_that_is_wrong_comes_in_one_run():
    found = [code for code, _ in said("%x = inpt\n%y = aten.mn.default(%q)\n???")]
    assert found == ["APL503", "APL503", "APL502", "APL501"]
