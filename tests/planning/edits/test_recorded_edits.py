"""Edits of a recorded Llama-3 8B on 128 ranks: all chains that can be one gather are, and so are buckets."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from attrs import evolve

import policylang
from policylang.backends.rewriting import apply_edits
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Group, Mesh
from policylang.planning.capabilities import HALF, Capabilities
from policylang.planning.edits.edit_planner import SAME_GRAPH
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.support.bucketed import picking
from tests.support.edited import assert_facts_hold
from tests.support.shared_graphs import BACKWARD, JOINT, process_groups, recorded, shared_facts, shared_graph
from tests.support.versions import needs_groups_in_any_order

GOLDEN = Path(__file__).parent / "refused.json"
MESH = Mesh(("dp", "tp"), (16, 8), tuple(range(128)))
GATHER = "_c10d_functional.all_gather_into_tensor.default"
FUSE = "optional fuse all_gather chains"
NO_SORTED = evolve(HALF, unsorted_groups=False)


def facts_of(name: str) -> Facts:
    assert (recorded(name)["mesh"]["dims"], recorded(name)["mesh"]["shape"]) == (list(MESH.dims), list(MESH.shape))
    return evolve(shared_facts(name, True), meshes=(MESH,))


@cache
def planned(name: str, text: str = FUSE, able: Capabilities = HALF) -> Plan:
    return plan(policylang.parse(text), facts_of(name), able)


@needs_groups_in_any_order
def test_every_chain_of_the_backward_is_one_gather() -> None:
    made = planned(BACKWARD)
    assert len(made.edits.done) == 93
    assert not made.edits.refused
    assert (made.before.targets.count(GATHER), made.facts.targets.count(GATHER)) == (480, 387)
    for edit in made.edits.done:
        assert (edit.proof.ranks, edit.proof.assumed) == (128, SAME_GRAPH)
        (group,) = edit.groups
        assert group.dims == ("tp", "dp")  # tp gathers last, so it is the slow index
        assert group.ranks[:3] == (0, 8, 16)
    views = Counter(tuple(node.target.split(".")[1] for node in edit.nodes[2:]) for edit in made.edits.done)
    assert views == {("permute",): 60, ("permute", "slice", "permute"): 30, (): 2, ("slice", "permute"): 1}


@needs_groups_in_any_order
def test_the_clones_splits_and_joins_of_the_chains_are_gone() -> None:
    made = planned(BACKWARD)
    gone = {
        target: made.before.targets.count(target) - made.facts.targets.count(target)
        for target in ("aten.clone.default", "aten.split.Tensor", "aten.cat.default", "builtin.getitem")
    }
    assert gone == {"aten.clone.default": 90, "aten.split.Tensor": 90, "aten.cat.default": 90, "builtin.getitem": 720}
    assert len(made.before) - len(made.facts) == 1120


def test_what_reads_a_fused_value_has_the_shape_that_it_had() -> None:
    made = planned(BACKWARD)
    before, after = made.before, made.facts
    for row, name in enumerate(after.names):
        if name in before.index:
            was = before.index[name]
            assert (after.shapes[row], after.dtypes[row], after.bytes[row]) == (
                before.shapes[was],
                before.dtypes[was],
                before.bytes[was],
            )
    assert all(row > max(after.inputs[row], default=-1) for row in range(len(after)))


@pytest.mark.parametrize(
    ("key", "name", "text", "able"),
    [
        pytest.param("joint", JOINT, FUSE, HALF, marks=pytest.mark.slow),
        ("backward", BACKWARD, FUSE, HALF),
        ("backward over dp", BACKWARD, f"{FUSE} over dp", HALF),
        ("backward over dp and tp", BACKWARD, f"{FUSE} over dp, tp", HALF),
        ("backward where torch sorts ranks", BACKWARD, FUSE, NO_SORTED),
    ],
)
@needs_groups_in_any_order
def test_the_reason_of_every_refusal(key: str, name: str, text: str, able: Capabilities) -> None:
    made = planned(name, text, able).edits
    found = {" → ".join(each.collectives): each.reason for each in made.refused}
    assert len(found) == len(made.refused)
    assert len(made.done) + len(found) == 93  # every gather that reads a gather has an account
    golden = json.loads(GOLDEN.read_text())
    assert found == golden[key]


# --- recorded steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "kind", "before", "after", "most"),
    [
        ("bucket all_gather per block", "all_gather", 480, 226, 2),
        ("bucket reduce_scatter per block", "reduce_scatter", 323, 101, 2),
        pytest.param("bucket all_gather up to 64 MiB", "all_gather", 480, 188, None, marks=pytest.mark.slow),
    ],
)
def test_the_collectives_of_a_recorded_backward_become_fewer(
    line: str, kind: str, before: int, after: int, most: int | None
) -> None:
    """Llama-3 8B on 128 ranks: what computes a block is told by what it reads, since its nodes name no module."""
    facts = shared_facts(BACKWARD, True)
    policy = policylang.parse(line)
    edits, found = plan_edits(policy, facts, HALF, None, picking())
    count = [sum(kind in target for target in each.targets) for each in (facts, found)]
    assert count == [before, after]
    assert all(row > max(found.inputs[row], default=-1) for row in range(len(found)))
    assert all(edit.proof.ranks == len(edit.groups[0].ranks) in (8, 16, 128) for edit in edits.done)
    assert (edits, list(found.names)) == (lambda again: (again[0], list(again[1].names)))(
        plan_edits(policy, facts, HALF, None, picking())
    )
    if most is not None:
        groups = Counter(edit.groups[0].name for edit in edits.done)
        assert max(groups.values()) <= 32


@pytest.mark.slow
@pytest.mark.parametrize("line", ["bucket all_gather per block", "bucket reduce_scatter up to 256 MiB"])
def test_a_recorded_graph_comes_out_as_planned(line: str) -> None:
    groups = {name: Group(name, ranks, len(ranks)) for name, ranks in process_groups(BACKWARD).items()}
    gm = shared_graph(BACKWARD)
    facts = collect(gm, groups=groups)
    policy = policylang.parse(line)
    edits, after = plan_edits(policy, facts, HALF, None, picking())
    made = evolve(plan(policylang.parse("undecided -> save"), facts, HALF), policy=policy, edits=edits, facts=after)
    assert len(edits.done) > 10
    assert apply_edits(gm, made) == ()
    assert_facts_hold(gm, made, groups=groups)
