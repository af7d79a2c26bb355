"""Finds the device meshes that a graph's process groups belong to.

A rank's graph names that rank's own groups. Which ranks the others' groups have follows from the mesh, which no graph
holds. It is the one that the user passes, or else one of those that the program has made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from policylang.graph.facts import Group, Mesh
from policylang.torch_compat import process_groups


def meshes_of(groups: Mapping[str, Group], given: Any = None) -> tuple[Mesh, ...]:
    """The mesh that was given, or else those along one dimension of which the graph has a group, in a fixed order."""
    if not groups:
        return ()
    if given is not None:
        described = _described(given)
        return () if described is None else (described,)
    along = {frozenset(group.ranks) for group in groups.values()}
    around = {mesh for mesh in map(_described, process_groups.known_meshes()) if mesh is not None}
    fitting = [mesh for mesh in around if not along.isdisjoint(map(frozenset, _rows(mesh)))]
    return tuple(sorted(fitting, key=lambda mesh: (-len(mesh.shape), mesh.shape, mesh.ranks, mesh.dims)))


def _described(mesh: Any) -> Mesh | None:
    layout = process_groups.mesh_layout(mesh)
    return None if layout is None else Mesh(*layout)


def _rows(mesh: Mesh) -> Iterator[tuple[int, ...]]:
    """The ranks along each dimension, for every place in the others."""
    strides = [prod(mesh.shape[dim + 1 :]) for dim in range(len(mesh.shape))]
    for dim, size in enumerate(mesh.shape):
        others = [range(1) if each == dim else range(length) for each, length in enumerate(mesh.shape)]
        for at in product(*others):
            first = sum(place * stride for place, stride in zip(at, strides, strict=True))
            yield tuple(mesh.ranks[first + place * strides[dim]] for place in range(size))
