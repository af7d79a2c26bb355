"""What the backward needs: the values saved, recomputed and offloaded, their bytes, FLOPs and steps."""

from __future__ import annotations

from typing import Any

import pytest

import policylang
from policylang.graph.facts import GraphKind, StepKind
from policylang.planning.capabilities import FLAT
from policylang.planning.liveness import BackwardCost, saved_and_recomputed
from policylang.planning.plan import schedule_of
from policylang.planning.planner import plan
from tests.planning.sentences import JOINT, names
from tests.support.textgraph import facts_of

CHAIN = """
    %x = input bytes=32
    %w = parameter bytes=64
    %mm = aten.mm.default(%x, %w) layers.0 bytes=128 flops=300
    %view = aten.view.default(%mm) layers.0 view bytes=128
    %sin = aten.sin.default(%view) layers.0 bytes=128 shape=8x4 dtype=float32
    %mm_1 = aten.mm.default(%sin, %w) layers.1 bytes=256 flops=100
    ---
    %t = tangent
    %b = aten.mul.Tensor(%t, %sin)
    %b_1 = aten.mm.default(%b, %w)
    output(%mm_1, %b_1)
"""
VIEWS = """
    %x = input bytes=32
    %w = parameter bytes=64
    %mm = aten.mm.default(%x, %w) layers.0 bytes=300
    %view = aten.view.default(%mm) layers.0 view bytes=100
    %view_1 = aten.view.default(%mm) layers.1 view bytes=200
    %t_w = aten.t.default(%w) layers.1 view bytes=64
    ---
    %b = aten.mul.Tensor(%view, %view_1, %t_w)
    output(%mm, %b)
"""
PIECES = """
    %x = input
    %sdpa = aten._scaled_dot_product_flash_attention.default(%x) multi_output bytes=999
    %out = builtin.getitem(%sdpa) bytes=100
    %lse = builtin.getitem(%sdpa) bytes=10
    %seed = builtin.getitem(%sdpa) bytes=1
    ---
    %b = aten.mul.Tensor(%out, %lse)
    output(%out, %b)
"""
GATHER = """
    %w = parameter bytes=10
    %gather = _c10d_functional.all_gather_into_tensor.default(%w) collective group=dp:4 bytes=40
    %wait = _c10d_functional.wait_tensor.default(%gather) bytes=40
    ---
    %b = aten.mul.Tensor(%wait)
    output(%wait, %b)
"""
SIZES = """
    %x = input
    %s0 = input symbolic
    %size = aten.sym_size.int(%x) symbolic
    %view = aten.view.default(%x, %size) view
    ---
    %b = aten.mul.Tensor(%view, %s0)
    output(%view, %b)
"""
GRADIENT = """
    %x = input
    %sin = aten.sin.default(%x) bytes=8 gradient
    ---
    %t = tangent
    %b = aten.mul.Tensor(%t)
    output(%sin, %b)
"""
INTERLEAVED = """
    %x = input
    %a = aten.sin.default(%x) bytes=8
    %g = aten.mul.Tensor(%a) backward
    %b = aten.cos.default(%a) bytes=8
    %h = aten.mul.Tensor(%g, %b) backward
    output(%b, %h)
    ---
    %i = aten.mul.Tensor(%h)
"""
ALONE = "%x = input\n%sin = aten.sin.default(%x) bytes=8\noutput(%sin)"


def needed(text: str, rules: str) -> BackwardCost:
    return saved_and_recomputed(plan(policylang.parse(rules), facts_of(text), JOINT))


@pytest.mark.parametrize(
    ("text", "rules", "expected"),
    [
        pytest.param(
            *(CHAIN, "recompute everything\nsave mm"),
            {"saved": "mm", "recomputed": "view sin", "inputs": "w", "final": True},
            id="a recomputed value needs its inputs and a saved one ends the walk",
        ),
        pytest.param(
            *(CHAIN, "recompute everything"),
            {"saved": "", "recomputed": "mm view sin", "inputs": "x w", "saved_bytes": 0, "recomputed_flops": 300}
            | {"recomputed_flops_by_block": (300, 0)},
            id="recomputation goes back to the graph inputs",
        ),
        pytest.param(
            *(CHAIN, "save everything", {"saved": "sin", "saved_bytes": 128}),
            id="a value decided save that nothing reads is not saved",
        ),
        pytest.param(
            *(VIEWS, "save everything"),
            {"saved": "view view_1 t_w", "saved_bytes": 300, "saved_bytes_by_block": (300, 0)},
            id="a saved view keeps the memory it looks into once",
        ),
        pytest.param(*(PIECES, "save everything", {"saved": "out lse", "saved_bytes": 110}), id="pieces are saved"),
        pytest.param(
            *(PIECES, "recompute everything", {"recomputed": "sdpa out lse", "recomputed_bytes": 999}),
            id="pieces are recomputed with their operator",
        ),
        pytest.param(
            *(GATHER, "save all_gather_into_tensor", {"saved": "wait", "saved_bytes": 40}),
            id="of a collective the wait is saved when that is read",
        ),
        pytest.param(
            *(GATHER, "recompute all_gather_into_tensor", {"recomputed": "gather wait", "inputs": "w"}),
            id="a collective is recomputed with its wait",
        ),
        pytest.param(
            *(SIZES, "recompute everything", {"symbolic": "s0 size", "inputs": "x", "recomputed": "view"}),
            id="sizes are kept apart",
        ),
        pytest.param(
            *(CHAIN, "save mm", {"undecided": "view sin", "contingent": "mm", "saved": "", "final": False}),
            id="what is left to the partitioner is marked, and so is what hangs on it",
        ),
        pytest.param(*(GRADIENT, "save everything", {"saved": "sin"}), id="a forward value that is a gradient"),
        pytest.param(
            *(GRADIENT.replace("gradient", "feeds_backward"), "save everything", {"saved": ""}),
            id="a reader moved away",
        ),
        pytest.param(
            *(INTERLEAVED, "recompute everything\nsave sin", {"saved": "a", "recomputed": "b"}),
            id="backward nodes among the forward ones are read as backward",
        ),
        pytest.param(
            *(ALONE, "save everything", {"saved": "", "recomputed": "", "undecided": ""}),
            id="a graph without backward needs nothing",
        ),
    ],
)
def test_what_the_backward_needs(text: str, rules: str, expected: dict[str, Any]) -> None:
    facts, cost = facts_of(text), needed(text, rules)
    found = {name: getattr(cost, name) for name in expected}
    rows = ("saved", "recomputed", "inputs", "symbolic", "undecided", "contingent")
    assert {name: " ".join(names(facts, each)) if name in rows else each for name, each in found.items()} == expected


def test_the_forward_is_what_shares_are_of() -> None:
    assert needed(CHAIN, "recompute everything").forward("flops")[0] == 400


def test_a_value_is_where_its_outcome_says_by_the_steps_that_it_says() -> None:
    """On a flat graph, whose path offloads."""
    facts = facts_of(CHAIN.replace("%t = tangent", "%t = aten.ones.default()"), GraphKind.FLAT)
    made = plan(policylang.parse("undecided -> recompute\noffload sin"), facts, FLAT)
    cost = saved_and_recomputed(made)
    assert (names(facts, cost.offloaded), cost.saved, cost.recomputed, cost.saved_bytes) == (["sin"], (), (), 0)
    assert cost.offloaded_bytes == 128
    for rules in ("recompute everything", "recompute everything\nsave mm", "undecided -> recompute\noffload sin"):
        made = plan(policylang.parse(rules), facts, FLAT)
        steps = {(row, kind) for kind, row, _ in schedule_of(facts, made.decisions) if kind != StepKind.FIRST_RUN}
        needs = saved_and_recomputed(made).rows
        assert steps == {(row, kind) for outcome, rows in needs.items() for row in rows for kind in outcome.steps}
