"""The private names of torch.distributed that process groups and meshes stand on."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from attrs import frozen

from policylang.torch_compat.graphs import outside_of_modes
from policylang.torch_compat.missing import require


@frozen
class KnownGroup:
    """A process group that this process belongs to."""

    name: str
    ranks: tuple[int, ...]
    """Global, in group order."""
    backend: str
    """As ``init_process_group`` and ``new_group`` take it: ``nccl``, ``cpu:gloo,cuda:nccl``."""
    description: str


def known_groups() -> Iterator[KnownGroup]:
    """Every process group that this process belongs to, oldest first.

    Private because the table of groups is; torch offers only the way from a group to its ranks.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    world = _c10d()._world
    for group, name in list(world.pg_names.items()):
        ranks = tuple(dist.get_process_group_ranks(group))
        yield KnownGroup(str(name), ranks, str(world.pg_map[group][0]), str(group.group_desc))


def group_backend(name: str) -> str:
    """What carries data in the group that a collective names, as :class:`KnownGroup` says it.

    Private because functional collectives name a group by a string and there is no public way back.
    """
    c10d = _c10d()
    return str(c10d._world.pg_map[c10d._resolve_process_group(name)][0])


def known_meshes() -> list[Any]:
    """Every ``DeviceMesh`` of this process, in no particular order.

    Neither public nor private: torch keeps no list of them, and only what refers to their class tells where they are.
    """
    if not dist.is_available() or not dist.is_initialized():
        return []
    from torch.distributed.device_mesh import DeviceMesh

    # of the class itself: a proxy that only says it were one is none
    return [found for found in gc.get_referrers(DeviceMesh) if issubclass(type(found), DeviceMesh)]


def mesh_layout(mesh: Any) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Names and sizes of a mesh's dimensions and its global ranks in row-major order; None where this rank is not in
    it, or where its groups are not there any more, as after the default group was destroyed."""
    place = mesh.get_coordinate()
    if place is None:
        return None
    try:
        groups = [frozenset(dist.get_process_group_ranks(group)) for group in mesh.get_all_groups()]
    except (RuntimeError, ValueError, LookupError, AssertionError):
        return None
    with outside_of_modes():
        ranks = mesh.mesh
        for dim, members in enumerate(groups):
            row = ranks[tuple(slice(None) if each == dim else at for each, at in enumerate(place))]
            if members != frozenset(row.tolist()):  # a later default group has groups of the same names
                return None
    return mesh_order(mesh)


def mesh_order(mesh: Any) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """Names and sizes of a ``DeviceMesh``'s dimensions, and its global ranks in row-major order.

    Not private. Dimensions without names are called as torch calls them in the descriptions of their groups. A mesh
    makes its tensor of ranks under the modes that are active: a ``FakeTensorMode`` would leave no numbers in it.
    """
    with outside_of_modes():
        ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    names = mesh.mesh_dim_names or tuple(f"dim_{dim}" for dim in range(len(mesh.shape)))
    return tuple(map(str, names)), tuple(int(size) for size in mesh.shape), ranks


def mesh_ranks(mesh: Any) -> tuple[int, ...]:
    """The global ranks of a ``DeviceMesh``, sorted."""
    return tuple(sorted(mesh_order(mesh)[2]))


def mesh_groups(mesh: Any) -> dict[str, tuple[int, ...]]:
    """This rank's groups of a mesh, one a dimension: by name, the global ranks. Over these all ranks of the mesh hang
    together. Of a mesh whose groups are not there, none."""
    try:
        return {group.group_name: tuple(dist.get_process_group_ranks(group)) for group in mesh.get_all_groups()}
    except (RuntimeError, ValueError, LookupError, AssertionError):
        return {}


def rename_group(name: str, known_as: str) -> None:
    """Let ``known_as`` stand for the group ``name`` wherever a collective names its group.

    Private because functional collectives find groups in a table by name, which has no public entry. One group may be
    there under several names.
    """
    c10d = _c10d()
    c10d._register_process_group(known_as, c10d._resolve_process_group(name))


def forget_group(name: str) -> None:
    """Take a name out of that table, if it is there."""
    with suppress(RuntimeError, ValueError):
        _c10d()._unregister_process_group(name)


def create_group(name: str, ranks: Sequence[int], backend: str) -> None:
    """Make the process group ``name`` of these ranks, in this order. Called by its members and by no other rank.

    Private because ``new_group`` names groups itself: by how many groups were made so far, which every rank of the
    world has to count alike, or (``use_local_synchronization``) by how many this rank is in, which is not the same on
    every member. A name that follows from the ranks alone is the same on every member, in every process.
    """
    c10d = _c10d()
    world, whole = c10d._world, c10d._get_default_group()
    backend = c10d.Backend(backend)
    with _not_split_off(whole):
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            backend,
            world.pg_map[whole][1],
            name,
            timeout=c10d._get_default_timeout(backend),
            group_desc="policylang",
        )
    world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(ranks)}


@contextmanager
def _not_split_off(whole: Any) -> Iterator[None]:
    """Within, a new group is not split off the default one, which every rank of the world would have to take part in.

    torch does that where a device was given to ``init_process_group``.
    """
    device = whole.bound_device_id
    if device is None:
        yield
        return
    whole.bound_device_id = None
    try:
        yield
    finally:
        whole.bound_device_id = device


def _c10d() -> Any:
    import torch.distributed.distributed_c10d as c10d

    wanted = ("_new_process_group_helper", "_register_process_group", "_resolve_process_group", "_get_default_timeout")
    why = "makes the process groups of fused collectives with torch 2.11 and later"
    require(c10d, (*wanted, "_world"), why)
    return c10d
