"""Edits of a recorded Llama-3 8B on 128 ranks: all chains that can be one gather are, and so are buckets."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch import fx
from torch._subclasses import FakeTensorMode

import policylang
from policylang.backends.rewriting import apply_edits
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind, Group, Mesh
from policylang.planning.capabilities import HALF, Capabilities
from policylang.planning.edits.edit_planner import SAME_GRAPH
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.graph.test_recorded import GATHER, facts_of_recording, rows_of
from tests.support.bucketed import CAST, KINDS, picking
from tests.support.edited import AllAlike, assert_facts_hold
from tests.support.every_rank import ATEN
from tests.support.ranks import run_ranks
from tests.support.shared_graphs import BACKWARD, JOINT, process_groups, recorded, shared_facts, shared_graph

GOLDEN = Path(__file__).parent / "refused.json"
MESH = Mesh(("dp", "tp"), (16, 8), tuple(range(128)))
FUSE = "optional fuse all_gather chains"
NO_SORTED = evolve(HALF, unsorted_groups=False)


def facts_of(name: str) -> Facts:
    assert (recorded(name)["mesh"]["dims"], recorded(name)["mesh"]["shape"]) == (list(MESH.dims), list(MESH.shape))
    return evolve(facts_of_recording(name), meshes=(MESH,))


@cache
def planned(name: str, text: str = FUSE, able: Capabilities = HALF) -> Plan:
    return plan(policylang.parse(text), facts_of(name), able)


def test_every_chain_of_the_backward_is_one_gather() -> None:
    made = planned(BACKWARD)
    assert len(made.edits.done) == 93
    assert not made.edits.refused
    assert (len(rows_of(made.before, GATHER)), len(rows_of(made.facts, GATHER))) == (480, 387)
    for edit in made.edits.done:
        assert (edit.proof.ranks, edit.proof.assumed) == (128, SAME_GRAPH)
        (group,) = edit.groups
        assert group.dims == ("tp", "dp")  # tp gathers last, so it is the slow index
        assert group.ranks[:3] == (0, 8, 16)
    views = Counter(tuple(node.target.split(".")[1] for node in edit.nodes[2:]) for edit in made.edits.done)
    assert views == {("permute",): 60, ("permute", "slice", "permute"): 30, (): 2, ("slice", "permute"): 1}


def test_the_clones_splits_and_joins_of_the_chains_are_gone() -> None:
    made = planned(BACKWARD)
    gone = {
        target: len(rows_of(made.before, target)) - len(rows_of(made.facts, target))
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
        ("joint", JOINT, FUSE, HALF),
        ("backward", BACKWARD, FUSE, HALF),
        ("backward over dp", BACKWARD, f"{FUSE} over dp", HALF),
        ("backward over dp and tp", BACKWARD, f"{FUSE} over dp, tp", HALF),
        ("backward where torch sorts ranks", BACKWARD, FUSE, NO_SORTED),
    ],
)
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
        ("bucket all_gather up to 64 MiB", "all_gather", 480, 188, None),
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


# --- ranks that are processes ---------------------------------------------------------------------------------------

WEIGHTS = ((4, 6), (24,), (1, 8), (6, 2, 2))


def _on_a_rank(rank: int) -> tuple[int, list[bool], list[bool]]:
    """Weights gathered, gradients scattered and norms summed over all ranks; whether each is bitwise what it was, and
    whether it is close."""
    name = dist.group.WORLD.group_name
    graph, mode = fx.Graph(), FakeTensorMode()
    shards = [graph.placeholder(f"shard_{number}") for number in range(len(WEIGHTS))]
    for node, shape in zip(shards, WEIGHTS, strict=True):
        with mode:
            node.meta["val"] = torch.empty(shape)

    def call(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        with mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda read: read.meta["val"]))
        node.meta["partitioner_tag"] = "is_backward"
        return node

    ops = torch.ops._c10d_functional
    results = []
    for shard in shards:
        cast = call(CAST, shard, torch.bfloat16)
        whole = call(ops.wait_tensor.default, call(ops.all_gather_into_tensor.default, cast, 4, name))
        results.append(call(ATEN.mul.Tensor, whole, 2))
        grad = call(ATEN.exp.default, call(CAST, whole, torch.float32))
        summed = call(ops.wait_tensor.default, call(ops.reduce_scatter_tensor.default, grad, "sum", 4, name))
        results.append(call(ATEN.neg.default, summed))
        norm = call(ATEN.sum.default, call(ATEN.sin.default, shard))
        results.append(call(ops.wait_tensor.default, call(ops.all_reduce.default, norm, "sum", name)))
    graph.output(tuple(results))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    torch.manual_seed(rank)
    given = [torch.randn(shape) for shape in WEIGHTS]
    before = gm(*given)
    policy = policylang.parse("".join(f"bucket {kind} up to 1 MiB\n" for kind in KINDS))
    facts = collect(gm, kind=GraphKind.BACKWARD)
    edits, after = plan_edits(policy, facts, HALF, AllAlike(), picking())
    made = evolve(plan(policylang.parse("undecided -> save"), facts, HALF), policy=policy, edits=edits, facts=after)
    apply_edits(gm, made)
    assert_facts_hold(gm, made)
    pairs = list(zip(before, gm(*given), strict=True))
    equal = [torch.equal(one, other) for one, other in pairs]
    return len(edits.done), equal, [torch.allclose(one, other, rtol=1e-5) for one, other in pairs]


@pytest.mark.slow
def test_buckets_of_four_processes_bring_the_same() -> None:
    for done, equal, close in run_ranks(_on_a_rank, 4):
        assert done == 3
        assert all(equal[::3])  # what was gathered, to the bit
        assert all(close)
