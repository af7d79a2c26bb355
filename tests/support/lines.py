"""Lines of gathers and layout operators by hand, on the mesh that a test wants, as facts and as graphs."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed._functional_collectives  # defines the operators
from attrs import evolve
from torch import fx
from torch._subclasses import FakeTensorMode

import policylang
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind, Group, Mesh
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.other_ranks import Ranks
from policylang.planning.graph_edit import Edits
from policylang.planning.planner import plan

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
