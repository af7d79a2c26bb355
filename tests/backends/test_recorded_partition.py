"""The recorded step of Llama-3 8B on 128 ranks, split after `llama3_sac` with FSDP's line."""

from __future__ import annotations

from functools import cache

import pytest
from torch import fx

import policylang
from policylang.backends.joint import JointPartitioner, Partition
from policylang.planning.liveness import saved_and_recomputed
from tests.planning.test_recorded_graphs import FSDP, LAYERS, SAVED_PER_BLOCK
from tests.support.shared_graphs import JOINT, shared_graph

STATIC = list(range(292))


@cache
def partition(undecided: str, *, tagged: bool) -> Partition:
    gm = shared_graph(JOINT)
    for node in gm.graph.nodes if not tagged else ():
        node.meta.pop("recompute", None)
    policy = policylang.parse(f"include <llama3_sac>\nundecided -> {undecided}\n{FSDP}")
    return JointPartitioner(policy).partition(gm, num_fwd_outputs=1, static_lifetime_input_indices=STATIC)


def gathers(half: fx.GraphModule) -> int:
    return sum("all_gather_into_tensor" in str(node.target) for node in half.graph.nodes)


@pytest.mark.parametrize("tagged", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_is_saved_is_what_was_planned_to_the_byte(tagged: bool) -> None:
    """With the tags of the model's own checkpoint, equal views of one value differ in their tags: merging them saved 64
    hidden states that the backward had no use for."""
    made = partition("recompute", tagged=tagged)
    planned = saved_and_recomputed(made.plan)
    assert made.audit.agrees
    assert made.audit.saved_bytes == planned.saved_bytes
    assert made.audit.saved == tuple(made.plan.facts.names[row] for row in planned.saved)
    if not tagged:
        assert made.audit.saved_bytes == LAYERS * SAVED_PER_BLOCK


def test_each_weight_is_gathered_again() -> None:
    """290 lines of the forward run again; the recording has 125 gathers of its own in the backward, and the rest are
    those of activations."""
    made = partition("auto", tagged=False)
    assert made.audit.agrees
    assert gathers(made.forward) == 356
    again = [name for name in made.audit.recomputed if name.startswith("all_gather_into_tensor")]
    assert gathers(made.backward) == 125 + len(again)
    assert len(again) >= 290


@pytest.mark.slow
def test_min_cut_moves_no_gather_of_the_backward_into_the_forward() -> None:
    """Left alone it moves 93 gathers of weights there and saves what they gather, whatever FSDP's line says."""
    made = partition("auto", tagged=False)
    forward = {made.plan.facts.names[row] for row in made.plan.facts.forward}
    assert set(made.audit.saved) <= forward
    assert made.audit.saved_bytes >= LAYERS * SAVED_PER_BLOCK - 16 * 2**20
