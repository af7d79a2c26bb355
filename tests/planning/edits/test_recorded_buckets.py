"""Buckets of a recorded step, and of ranks that are processes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch import fx
from torch._subclasses import FakeTensorMode

import policylang
from policylang.backends.surgery.edits import carry_out
from policylang.graph.collect import collect
from policylang.graph.facts import GraphKind, Group
from policylang.planning.capabilities import HALF
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.planner import plan
from tests.support.bucketed import CAST, KINDS, picking
from tests.support.edited import AllAlike, assert_facts_hold
from tests.support.every_rank import ATEN
from tests.support.ranks import run_ranks
from tests.support.shared_graphs import BACKWARD, process_groups, shared_facts, shared_graph

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
    assert carry_out(gm, made) == ()
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
    carry_out(gm, made)
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
