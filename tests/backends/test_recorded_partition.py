"""The recorded step of Llama-3 8B on 128 ranks, whose model checkpoints its layers itself, split after FSDP's contracts
and after `llama3_sac`. On a small sharded model: ``tests/policies/test_fsdp.py``."""

from collections import Counter
from functools import cache

import pytest
from torch import fx

import policylang
from policylang.backends.joint import JointPartitioner, Partition
from policylang.planning.liveness import saved_and_recomputed
from tests.planning.test_recorded_graphs import FSDP, LAYERS, SAVED_PER_BLOCK, gather_lines
from tests.support.shared_graphs import JOINT, shared_facts, shared_graph

pytestmark = pytest.mark.slow
GATHERS = 290
"""All-gathers that start at a parameter; no two of them on one line."""
STATIC = list(range(292))
RESHARD = ["fsdp_reshard_always", "fsdp_reshard_never"]


def tags_of(gm: fx.GraphModule) -> dict[str, str]:
    return {node.name: node.meta["recompute"].name for node in gm.graph.nodes if "recompute" in node.meta}


@cache
def tagged(text: str, *, checkpointed: bool) -> dict[str, str]:
    """The tags that a policy leaves on the joint graph, with or without those of the model's own checkpoint."""
    gm = recording(checkpointed)
    policylang.apply(gm, policylang.parse(text))
    return tags_of(gm)


def recording(checkpointed: bool) -> fx.GraphModule:
    gm = shared_graph(JOINT)
    for node in gm.graph.nodes if not checkpointed else ():
        node.meta.pop("recompute", None)
    return gm


@cache
def partitioned(text: str, *, checkpointed: bool) -> Partition:
    partitioner = JointPartitioner(policylang.parse(text))
    return partitioner.partition(recording(checkpointed), num_fwd_outputs=1, static_lifetime_input_indices=STATIC)


@cache
def lines() -> frozenset[str]:
    """The nodes on the lines through the gathers of parameters, waits and pieces of splits among them."""
    facts = shared_facts(JOINT)
    owners = gather_lines()
    return frozenset(facts.names[row] for row in facts.forward if facts.names[facts.owners[row]] in owners)


def saved_of_lines(made: Partition) -> list[str]:
    facts = made.plan.facts
    return [facts.targets[facts.index[name]] for name in made.audit.saved if name in lines()]


@pytest.mark.parametrize("checkpointed", [True, False])
def test_always_every_line_is_tagged_and_no_gathered_value_is_saved(checkpointed: bool) -> None:
    made = partitioned("include <fsdp_reshard_always>", checkpointed=checkpointed)
    assert made.audit.agrees
    assert saved_of_lines(made) == []
    tags = tagged("include <fsdp_reshard_always>", checkpointed=checkpointed)
    assert {tags[name] for name in lines()} == {"MUST_RECOMPUTE"}


def test_never_the_gathered_value_of_each_line_is_saved_and_nothing_beside_it() -> None:
    made = partitioned("include <fsdp_reshard_never>", checkpointed=True)
    assert made.audit.agrees
    assert saved_of_lines(made) == ["_c10d_functional.wait_tensor.default"] * GATHERS
    tags = tagged("include <fsdp_reshard_never>", checkpointed=True)
    kept = Counter(name.rstrip("_0123456789") for name in lines() if tags[name] == "MUST_SAVE")
    assert kept == {"all_gather_into_tensor": GATHERS, "wait_tensor": GATHERS}
    assert {tags[name] for name in lines()} == {"MUST_SAVE", "MUST_RECOMPUTE"}


@pytest.mark.parametrize("name", RESHARD)
def test_the_tags_of_the_models_own_checkpoint_stand_everywhere_else(name: str) -> None:
    before = tags_of(recording(True))
    untouched = tagged("undecided -> auto", checkpointed=True)
    after = tagged(f"include <{name}>", checkpointed=True)
    elsewhere = (before.keys() | after.keys()) - lines()
    assert [node for node in elsewhere if after.get(node) != untouched.get(node)] == []
    border = {node for node in elsewhere if untouched.get(node) != before.get(node)}
    assert {untouched.get(node) for node in border} <= {"MUST_SAVE"}, "torch saves at the border of two regions"
    assert len(before.keys() - lines()) > 3_000


@pytest.mark.parametrize("name", RESHARD)
def test_the_gather_of_the_tokens_is_left_and_named(name: str) -> None:
    """They are an input of the model, sharded and gathered like a weight."""
    plan = partitioned(f"include <{name}>", checkpointed=True).plan
    (note,) = [found for found in plan.diagnostics if found.code == "APL318"]
    assert note.details == ("all_gather_into_tensor: of the input `primals_293`, 2 MiB",)


@pytest.mark.parametrize(
    ("line", "mebibytes"),
    [
        ("undecided -> save", 64),
        ("save users of (everything where user tagged) except everything where user tagged", 96),
    ],
)
def test_a_reduce_scatter_that_min_cut_repeats_for_the_final_norm_and_what_keeps_it_from_it(line, mebibytes) -> None:
    """Min-cut counts on the last block's result being there in the backward, since the model's checkpoint tags it. Its
    only reader is the final norm, outside every region. Keeping what the norm reads costs less."""
    made = partitioned("include <fsdp_reshard_always>", checkpointed=True)
    other = partitioned(f"{line}\ninclude <fsdp_reshard_always>", checkpointed=True)
    assert {name for name in scatters(made) if name not in scatters(other)} == {"reduce_scatter_tensor_31"}
    assert set(made.audit.recomputed) > set(other.audit.recomputed)
    assert made.audit.saved_bytes - other.audit.saved_bytes == mebibytes * 2**20
    assert "view_1247" in set(made.audit.saved) - set(other.audit.saved)
    assert "convert_element_type_1058" in other.audit.saved


def scatters(made: Partition) -> set[str]:
    return {node.name for node in made.backward.graph.nodes if "reduce_scatter_tensor" in str(node.target)}


# --- llama3_sac with FSDP's line --------------------------------------------------------------------------------------
def sac(undecided: str, *, checkpointed: bool) -> Partition:
    return partitioned(f"include <llama3_sac>\nundecided -> {undecided}\n{FSDP}", checkpointed=checkpointed)


def gathers(half: fx.GraphModule) -> int:
    return sum("all_gather_into_tensor" in str(node.target) for node in half.graph.nodes)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_is_saved_is_what_was_planned_to_the_byte(checkpointed: bool) -> None:
    """With the tags of the model's own checkpoint, equal views of one value differ in their tags: merging them saved 64
    hidden states that the backward had no use for."""
    made = sac("recompute", checkpointed=checkpointed)
    planned = saved_and_recomputed(made.plan)
    assert made.audit.agrees
    assert made.audit.saved_bytes == planned.saved_bytes
    assert made.audit.saved == tuple(made.plan.facts.names[row] for row in planned.saved)
    if not checkpointed:
        assert made.audit.saved_bytes == LAYERS * SAVED_PER_BLOCK


def test_each_weight_is_gathered_again() -> None:
    """290 lines of the forward run again; the recording has 125 gathers of its own in the backward, and the rest are
    those of activations."""
    made = sac("auto", checkpointed=False)
    assert made.audit.agrees
    assert gathers(made.forward) == 356
    again = [name for name in made.audit.recomputed if name.startswith("all_gather_into_tensor")]
    assert gathers(made.backward) == 125 + len(again)
    assert len(again) >= 290
    # Left alone it moves 93 gathers of weights there and saves what they gather, whatever FSDP's line says.
    forward = {made.plan.facts.names[row] for row in made.plan.facts.forward}
    assert set(made.audit.saved) <= forward
    assert made.audit.saved_bytes >= LAYERS * SAVED_PER_BLOCK - 16 * 2**20
