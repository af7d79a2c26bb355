"""Lines and chains of gathers by hand and by DTensor, buckets, and all ranks of a mesh in one process."""

from __future__ import annotations

import operator
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from itertools import permutations, product
from math import prod
from typing import Any
from unittest import mock

import torch
import torch.distributed._functional_collectives  # defines the operators
import torch.distributed._functional_collectives as funcol
from attrs import define, evolve, field, frozen
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize

import policylang
from policylang.backends import rewriting, runtime
from policylang.graph.blocks import blocks_of
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind, Group, Mesh
from policylang.language.syntax import Policy, Selector
from policylang.planning.capabilities import HALF, Capabilities
from policylang.planning.edits.edit_planner import SelectRows
from policylang.planning.edits.other_ranks import Proposal, Ranks, compared
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.graph_edit import Edits
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.torch_compat import distributed
from tests.support.edited import AllAlike, assert_facts_hold
from tests.support.sharded import ALL_GATHER, REDUCE_SCATTER

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ABLE = Capabilities("a forward or backward graph", rewrites=True, undecided="auto")
DIMS = ("dp", "tp", "cp", "ep")


def mesh_of(*shape: int) -> Mesh:
    """Ranks counted row by row."""
    return Mesh(DIMS[: len(shape)], shape, tuple(range(prod(shape))))


def groups_of(mesh: Mesh, rank: int) -> dict[str, Group]:
    """A rank's group along each dimension, called after it."""
    grid = torch.tensor(mesh.ranks).reshape(mesh.shape)
    at = (grid == rank).nonzero()[0].tolist()
    found = {}
    for dim, name in enumerate(mesh.dims):
        row = grid[tuple(slice(None) if other == dim else place for other, place in enumerate(at))]
        found[name] = Group(name, tuple(row.tolist()), len(row))
    return found


class FakeGraph:
    """A graph that is built call by call, with a fake value for each node."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.shard = self.graph.placeholder("shard")
        with self.mode:
            self.shard.meta["val"] = torch.empty(*shape)

    def extra(self, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        called = name or getattr(target, "overloadpacket", target).__name__
        node = self.graph.create_node("call_function", target, args, kwargs, name=called)
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda read: read.meta["val"]), **kwargs)
        return node

    def module(self, *returned: fx.Node) -> fx.GraphModule:
        self.graph.output(returned)
        return fx.GraphModule(torch.nn.Module(), self.graph)


class Line(FakeGraph):
    """A graph of one value after the other. Whatever is asked of it is done to the node made last; ``extra`` makes a
    node beside the line."""

    def __init__(self, mesh: Mesh, shape: Sequence[int], *, rank: int = 0, known: bool = True) -> None:
        super().__init__(shape)
        self.mesh = mesh
        self.groups = groups_of(mesh, rank)
        self.known = known
        self.node = self.shard

    def call(self, target: Any, *args: Any, of: fx.Node | None = None, name: str | None = None) -> Line:
        self.node = self.extra(target, self.node if of is None else of, *args, name=name)
        return self

    def gather(self, dim: str, *, wait: bool = True) -> Line:
        group = self.groups[dim]
        self.call(c10d.all_gather_into_tensor.default, group.size, dim)
        return self.call(c10d.wait_tensor.default) if wait else self

    def gather_along(self, dim: str, along: int) -> Line:
        """As funcol does it: gathered along the leading dimension, split and joined."""
        self.contiguous().gather(dim)
        return self.rejoin(self.groups[dim].size, along) if along else self

    def rejoin(self, count: int, along: int) -> Line:
        length = self.node.meta["val"].shape[0] // count
        split = self.extra(aten.split.Tensor, self.node, length)
        pieces = [self.extra(operator.getitem, split, index) for index in range(count)]
        self.node = self.extra(aten.cat.default, pieces, along)
        return self

    def contiguous(self) -> Line:
        if not self.node.meta["val"].is_contiguous():
            self.node = self.extra(aten.clone.default, self.node, memory_format=torch.contiguous_format)
        return self

    def permute(self, *dims: int) -> Line:
        return self.call(aten.permute.default, list(dims))

    def view(self, *shape: int) -> Line:
        return self.call(aten.view.default, list(shape))

    def done(self, *more: fx.Node) -> fx.GraphModule:
        """The line ends in a matrix product, or in a sum where it is no matrix, and with what else is returned."""
        value = self.node.meta["val"]
        if value.ndim == 2:
            last = self.extra(aten.mm.default, self.node, self.extra(aten.t.default, self.node))
        else:
            last = self.extra(aten.sin.default, self.node)
        return self.module(last, *more)

    def facts(self, *more: fx.Node, kind: GraphKind = GraphKind.FORWARD) -> Facts:
        found = collect(self.done(*more), kind=kind, groups=self.groups)
        return evolve(found, meshes=(self.mesh,) if self.known else (), rank=None)


def planned(
    facts: Facts, text: str = "optional fuse all_gather chains", able: Capabilities = ABLE, ranks: Ranks | None = None
) -> Edits:
    return plan(policylang.parse(text), facts, able, ranks=ranks).edits


def reasons(facts: Facts, text: str = "optional fuse all_gather chains", able: Capabilities = ABLE) -> list[str]:
    """The reasons why nothing in a graph is fused."""
    found = planned(facts, text, able)
    assert not found.done
    return [each.reason for each in found.refused]


NAMES = ("dp", "tp", "cp")
FORMS = ("direct", "permuted", "joined")


def device_mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[: len(shape)])


@frozen
class Chain:
    """Gathers over mesh dimensions, the first one first.

    ``direct``: each along the leading dimension, the next one right after. ``permuted``: with a pair of permutes that
    cancel in between. ``joined``: along another dimension each, so that each but the first is split and joined again.
    """

    dims: tuple[int, ...]
    form: str

    def __call__(self, mesh: DeviceMesh, shard: Tensor) -> Tensor:
        value = shard
        for place, dim in enumerate(self.dims):
            along = place % value.ndim if self.form == "joined" else 0
            value = gather(value, along, mesh, dim)
            if self.form == "permuted" and place + 1 < len(self.dims):
                value = value.permute(1, 2, 0).permute(2, 0, 1)
        return value + 1

    def __str__(self) -> str:
        return f"{self.form} {'→'.join(NAMES[dim] for dim in self.dims)}"


def gather(value: Tensor, along: int, mesh: DeviceMesh, dim: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the older name of the function, which torch 2.11 has too
        gathered: Tensor = funcol.all_gather_tensor(value, along, (mesh, dim))
        return gathered


def chains(ndim: int) -> list[Chain]:
    """Every ordered pair and triple of a mesh's dimensions, in every form."""
    lengths = range(2, ndim + 1)
    return [Chain(dims, form) for length in lengths for dims in permutations(range(ndim), length) for form in FORMS]


def traced(function: Callable[[Tensor], Tensor], example: Tensor) -> fx.GraphModule:
    def once(value: Tensor) -> Tensor:  # a plain function of one argument, whatever is given
        return function(value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DTensor advises to flatten the mesh; that is what is tested
        return make_fx(once)(example)


def shard_of(rank: int) -> Tensor:
    """Different on every rank, in every place."""
    return torch.arange(24.0).reshape(4, 3, 2) + 1000 * rank


def gathers(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=ALL_GATHER))


def scatters(gm: fx.GraphModule) -> list[fx.Node]:
    return list(gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER))


class Whole(nn.Module):
    """A parameter from its shards; the gradients of all ranks are summed and scattered."""

    def forward(self, sharded: DTensor) -> Tensor:
        placements: Sequence[Placement] = [Replicate()] * sharded.device_mesh.ndim
        sums = [Partial()] * sharded.device_mesh.ndim
        return sharded.redistribute(placements=placements).to_local(grad_placements=sums)


class Layers(nn.Module):
    """Products of whole numbers, small enough for sums to be exact in any order."""

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Placement], layers: int = 2, width: int = 16) -> None:
        super().__init__()
        self.mesh = mesh
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        for layer in self.layers:
            weight = torch.randint(-2, 3, (width, width), generator=generator).float()
            layer.weight = nn.Parameter(distribute_tensor(weight, mesh, placements))
            parametrize.register_parametrization(layer, "weight", Whole(), unsafe=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def placements_of(ndim: int, kind: str) -> list[Placement]:
    """``one``: every mesh dimension cuts the leading dimension; ``both``: they take turns."""
    return [Shard(0 if kind == "one" else dim % 2) for dim in range(ndim)]


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
        at = {rank: (call.target, call.ranks) for rank, call in waiting.items()}
        ready = [key for key in set(at.values()) if all(at.get(rank) == key for rank in key[1])]
        assert ready, f"ranks hang: {at}"
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
    pairs = (zip(value.shape, value.stride(), strict=True) for value in (one, other))
    steps = [[step for size, step in each if size > 1] for each in pairs]
    return one.shape == other.shape and steps[0] == steps[1]


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


CAST = torch.ops.prims.convert_element_type.default
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def picking(blocks: Mapping[str, int] | None = None) -> SelectRows:
    """The collectives that a selector names; ``blocks``: the numbers of nodes, else those of the graph."""

    def pick(facts: Facts, selector: Selector) -> tuple[Sequence[int], Sequence[int]]:
        said = selector.span.one_line
        kinds = [kind for kind in KINDS if kind in said or "collective" in said]
        grouped = ((row, facts.targets[row]) for row, name in enumerate(facts.group_names) if name)
        rows = [row for row, target in grouped if "collective" in said or any(kind in target for kind in kinds)]
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


def bucketed_shard_of(builder: Builder, start: int, *shape: int, dtype: torch.dtype | None = None) -> fx.Node:
    """Some of what a rank is given, as a shard of its own, cast where it is used."""
    flat = builder.call(ATEN.view.default, builder.shard, [builder.shard.meta["val"].numel()])
    part = builder.call(ATEN.slice.Tensor, flat, 0, start, start + torch.Size(shape).numel())
    part = builder.call(ATEN.view.default, part, list(shape))
    return part if dtype is None else builder.call(CAST, part, dtype)
