"""All ranks of a mesh in one process: their graphs, plans that they make together, and the graphs run together."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from math import prod
from typing import Any
from unittest import mock

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, fx

from policylang.backends import rewriting, runtime
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind, Group, Mesh
from policylang.language.syntax import Policy
from policylang.planning.capabilities import HALF
from policylang.planning.edits.other_ranks import Proposal, compared
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.torch_compat import distributed
from tests.support.edited import assert_facts_hold
from tests.support.lines import FakeGraph
from tests.support.sharded import ALL_GATHER, REDUCE_SCATTER

AXES = ("a", "b", "c")
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
ATEN = torch.ops.aten


# --- the graph of one rank ------------------------------------------------------------------------------------------


@frozen
class Place:
    """A rank on a mesh whose ranks are counted row by row."""

    shape: tuple[int, ...]
    rank: int

    @property
    def at(self) -> tuple[int, ...]:
        return list(product(*map(range, self.shape)))[self.rank]

    def group(self, axis: int) -> tuple[int, ...]:
        step = prod(self.shape[axis + 1 :])
        first = self.rank - self.at[axis] * step
        return tuple(first + place * step for place in range(self.shape[axis]))

    @property
    def groups(self) -> dict[str, tuple[int, ...]]:
        """As torch names them: another name for every group, whatever the axis."""
        return {f"{AXES[axis]}{self.group(axis)[0]}": self.group(axis) for axis in range(len(self.shape))}

    @property
    def mesh(self) -> Mesh:
        return Mesh(AXES[: len(self.shape)], self.shape, tuple(range(prod(self.shape))))


class Builder(FakeGraph):
    """A graph of one rank, operator by operator; all of it runs in the backward."""

    def __init__(self, place: Place, shard: tuple[int, ...]) -> None:
        super().__init__(shard)
        self.place = place

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.extra(target, *args, **kwargs)
        node.meta["partitioner_tag"] = "is_backward"
        return node

    def group(self, axis: int) -> str:
        return f"{AXES[axis]}{self.place.group(axis)[0]}"

    def gather(self, value: fx.Node, axis: int, dim: int = 0, turned: int = 0) -> fx.Node:
        """``turned``: by how many pieces the order is off in which they are joined along another dimension."""
        size = self.place.shape[axis]
        whole = self.call(WAIT, self.call(ALL_GATHER, value, size, self.group(axis)))
        if dim == 0:
            return whole
        split = self.call(ATEN.split.Tensor, whole, whole.meta["val"].shape[0] // size)
        pieces = [self.call(operator.getitem, split, index) for index in range(size)]
        return self.call(ATEN.cat.default, [*pieces[turned:], *pieces[:turned]], dim)

    def scatter(self, value: fx.Node, axis: int) -> fx.Node:
        return self.call(WAIT, self.call(REDUCE_SCATTER, value, "sum", self.place.shape[axis], self.group(axis)))

    def reduce(self, value: fx.Node, axis: int) -> fx.Node:
        return self.call(WAIT, self.call(ALL_REDUCE, value, "sum", self.group(axis)))

    def cut(self, value: fx.Node, dim: int, part: int, count: int, piece: bool = False) -> fx.Node:
        length = value.meta["val"].shape[dim] // count
        if piece:
            return self.call(operator.getitem, self.call(ATEN.split.Tensor, value, length, dim), part)
        return self.call(ATEN.slice.Tensor, value, dim, part * length, (part + 1) * length)


Program = Callable[[Builder], Sequence[fx.Node]]
"""What a rank traces; what it returns are the graph's outputs."""


@define(eq=False)
class EveryRank:
    """One program on all ranks of a mesh."""

    shape: tuple[int, ...]
    program: Program
    shard: tuple[int, ...] = (4, 4)
    known: bool = True
    """Whether a mesh is known that says which groups the others have."""
    graphs: dict[int, fx.GraphModule] = field(factory=dict)
    groups: dict[int, dict[str, tuple[int, ...]]] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for rank in range(prod(self.shape)):
            builder = Builder(Place(self.shape, rank), self.shard)
            self.graphs[rank] = builder.module(*self.program(builder))
            self.groups[rank] = builder.place.groups

    def facts(self, rank: int) -> Facts:
        place = Place(self.shape, rank)
        known = {name: Group(name, ranks, len(ranks)) for name, ranks in self.groups[rank].items()}
        facts = collect(self.graphs[rank], kind=GraphKind.BACKWARD, groups=known)
        return evolve(facts, rank=rank, meshes=(place.mesh,) if self.known else ())

    def alone(self, policy: Policy) -> dict[int, Plan]:
        """The plan of each rank that can ask nobody."""
        return {rank: plan(policy, self.facts(rank), HALF) for rank in self.graphs}

    def together(self, policy: Policy) -> dict[int, Plan]:
        """The plans of ranks that settle their edits."""
        table = _Table(len(self.graphs))
        found: dict[int, Plan] = {}
        errors: list[BaseException] = []

        def run(rank: int, facts: Facts) -> None:
            try:
                found[rank] = plan(policy, facts, HALF, ranks=_Seat(table, rank))
            except BaseException as error:
                errors.append(error)
                table.barrier.abort()

        threads = [threading.Thread(target=run, args=(rank, self.facts(rank))) for rank in self.graphs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return {rank: found[rank] for rank in sorted(found)}

    def carry_out(self, plans: Mapping[int, Plan]) -> None:
        """Rewrite every rank's graph; what comes out is what was planned, to the last column of its facts."""
        for rank, gm in self.graphs.items():
            with ExitStack() as stack:
                stack.enter_context(mock.patch.object(distributed, "group_backend", return_value="gloo"))
                stack.enter_context(mock.patch.object(runtime, "ensure_groups"))
                made = rewriting.apply_edits(gm, plans[rank])
                self.groups[rank].update({order.name: order.ranks for order in made})
                known = {name: Group(name, ranks, len(ranks)) for name, ranks in self.groups[rank].items()}
                assert_facts_hold(gm, plans[rank], groups=known)

    def run(self) -> dict[int, list[Tensor]]:
        """What every rank's graph returns, for shards of whole numbers, other ones on each rank."""
        count = prod(self.shard)
        shards = {rank: torch.arange(count).reshape(self.shard) + 1000.0 * rank for rank in self.graphs}
        return simulated({rank: (gm, self.groups[rank]) for rank, gm in self.graphs.items()}, shards)


@define(eq=False)
class _Table:
    count: int
    offered: dict[int, tuple[Proposal, ...]] = field(factory=dict)
    barrier: threading.Barrier = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.barrier = threading.Barrier(self.count)


@frozen
class _Seat:
    table: _Table
    rank: int

    def unshared(self, offers: Sequence[Proposal]) -> Mapping[str, str]:
        self.table.offered[self.rank] = tuple(offers)
        self.table.barrier.wait(60)
        by_offers: dict[tuple[Proposal, ...], list[int]] = {}
        for rank in sorted(self.table.offered):
            by_offers.setdefault(self.table.offered[rank], []).append(rank)
        self.table.barrier.wait(60)
        return compared(by_offers)


# --- running graphs against each other ------------------------------------------------------------------------------


@frozen
class _Call:
    """A rank that waits in a collective."""

    target: Any
    ranks: tuple[int, ...]
    value: Tensor


def simulated(
    graphs: Mapping[int, tuple[fx.GraphModule, Mapping[str, tuple[int, ...]]]], shards: Mapping[int, Tensor]
) -> dict[int, list[Tensor]]:
    """Run the graphs of all ranks; a collective runs once all of its ranks have come to it, as in any backend.

    Raises ``AssertionError`` where ranks wait for each other for ever.
    """
    running = {rank: _rank(gm, groups, shards[rank]) for rank, (gm, groups) in graphs.items()}
    waiting: dict[int, _Call] = {}
    results: dict[int, list[Tensor]] = {}

    def go_on(rank: int, value: Tensor | None) -> None:
        try:
            waiting[rank] = running[rank].send(value)
        except StopIteration as done:
            results[rank] = done.value

    for rank in running:
        go_on(rank, None)
    while waiting:
        calls = {(call.target, call.ranks) for call in waiting.values()}
        ready = [key for key in calls if all(_is_in(waiting.get(rank), key) for rank in key[1])]
        assert ready, f"ranks hang: { ({rank: (str(call.target), call.ranks) for rank, call in waiting.items()}) }"
        for target, ranks in ready:
            values = [waiting.pop(rank).value for rank in ranks]
            given = _together(target, values)  # before any of them goes on, and may write to what it gave
            for rank, value in zip(ranks, given, strict=True):
                go_on(rank, value)
    return results


def _together(target: Any, values: Sequence[Tensor]) -> list[Tensor]:
    """What each rank of a group gets of a collective."""
    if target is ALL_GATHER:
        return [torch.cat(list(values)) for _ in values]
    total = sum(values[1:], values[0].clone())
    parts = [total] * len(values) if target is ALL_REDUCE else total.chunk(len(values))
    return [part.clone() for part in parts]


def lies_as(one: Tensor, other: Tensor) -> bool:
    """Whether two values have their elements in the same places of memory."""
    steps = [
        [step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1] for value in (one, other)
    ]
    return one.shape == other.shape and steps[0] == steps[1]


def _is_in(call: _Call | None, key: tuple[Any, tuple[int, ...]]) -> bool:
    return call is not None and (call.target, call.ranks) == key


def _rank(
    gm: fx.GraphModule, groups: Mapping[str, tuple[int, ...]], shard: Tensor
) -> Generator[_Call, Tensor, list[Tensor]]:
    values: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            values[node] = shard
        elif node.op == "output":
            return list(fx.map_arg(node.args[0], values.__getitem__))
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.target in (ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER):
                assert args[0].is_contiguous()
                values[node] = yield _Call(node.target, groups[args[-1]], args[0])
            else:
                values[node] = args[0] if node.target is WAIT else node.target(*args, **kwargs)
                if isinstance(values[node], Tensor):
                    assert lies_as(values[node], node.meta["val"]), node
    raise AssertionError("a graph without an output")
