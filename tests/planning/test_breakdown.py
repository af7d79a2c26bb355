"""What a plan comes to, block by block."""

from __future__ import annotations

import pytest

from policylang.api.load import parse
from policylang.language.shown import folded_names
from policylang.planning.capabilities import JOINT
from policylang.planning.inspection.breakdown import breakdown
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from policylang.planning.value_outcome import KEPT
from tests.graph.captured import facts_of_model


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["layers.3"], "layers.3"),
        ([f"layers.{n}" for n in range(32)], "layers.0–31"),
        (["layers.0", "layers.2", "layers.3", "layers.7"], "layers.0, 2–3, 7"),
        ([f"h.{n}.x" for n in range(0, 32, 2)], "h.0, 2, …, 30.x"),
        (["encoder.0", "decoder.0"], "encoder.0, decoder.0"),
        (["a.0.b.0", "a.1.b.1"], "a.0.b.0, a.1.b.1"),
    ],
)
def test_names_that_differ_in_a_number_are_written_once(names, folded):
    assert folded_names(names) == folded


@pytest.mark.parametrize(
    "model", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mixtral", "gpt2", "bart"))]
)
def test_the_groups_add_up_to_the_totals(model):
    made = plan(parse("include <llama3_sac>\nundecided -> save"), facts_of_model(model), JOINT)
    found, outcome = breakdown(made), saved_and_recomputed(made)
    amounts = found.under.amounts
    assert amounts.saved_bytes == outcome.saved_bytes
    assert amounts.recomputed_flops == outcome.recomputed_flops
    for name in ("saved", "saved_bytes", "recomputed", "recomputed_bytes", "recomputed_flops"):
        assert sum(getattr(group.amounts, name) * group.times for group in found.groups) == getattr(amounts, name)
    for group in found.groups:
        assert sum(entry.bytes for entry in group.entries if entry.outcome is KEPT) == group.amounts.saved_bytes
        for block in group.blocks:
            assert group.amounts.saved_bytes == outcome.saved_bytes_by_block[block]
    assert amounts.saved_bytes < found.without.amounts.saved_bytes
    assert found.without.amounts.recomputed == 0


def test_blocks_that_differ_in_the_deciding_line_stand_apart():
    text = "recompute everything in block\nsave mm in first 1 block\nsave mm in last block\nundecided -> save"
    made = plan(parse(text.replace("first 1 block", "blocks 0..0")), facts_of_model("llama"), JOINT)
    assert [group.times for group in breakdown(made).groups] == [1, 1, 1]
