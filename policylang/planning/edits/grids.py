"""Grids of ranks: those that a chain of collectives joins, and the position of each in its process groups.

A rank's graph names only its own groups. What the groups of the other ranks are follows from a mesh where one is
known. Otherwise they may be this rank's own, moved by the distance between the two ranks, as in every mesh whose ranks
are counted row by row. That is a guess: each of these ranks has to say that it has the same ranks, or nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from attrs import frozen

from policylang.graph.facts import Facts, Group, Mesh
from policylang.language.wording import joined


@frozen
class Grid:
    """Ranks by their positions in the groups of a chain's collectives."""

    shape: tuple[int, ...]
    """The sizes of the groups, in the order of the collectives."""
    ranks: tuple[int, ...]
    """Global ranks; positions count like the digits of a number whose first collective is the slowest."""
    here: tuple[int, ...]
    """The positions of the rank whose graph it is."""
    everyone: tuple[tuple[int, ...], ...]
    """The grids of all ranks, each as :attr:`ranks`, ordered by their lowest ranks; empty where not known."""
    dims: tuple[tuple[str, ...], ...]
    """The mesh dimensions of each group; empty where not known."""

    @property
    def guessed(self) -> bool:
        """Whether no mesh says which ranks these are."""
        return not self.everyone

    def ordered(self, order: Sequence[int]) -> tuple[int, ...]:
        """The ranks counted with the collectives in another order, slowest first."""
        return _slice(self.ranks, self.shape, order, self.here)

    def everyone_ordered(self, order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(_slice(ranks, self.shape, order, self.here) for ranks in self.everyone)

    def group(self, collective: int, rank: int) -> tuple[int, ...]:
        """The ranks of the group in which a rank of the grid takes part in a collective."""
        return _slice(self.ranks, self.shape, [collective], self.position(rank))

    def position(self, rank: int) -> tuple[int, ...]:
        return _unravel(self.ranks.index(rank), self.shape)


def grid_of(facts: Facts, names: Sequence[str]) -> Grid | str:
    """The grid of the groups of a chain, or a phrase that says why there is none."""
    groups = [facts.groups[name] for name in names]
    for group in groups:
        if not group.ranks:
            return f"ranks of group `{group.name}` not known"
    here = set(groups[0].ranks).intersection(*(group.ranks for group in groups[1:]))
    if len(here) > 1 and len(names) > 1:
        return f"groups {_and(names)} overlap"
    rank = next(iter(here)) if len(here) == 1 else own_rank(facts)
    if not here:
        return f"groups {_and(names)} have no rank in common"
    if rank is None or rank not in here:
        return "not known which rank's graph it is"
    mesh = _mesh_of(groups, facts.meshes, rank)
    return _translated(groups, rank) if mesh is None else _of_mesh(groups, mesh, rank)


def own_rank(facts: Facts) -> int | None:
    """The rank whose graph it is: it was told, or it is the only one that takes part in all groups of the graph."""
    if facts.rank is not None or not facts.groups:
        return facts.rank
    members = [set(group.ranks) for group in facts.groups.values()]
    common = members[0].intersection(*members[1:])
    return common.pop() if len(common) == 1 else None


def dims_of(group: Group, meshes: Sequence[Mesh]) -> tuple[str, ...]:
    """The mesh dimensions that a group spans, slow to fast; empty where nothing says so."""
    for mesh in meshes:
        for spanned in _spans(mesh, group):
            return tuple(mesh.dims[dim] for dim in spanned) if mesh.dims else ()
    return () if group.dim is None else (group.dim,)


def _translated(groups: Sequence[Group], rank: int) -> Grid | str:
    shape = tuple(group.size for group in groups)
    ranks = tuple(
        rank + sum(group.ranks[place] - rank for group, place in zip(groups, at, strict=True))
        for at in product(*map(range, shape))
    )
    names = [group.name for group in groups]
    if len(set(ranks)) != len(ranks):
        return f"groups {_and(names)} overlap"
    if min(ranks) < 0:
        return f"groups {_and(names)} form no grid"
    here = tuple(group.ranks.index(rank) for group in groups)
    dims = tuple((group.dim,) if group.dim is not None else () for group in groups)
    return Grid(shape, ranks, here, (), dims)


def _mesh_of(groups: Sequence[Group], meshes: Sequence[Mesh], rank: int) -> Mesh | None:
    for mesh in meshes:
        if rank in mesh.ranks and all(_spans(mesh, group) for group in groups):
            return mesh
    return None


def _of_mesh(groups: Sequence[Group], mesh: Mesh, rank: int) -> Grid | str:
    names = [group.name for group in groups]
    spans = _disjoint([_spans(mesh, group) for group in groups])
    if spans is None:
        return f"groups {_and(names)} overlap"
    dims = tuple(dim for span in spans for dim in span)
    others = [dim for dim in range(len(mesh.shape)) if dim not in dims]
    shape = tuple(group.size for group in groups)
    here = tuple(group.ranks.index(rank) for group in groups)
    lists = None if list(mesh.ranks) == sorted(mesh.ranks) else _Lists(mesh, groups, spans)
    grids = []
    for fixed in product(*(range(mesh.shape[dim]) for dim in others)):
        at = [0] * len(mesh.shape)
        for dim, place in zip(others, fixed, strict=True):
            at[dim] = place
        ranks = _slice(mesh.ranks, mesh.shape, dims, at)
        if lists is not None:
            ranks = lists.composed(rank if rank in ranks else min(ranks))
            if not lists.agree(Grid(shape, ranks, here, (), ())):
                return f"ranks of groups {_and(names)} gather in different orders"
        grids.append(ranks)
    mine = next(ranks for ranks in grids if rank in ranks)
    named = tuple(tuple(mesh.dims[dim] for dim in span) if mesh.dims else () for span in spans)
    return Grid(shape, mine, here, tuple(sorted(grids, key=min)), named)


class _Lists:
    """The groups of every rank of a mesh whose ranks are not counted row by row.

    torch sorts the ranks of a mesh's groups unless they are handed to it as groups; a group of the graph shows which.
    """

    def __init__(self, mesh: Mesh, groups: Sequence[Group], spans: Sequence[tuple[int, ...]]) -> None:
        self.mesh = mesh
        self.spans = spans
        self.sorted = [list(group.ranks) == sorted(group.ranks) for group in groups]
        self.place = {rank: index for index, rank in enumerate(mesh.ranks)}
        self.known: dict[tuple[int, int], tuple[int, ...]] = {}

    def ranks(self, collective: int, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's group, in group order."""
        key = collective, rank
        if key not in self.known:
            at = _unravel(self.place[rank], self.mesh.shape)
            found = _slice(self.mesh.ranks, self.mesh.shape, self.spans[collective], at)
            self.known[key] = tuple(sorted(found)) if self.sorted[collective] else found
        return self.known[key]

    def composed(self, rank: int) -> tuple[int, ...]:
        """Whose shards a rank gets, by their places: each gather brings what the members of its group have by then."""
        sizes = [len(self.ranks(collective, rank)) for collective in range(len(self.spans))]
        found = []
        for at in product(*map(range, sizes)):
            source = rank
            for collective in reversed(range(len(sizes))):
                source = self.ranks(collective, source)[at[collective]]
            found.append(source)
        return tuple(found)

    def agree(self, grid: Grid) -> bool:
        """Whether every rank of a grid finds itself where the grid has it."""
        return len(set(grid.ranks)) == len(grid.ranks) and all(
            grid.group(collective, rank) == self.ranks(collective, rank)
            for rank in grid.ranks
            for collective in range(len(grid.shape))
        )


def _disjoint(choices: Sequence[list[tuple[int, ...]]]) -> list[tuple[int, ...]] | None:
    """One span for each group so that no dimension is spanned twice. Dimensions of size 1 make the only choices."""
    for spans in product(*choices):
        dims = [dim for span in spans for dim in span]
        if len(set(dims)) == len(dims):
            return list(spans)
    return None


def _spans(mesh: Mesh, group: Group) -> list[tuple[int, ...]]:
    """The dimensions along which the mesh has a group, in mesh order or sorted; of a single rank any of size 1."""
    place = {rank: index for index, rank in enumerate(mesh.ranks)}
    if not group.ranks or any(rank not in place for rank in group.ranks):
        return []
    positions = [_unravel(place[rank], mesh.shape) for rank in group.ranks]
    varying = tuple(dim for dim in range(len(mesh.shape)) if len({at[dim] for at in positions}) > 1)
    if not varying:
        return [(dim,) for dim, size in enumerate(mesh.shape) if size == 1]
    found = _slice(mesh.ranks, mesh.shape, varying, positions[0])
    return [varying] if group.ranks in (found, tuple(sorted(found))) else []


def _slice(ranks: Sequence[int], shape: Sequence[int], dims: Sequence[int], start: Sequence[int]) -> tuple[int, ...]:
    """Of the ranks of a grid, those along some dimensions through a position, the first dimension slowest."""
    found, at = [], list(start)
    for places in product(*(range(shape[dim]) for dim in dims)):
        for dim, place in zip(dims, places, strict=True):
            at[dim] = place
        found.append(ranks[ravel(at, shape)])
    return tuple(found)


def ravel(at: Sequence[int], shape: Sequence[int]) -> int:
    index = 0
    for place, size in zip(at, shape, strict=True):
        index = index * size + place
    return index


def _unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    at = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        at.append(place)
    return tuple(reversed(at))


def _and(names: Iterable[str]) -> str:
    return joined([f"`{name}`" for name in names])
