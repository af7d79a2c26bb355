"""Reads the process groups that a graph's collectives name, and finds the device meshes that they belong to.

A rank's graph names that rank's own groups. Which ranks the others' groups have follows from the mesh, which no graph
holds. It is the one that the user passes, or else one of those that the program has made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from torch import fx

from policylang.graph.facts import Flag, Group, Mesh
from policylang.operators.categories import OperatorInfo, group_name
from policylang.torch_compat import distributed
from policylang.torch_compat.graphs import group_ranks

_COLLECTIVE = int(Flag.COLLECTIVE)


def group_columns(
    nodes: Sequence[fx.Node], operators: Sequence[OperatorInfo], known: Mapping[str, Group]
) -> tuple[list[str], dict[str, Group]]:
    """``Facts.group_names`` and ``Facts.groups``; a group that is not known is asked of torch.distributed."""
    names = [""] * len(nodes)
    groups: dict[str, Group] = {}
    for row, operator in enumerate(operators):
        if operator.flags & _COLLECTIVE:
            name = group_name(operator, nodes[row])
            if not name:
                continue
            if name not in groups:
                groups[name] = known.get(name) or _ask(name)
            names[row] = groups[name].name
    return names, groups


def _ask(name: str) -> Group:
    ranks = group_ranks(name)
    return Group(name, ranks, len(ranks))


def meshes_of(groups: Mapping[str, Group], given: Any = None) -> tuple[Mesh, ...]:
    """The mesh that was given, or else those along one dimension of which the graph has a group, in a fixed order."""
    if not groups:
        return ()
    if given is not None:
        described = _described(given)
        return () if described is None else (described,)
    along = {frozenset(group.ranks) for group in groups.values()}
    around = {mesh for mesh in map(_described, distributed.known_meshes()) if mesh is not None}
    fitting = [mesh for mesh in around if not along.isdisjoint(map(frozenset, _rows(mesh)))]
    return tuple(sorted(fitting, key=lambda mesh: (-len(mesh.shape), mesh.shape, mesh.ranks, mesh.dims)))


def _described(mesh: Any) -> Mesh | None:
    layout = distributed.mesh_layout(mesh)
    return None if layout is None else Mesh(*layout)


def _rows(mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """The ranks along each dimension, for every place in the others."""
    strides = [prod(mesh.shape[dim + 1 :]) for dim in range(len(mesh.shape))]
    for dim, size in enumerate(mesh.shape):
        others = [range(1) if each == dim else range(length) for each, length in enumerate(mesh.shape)]
        for at in product(*others):
            first = sum(place * stride for place, stride in zip(at, strides, strict=True))
            yield tuple(mesh.ranks[first + place * strides[dim]] for place in range(size))
