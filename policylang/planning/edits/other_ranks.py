"""The process groups of other ranks, and the edits that all ranks can make: neither is in one rank's graph.

A rank's graph names only that rank's groups. A known mesh gives those of the other ranks. Otherwise they are guessed to
be this rank's groups, shifted by the distance between the two ranks, as in every row-major mesh: each of these ranks
has to confirm the guess, or nothing is done.

An edit that one rank lacks is made nowhere. The part of a value that a rank takes is a number in its graph, and may
equal the rank's position by accident; if only one rank removed its gather, the others would wait in it for ever. So
each rank proposes the rewrites that its graph allows, and the findings that they rest on. Rewrites that not all ranks
propose alike are rejected, and the rest is planned anew, until all proposals are the same, mostly in one round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Protocol

from attrs import field, frozen, mutable

from policylang.graph.facts import Facts, Group, Mesh
from policylang.language.shown import joined


@frozen
class Grid:
    """The ranks that a chain of collectives joins, by their positions in the groups."""

    shape: tuple[int, ...]
    """The sizes of the groups, in the order of the collectives."""
    ranks: tuple[int, ...]
    """Global ranks; positions are the digits of an index, the first collective's the slowest."""
    here: tuple[int, ...]
    """The positions of the graph's own rank."""
    everyone: tuple[tuple[int, ...], ...]
    """The grids of all ranks, each as :attr:`ranks`, ordered by their lowest ranks; empty where not known."""
    dims: tuple[tuple[str, ...], ...]
    """The mesh dimensions of each group; empty where not known."""

    @property
    def guessed(self) -> bool:
        """True if no mesh gives these ranks."""
        return not self.everyone

    def ordered(self, order: Sequence[int]) -> tuple[int, ...]:
        """The ranks with the collectives in another order, slowest first."""
        return _slice(self.ranks, self.shape, order, self.here)

    def everyone_ordered(self, order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        return tuple(_slice(ranks, self.shape, order, self.here) for ranks in self.everyone)

    def group(self, collective: int, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's group in a collective."""
        return _slice(self.ranks, self.shape, [collective], self.position(rank))

    def position(self, rank: int) -> tuple[int, ...]:
        return _unravel(self.ranks.index(rank), self.shape)


def grid_of(facts: Facts, names: Sequence[str]) -> Grid | str:
    """The grid of the groups of a chain, or why there is none, as a phrase."""
    groups = [facts.groups[name] for name in names]
    for group in groups:
        if not group.ranks:
            return f"ranks of group `{group.name}` not known"
    here = set(groups[0].ranks).intersection(*(group.ranks for group in groups[1:]))
    if len(here) > 1 and len(names) > 1:
        return f"groups {_and(names)} overlap"
    if not here:
        return f"groups {_and(names)} have no rank in common"
    rank = next(iter(here)) if len(here) == 1 else _rank_of_graph(facts)
    if rank is None or rank not in here:
        return "not known which rank's graph it is"
    for mesh in facts.meshes:
        if rank in mesh.ranks and all(_spans(mesh, group) for group in groups):
            return _of_mesh(groups, mesh, rank)
    return _translated(groups, rank)


def _rank_of_graph(facts: Facts) -> int | None:
    """The rank whose graph it is: from the facts, or the only rank in all groups of the graph."""
    if facts.rank is not None or not facts.groups:
        return facts.rank
    members = [set(group.ranks) for group in facts.groups.values()]
    common = members[0].intersection(*members[1:])
    return common.pop() if len(common) == 1 else None


def dims_of(group: Group, meshes: Sequence[Mesh]) -> tuple[str, ...]:
    """The mesh dimensions that a group spans, slow to fast; empty if unknown."""
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


def _of_mesh(groups: Sequence[Group], mesh: Mesh, rank: int) -> Grid | str:
    names = [group.name for group in groups]
    for spans in product(*(_spans(mesh, group) for group in groups)):  # of dimensions of size 1 there is a choice
        dims = tuple(dim for span in spans for dim in span)
        if len(set(dims)) == len(dims):
            break
    else:
        return f"groups {_and(names)} overlap"
    others = [dim for dim in range(len(mesh.shape)) if dim not in dims]
    shape = tuple(group.size for group in groups)
    here = tuple(group.ranks.index(rank) for group in groups)
    by_row = list(mesh.ranks) == sorted(mesh.ranks)
    grids = []
    for fixed in product(*(range(mesh.shape[dim]) for dim in others)):
        at = [0] * len(mesh.shape)
        for dim, place in zip(others, fixed, strict=True):
            at[dim] = place
        ranks = _slice(mesh.ranks, mesh.shape, dims, at)
        if not by_row:
            composed = _composed(mesh, groups, spans, rank if rank in ranks else min(ranks))
            if composed is None:
                return f"ranks of groups {_and(names)} gather in different orders"
            ranks = composed
        grids.append(ranks)
    mine = next(ranks for ranks in grids if rank in ranks)
    named = tuple(tuple(mesh.dims[dim] for dim in span) if mesh.dims else () for span in spans)
    return Grid(shape, mine, here, tuple(sorted(grids, key=min)), named)


def _composed(
    mesh: Mesh, groups: Sequence[Group], spans: Sequence[tuple[int, ...]], rank: int
) -> tuple[int, ...] | None:
    """The ranks whose shards a rank gets, by place, on a mesh that is not row-major: each gather brings what the
    members of its group have by then. None if a rank that takes part lacks the groups that this implies. torch sorts
    the ranks of a mesh's groups unless it is given groups; a group of the graph shows which."""
    index_of = {each: index for index, each in enumerate(mesh.ranks)}
    is_sorted = [list(group.ranks) == sorted(group.ranks) for group in groups]

    @cache
    def members(collective: int, each: int) -> tuple[int, ...]:
        found = _slice(mesh.ranks, mesh.shape, spans[collective], _unravel(index_of[each], mesh.shape))
        return tuple(sorted(found)) if is_sorted[collective] else found

    shape = tuple(len(members(collective, rank)) for collective in range(len(spans)))
    ranks = []
    for at in product(*map(range, shape)):
        source = rank
        for collective in reversed(range(len(shape))):
            source = members(collective, source)[at[collective]]
        ranks.append(source)
    grid = Grid(shape, tuple(ranks), (), (), ())
    agree = all(grid.group(each, rank) == members(each, rank) for rank in ranks for each in range(len(shape)))
    return grid.ranks if agree and len(set(ranks)) == len(ranks) else None


def _spans(mesh: Mesh, group: Group) -> list[tuple[int, ...]]:
    """The dimensions along which the mesh has a group; for a group of one rank, any of size 1."""
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
    """The ranks of a grid along some dimensions through a position, the first dimension slowest."""
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


UNASKED = "other ranks cannot be asked"


@frozen
class Proposal:
    """A rewrite, or a finding that rewrites rest on, as one rank has it."""

    name: str
    """A name that is equal on every rank."""
    terms: str
    """All of it that has to be alike."""
    among: tuple[int, ...] = ()
    """The ranks that take part in it, in order, if no mesh gives them: each of them has to propose the same."""


class Ranks(Protocol):
    """The ranks that share a graph, this one among them, as far as they can be asked."""

    def unshared(self, offers: Sequence[Proposal]) -> Mapping[str, str]:
        """Exchange proposals with the other ranks.

        Returns the names of those that not all ranks make alike, the same names on every rank, with a phrase that names
        the ranks on which each is missing. If there are any, every rank asks again without them.
        """


@mutable
class ConsensusRound:
    """One attempt at a plan."""

    asked: bool
    """True if other ranks are asked at all."""
    rejected: Mapping[str, str] = field(factory=dict)
    """By name, the proposals that earlier rounds rejected, and why."""
    proposals: list[Proposal] = field(factory=list)


def compared(offered: Mapping[tuple[Proposal, ...], Sequence[int]]) -> dict[str, str]:
    """The names of what not all ranks propose alike, and where each is missing. ``offered``: ranks by proposals."""
    everyone = sorted(rank for ranks in offered.values() for rank in ranks)
    variants: dict[str, dict[str, list[int]]] = {}
    members: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for offers, ranks in offered.items():
        for offer in offers:
            variants.setdefault(offer.name, {}).setdefault(offer.terms, []).extend(ranks)
            members.setdefault(offer.name, {}).setdefault(offer.among, []).extend(ranks)
    found: dict[str, str] = {}
    for name in sorted(variants):
        offering = {rank for ranks in variants[name].values() for rank in ranks}
        if missing := [rank for rank in everyone if rank not in offering]:
            found[name] = f"not on {_ranks(missing)}"
        elif len(variants[name]) > 1:
            usual = min(variants[name].values(), key=lambda ranks: (-len(ranks), min(ranks)))
            found[name] = f"otherwise on {_ranks(sorted(offering - set(usual)))}"
        elif apart := [ranks for among, ranks in members[name].items() if among and sorted(among) != sorted(ranks)]:
            found[name] = f"over other ranks on {_ranks(sorted(rank for ranks in apart for rank in ranks))}"
    return found


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + (", …" if len(ranks) > 4 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
