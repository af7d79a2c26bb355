"""What the benchmark counts, on a model small enough to count by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.llama3_8b_128_ranks import measure
from examples.sharded_llama import LlamaConfig
from tests.support.sharded import fake_ranks
from tests.support.versions import needs_traced_meshes

pytestmark = [needs_traced_meshes, pytest.mark.slow]

LAYERS = 2
PRODUCTS = 7 * LAYERS
"""Weights that a tensor-parallel block cuts: each is gathered over dp."""
OTHERS = 2 * LAYERS + 3
"""Norms, embedding and output: gathered over dp, then over tp."""
ACTIVATIONS = 2 * LAYERS
"""Before attention and before the feed-forward; the backward of what follows them gathers as often."""
RESHARD, GATHERS, BOTH = "reshard", "reshard, gathers fused", "reshard, gathers and scatters fused"


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, dict[str, Any]]]:
    """Layout, policy, figures."""
    config = LlamaConfig(layers=LAYERS)
    with fake_ranks(8):
        results = {layout: measure(config, layout, "cpu", dp=4, tp=2)["graphs"] for layout in ("tp", "fsdp")}
    return {layout: {row["policy"]: row for row in rows} for layout, rows in results.items()}


def test_gathers_as_traced(found: dict[str, dict[str, dict[str, Any]]]) -> None:
    traced = found["tp"]["as traced"]
    assert traced["forward gathers"] == PRODUCTS + 2 * OTHERS + ACTIVATIONS
    assert traced["backward gathers"] == ACTIVATIONS
    assert traced["reduce-scatters"] == PRODUCTS + 2 * OTHERS + 2 * ACTIVATIONS
    assert traced["forward gathers over 4"] == PRODUCTS + OTHERS
    traced = found["fsdp"]["as traced"]
    assert traced["forward gathers"] == traced["reduce-scatters"] == 2 * (PRODUCTS + OTHERS)
    assert traced["backward gathers"] == 0


@pytest.mark.parametrize("layout", ["tp", "fsdp"])
def test_reshard_gathers_again_what_the_backward_reads(
    layout: str, found: dict[str, dict[str, dict[str, Any]]]
) -> None:
    """All but the embedding, whose gradient does not need it."""
    traced, reshard = found[layout]["as traced"], found[layout][RESHARD]
    again = traced["forward gathers"] - 2 - (ACTIVATIONS if layout == "tp" else 0)
    assert reshard["forward gathers"] == traced["forward gathers"]
    assert reshard["backward gathers"] == traced["backward gathers"] + again


@pytest.mark.parametrize("layout", ["tp", "fsdp"])
def test_fusion_leaves_one_gather_of_two(layout: str, found: dict[str, dict[str, dict[str, Any]]]) -> None:
    pairs = OTHERS if layout == "tp" else PRODUCTS + OTHERS
    before, after = found[layout][RESHARD], found[layout][GATHERS]
    assert after["fused"] == after["forward gathers over 8"] == pairs
    assert before["forward gathers"] - after["forward gathers"] == pairs
    assert before["backward gathers"] - after["backward gathers"] == pairs - 1
    scattered = found[layout][BOTH]
    assert scattered["fused"] == 2 * pairs
    assert before["reduce-scatters"] - scattered["reduce-scatters"] == pairs
    assert scattered["forward gathers"] == after["forward gathers"]


@pytest.mark.parametrize("layout", ["tp", "fsdp"])
def test_the_two_peaks_agree(layout: str, found: dict[str, dict[str, dict[str, Any]]]) -> None:
    for row in found[layout].values():
        assert max(row["peak GiB, forward"], row["backward"]) == pytest.approx(row["MemTracker"], rel=0.05)
