"""The meshes that a graph's groups belong to: the one that was passed, and those that the program has made."""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Mesh
from tests.support.chains import NAMES, Chain, shard_of, traced
from tests.support.sharded import fake_ranks


def facts_of(mesh: DeviceMesh, given: DeviceMesh | None = None) -> Facts:
    return collect(traced(partial(Chain((0, 1), "direct"), mesh), shard_of(0)), mesh=given)


def test_a_mesh_that_nobody_passed_is_found() -> None:
    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES[:2])
        assert Mesh(("dp", "tp"), (2, 4), tuple(range(8))) in facts_of(mesh).meshes


def test_the_one_that_was_passed_is_the_only_one() -> None:
    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES[:2])
        renamed = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        assert facts_of(mesh, given=mesh).meshes == (Mesh(("dp", "tp"), (2, 4), tuple(range(8))),)
        assert renamed.ndim == 2


def test_a_mesh_that_has_none_of_the_groups_is_not_looked_at() -> None:
    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=NAMES[:2])
        cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
        others = DeviceMesh("cpu", torch.tensor([[4, 5], [6, 7]]))
        pairs = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]))
        found = facts_of(mesh).meshes
        assert Mesh(NAMES, (2, 2, 2), tuple(range(8))) in found, "the pairs of dp are groups of both"
        assert cube.ndim == 3
        assert others.get_coordinate() is None
        assert pairs.get_coordinate() is not None
        assert not [each for each in found if len(each.ranks) == 4 and len(each.shape) == 2]


def test_a_mesh_of_a_world_that_is_gone_does_not_count() -> None:
    """Its groups have the names of others now."""
    with fake_ranks(8):
        gone = init_device_mesh("cpu", (4, 2), mesh_dim_names=("old", "older"))
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2))
        found = facts_of(mesh).meshes
        assert Mesh(("dim_0", "dim_1"), (2, 2), (0, 1, 2, 3)) in found
        assert not [each for each in found if "old" in each.dims]
    assert gone.ndim == 2


def test_a_graph_without_collectives_has_no_mesh() -> None:
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2))
        assert collect(traced(torch.sin, shard_of(0)), mesh=mesh).meshes == ()
