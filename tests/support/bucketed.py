"""Programs of all ranks whose collectives are put together: how they are planned, carried out and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from attrs import evolve
from torch import Tensor, fx

import policylang
from policylang.graph.blocks import blocks_of
from policylang.graph.facts import Facts
from policylang.language.syntax import Selector
from policylang.planning.capabilities import HALF
from policylang.planning.edits.edit_planner import SelectRows
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.graph_edit import Edits
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from tests.support.edited import AllAlike
from tests.support.every_rank import ATEN, Builder, EveryRank

CAST = torch.ops.prims.convert_element_type.default
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def picking(blocks: Mapping[str, int] | None = None) -> SelectRows:
    """The collectives that a selector names; ``blocks``: the numbers of nodes, else those of the graph."""

    def pick(facts: Facts, selector: Selector) -> tuple[Sequence[int], Sequence[int]]:
        said = selector.span.one_line
        rows = [
            row
            for row, target in enumerate(facts.targets)
            if facts.group_names[row]
            and ("collective" in said or any(kind in said and kind in target for kind in KINDS))
        ]
        if blocks is None:
            return rows, blocks_of(facts).block_of
        return rows, [blocks.get(name, -1) for name in facts.names]

    return pick


def bucketed(ranks: EveryRank, text: str, blocks: Mapping[str, int] | None = None) -> dict[int, Plan]:
    policy = policylang.parse(text)
    found = {}
    for rank in ranks.graphs:
        made = plan(policy, ranks.facts(rank), HALF, ranks=AllAlike())
        edits, facts = plan_edits(policy, made.facts, HALF, AllAlike(), picking(blocks))
        found[rank] = evolve(made, edits=edits, facts=facts)
    return found


def carried_out(ranks: EveryRank, text: str, blocks: Mapping[str, int] | None = None) -> Edits:
    """The buckets of a program, carried out on all ranks: each returns what it returned, in memory of its own."""
    before = ranks.run()
    plans = bucketed(ranks, text, blocks)
    assert len({tuple(made.edits.words()) for made in plans.values()}) == 1
    ranks.carry_out(plans)
    after = ranks.run()
    for rank, values in before.items():
        for one, other in zip(values, after[rank], strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        assert shared(values) == shared(after[rank])
    return plans[0].edits


def shared(values: Sequence[Tensor]) -> set[tuple[int, int]]:
    """Which of some values lie in the same memory."""
    memory = [value.untyped_storage().data_ptr() for value in values]
    pairs = ((one, other) for one in range(len(values)) for other in range(one))
    return {(one, other) for one, other in pairs if memory[one] == memory[other]}


def targets(ranks: EveryRank) -> Counter[str]:
    nodes = ranks.graphs[0].graph.nodes
    return Counter(str(node.target).split(".")[1] for node in nodes if str(node.target).startswith("_c10d"))


def shard_of(builder: Builder, start: int, *shape: int, dtype: torch.dtype | None = None) -> fx.Node:
    """Some of what a rank is given, as a shard of its own, cast where it is used."""
    flat = builder.call(ATEN.view.default, builder.shard, [builder.shard.meta["val"].numel()])
    part = builder.call(ATEN.slice.Tensor, flat, 0, start, start + torch.Size(shape).numel())
    part = builder.call(ATEN.view.default, part, list(shape))
    return part if dtype is None else builder.call(CAST, part, dtype)
