"""The figures of a recorded Llama-3 8B step on 128 ranks."""

from __future__ import annotations

from collections import Counter

import pytest

from policylang.graph.blocks import blocks_of
from policylang.graph.chains import Chains
from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase
from tests.support.shared_graphs import BACKWARD, JOINT, NAMES, ONE_DEVICE, shared_facts, shared_graph

GATHER = "_c10d_functional.all_gather_into_tensor.default"


def facts_of_recording(name: str) -> Facts:
    return shared_facts(name, True)


def rows_of(facts: Facts, target: str) -> list[int]:
    return [row for row in range(len(facts)) if facts.targets[row] == target]


@pytest.mark.parametrize(
    ("name", "nodes", "kind", "gathers"),
    [
        (ONE_DEVICE, 8_799, GraphKind.JOINT, 0),
        (JOINT, 19_655, GraphKind.JOINT, 481),
        (BACKWARD, 17_217, GraphKind.BACKWARD, 480),
    ],
)
def test_size_kind_and_gathers(name: str, nodes: int, kind: GraphKind, gathers: int) -> None:
    facts = facts_of_recording(name)
    assert len(facts) == nodes
    assert facts.kind is kind
    assert len(rows_of(facts, GATHER)) == gathers


@pytest.mark.parametrize("name", NAMES)
def test_phases_are_the_tags_of_the_recording(name: str) -> None:
    gm, facts = shared_graph(name), facts_of_recording(name)
    differing = [
        node.name
        for row, node in enumerate(gm.graph.nodes)
        if node.op == "call_function"
        and (node.meta.get("partitioner_tag") == "is_backward") != (facts.phases[row] == Phase.BACKWARD)
    ]
    # one alias of the tangent, tagged forward though it depends on it
    assert len(differing) == (1 if name == ONE_DEVICE else 0)


def test_gathers_of_parameters() -> None:
    """290 of the 291 parameters are gathered in the forward, each once, each of them in one line from the parameter;
    so is the table of rotary frequencies, a buffer. The other 65 gather activations over the tensor-parallel group.
    """
    facts = facts_of_recording(JOINT)
    chains = Chains(facts)
    forward = facts.by_target[GATHER]
    assert len(forward) == 356
    of_parameters = [row for row in forward if chains.from_parameter_mask[row]]
    assert len(of_parameters) == 290
    assert Counter(facts.group_names[row] for row in of_parameters) == {"1": 190, "0": 100}
    others = [row for row in forward if not chains.from_parameter_mask[row]]
    assert Counter(facts.group_names[row] for row in others) == {"9": 65, "1": 1}
    (frequencies,) = [row for row in others if facts.group_names[row] == "1"]
    assert facts.input_kinds[facts.inputs[frequencies][0]] != InputKind.PARAMETER


def test_gathers_in_one_line_from_some_input_forward_and_backward() -> None:
    """384 of the 481: the forward's 290 and one buffer, and 93 of weights that the backward gathers over its group."""
    facts = facts_of_recording(JOINT)
    single = bytearray(len(facts))
    for row in range(len(facts)):
        inputs = facts.inputs[row]
        if facts.ops[row] == "call_function" and len(inputs) == 1:
            kind = facts.input_kinds[inputs[0]]
            single[row] = single[inputs[0]] or kind not in (InputKind.NOT_AN_INPUT, InputKind.TANGENT)
    assert sum(single[row] for row in rows_of(facts, GATHER)) == 384


def test_process_groups_have_their_ranks() -> None:
    facts = facts_of_recording(JOINT)
    assert {name: group.size for name, group in facts.groups.items()} == {"1": 16, "9": 8, "0": 128}
    assert facts.groups["1"].ranks[:3] == (0, 8, 16)


def test_waits_follow_their_collectives() -> None:
    facts = facts_of_recording(JOINT)
    for row in rows_of(facts, "_c10d_functional.wait_tensor.default"):
        assert facts.owners[row] == facts.inputs[row][0]
        assert facts.has(facts.owners[row], Flag.COLLECTIVE)


def test_blocks_are_the_layers() -> None:
    facts = facts_of_recording(JOINT)
    regions = blocks_of(facts)
    assert len(regions.names) == 32
    bare = Facts(**{**vars_of(facts), "ac_regions": [None] * len(facts)})
    assert blocks_of(bare).names == tuple(f"layers.{layer}" for layer in range(32))


def vars_of(facts: Facts) -> dict[str, object]:
    import attrs

    return {each.name: getattr(facts, each.name) for each in attrs.fields(Facts)}


def test_module_paths_and_parameter_names_are_the_models() -> None:
    facts = facts_of_recording(ONE_DEVICE)
    assert facts.input_names[:2] == ["tok_embeddings.weight", "layers.0.attention.wq.weight"]
    assert "layers.31.attention.wq" in set(facts.modules)
    assert not any("_" in part and part.startswith("_") for path in set(facts.modules) for part in path.split("."))


def test_attention_in_the_recording_draws_no_random_numbers() -> None:
    facts = facts_of_recording(JOINT)
    rows = rows_of(facts, "aten._scaled_dot_product_flash_attention.default")
    assert len(rows) == 32
    assert not any(facts.has(row, Flag.RANDOM) for row in rows)


def test_the_users_tags_are_read() -> None:
    facts = facts_of_recording(JOINT)
    tags = Counter(facts.user_tags)
    assert (tags["PREFER_RECOMPUTE"], tags["MUST_SAVE"]) == (5_282, 1_860)
