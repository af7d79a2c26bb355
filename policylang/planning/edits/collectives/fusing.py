"""What the two ``fuse`` statements share: from links between collectives to chains, and from a chain to its outcome.

Chains are as long as they go. One that cannot be fused whole gives up its last link, and what follows that link is
tried anew; each link that is given up is told with its reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from attrs import frozen

from policylang.language.syntax import Fuse
from policylang.planning.edits.collectives.grids import Grid, dims_of, grid_of
from policylang.planning.edits.collectives.lines import ChainLink, ChainPath, links
from policylang.planning.edits.data import FusedGroup, Kind, Refused, Rewrite
from policylang.planning.edits.offers import UNASKED
from policylang.planning.edits.rank_view import rewrite_words
from policylang.planning.edits.setting import RefusedError, Setting

GROUPS_NOT_KNOWN = "groups of other ranks not known"
MOST_ORDERS = 4
"""Of how many collectives every order of ranks is tried; of more, only the usual one."""
Outcome = tuple[int, Rewrite | Refused]
"""What became of a chain, and the row of its last collective, by which outcomes are ordered."""


@frozen
class Candidate:
    """Collectives that read each other, as links, and the way along each link."""

    links: tuple[ChainLink, ...]
    paths: tuple[ChainPath, ...]

    @property
    def collectives(self) -> tuple[int, ...]:
        """In the order in which they run."""
        return (self.links[0].inner, *(link.outer for link in self.links))

    def part(self, start: int, end: int) -> Candidate:
        return Candidate(self.links[start:end], self.paths[start:end])


class Fusing(ABC):
    """One ``fuse`` statement on one graph."""

    kind: ClassVar[Kind]
    collective: ClassVar[str]
    """The operator in full."""

    def __init__(self, statement: Fuse, setting: Setting) -> None:
        self.statement = statement
        self.setting = setting
        self.facts = setting.facts
        self.existing = {group.ranks: group.name for group in reversed(list(setting.known.values())) if group.ranks}
        self._grids: dict[tuple[str, ...], Grid | str] = {}
        self._groups: dict[tuple[tuple[str, ...], tuple[int, ...]], FusedGroup] = {}

    @abstractmethod
    def path(self, link: ChainLink) -> ChainPath:
        """The way from one collective to the next. Raises :class:`RefusedError` where this is no link of a chain."""

    @abstractmethod
    def rewrite(self, candidate: Candidate) -> Rewrite:
        """A chain as one collective. Raises :class:`RefusedError`."""

    def outcomes(self) -> list[Rewrite | Refused]:
        """What the statement comes to, in graph order. Linear in nodes and edges."""
        found: list[Outcome] = []
        for candidate in self._candidates(found):
            found.extend(self._fused(candidate))
        return [outcome for _, outcome in sorted(found, key=lambda pair: pair[0])]

    def check_dims(self, link: ChainLink) -> None:
        """Whether the statement's ``over`` takes in both collectives of a link."""
        facts, wanted = self.facts, self.statement.dims
        for row in (link.inner, link.outer) if wanted else ():
            group = facts.groups[facts.group_names[row]]
            spanned = dims_of(group, facts.meshes)
            if not spanned:
                raise RefusedError(f"mesh dimension of group `{group.name}` not known")
            if not set(spanned) <= set(wanted):
                raise RefusedError(f"over {', '.join(spanned)}: {facts.names[row]}")

    def grid(self, names: tuple[str, ...]) -> Grid:
        """The ranks that the groups of a chain join."""
        if names not in self._grids:
            self._grids[names] = grid_of(self.facts, names)
        grid = self._grids[names]
        if isinstance(grid, str):
            raise RefusedError(grid)
        if grid.guessed and len(grid.ranks) > 1 and not self.setting.ledger.asked:
            raise RefusedError(GROUPS_NOT_KNOWN, f"no mesh says which they are, and {UNASKED}")
        return grid

    def fused_group(self, names: tuple[str, ...], grid: Grid, order: tuple[int, ...]) -> FusedGroup:
        """The group of all ranks of a chain, counted with its collectives in an order, slowest first."""
        if (names, order) not in self._groups:
            ranks = grid.ordered(order)
            dims = tuple(dim for place in order for dim in grid.dims[place]) if all(grid.dims) else ()
            existing = self.existing.get(ranks)
            self._groups[names, order] = FusedGroup(ranks, existing, dims, grid.everyone_ordered(order))
        return self._groups[names, order]

    def _candidates(self, refused: list[Outcome]) -> Iterator[Candidate]:
        """Chains as long as they go; links that are none are put among the refused."""
        following: dict[int, tuple[ChainLink, ChainPath]] = {}
        continued = set()
        for link in links(self.facts, self.collective):
            try:
                if link.inner in following:
                    raise RefusedError(f"other consumer: {self.facts.names[following[link.inner][0].outer]}")
                following[link.inner] = link, self.path(link)
                continued.add(link.outer)
            except RefusedError as why:
                refused.append((link.outer, self._refusal((link.inner, link.outer), why)))
        for first in sorted(following):
            if first in continued:
                continue
            chain: list[tuple[ChainLink, ChainPath]] = []
            at = first
            while at in following:
                chain.append(following[at])
                at = following[at][0].outer
            yield Candidate(tuple(link for link, _ in chain), tuple(path for _, path in chain))

    def _fused(self, candidate: Candidate) -> Iterator[Outcome]:
        """A chain as one collective. Where it cannot be one, its last link is given up, and the rest tried."""
        start, whole = 0, len(candidate.links)
        while start < whole:
            end = whole
            why: RefusedError | None = None
            while end > start:
                try:
                    yield candidate.links[end - 1].outer, self._shared(candidate.part(start, end))
                    break
                except RefusedError as error:
                    end, why = end - 1, error
            if why is not None:  # the link that could not be added, and what follows it anew
                yield candidate.links[end].outer, self._refusal(candidate.part(start, end + 1).collectives, why)
            start = end + 1

    def _shared(self, candidate: Candidate) -> Rewrite:
        """A chain as one collective, if it is one on every rank."""
        names = tuple(map(self.facts.names.__getitem__, candidate.collectives))
        key = self.setting.key(self.kind, *names)
        self.setting.check_shared(key)
        rewrite = self.rewrite(candidate)
        grid = self.grid(tuple(self.facts.group_names[row] for row in candidate.collectives))
        self.setting.offer(key, [rewrite.proof.claim, *rewrite_words(rewrite)], grid)
        return rewrite

    def _refusal(self, collectives: Sequence[int], why: RefusedError) -> Refused:
        names = tuple(map(self.facts.names.__getitem__, collectives))
        return Refused(self.setting.number, self.kind, names, why.reason, why.detail)


def needs_unsorted(group_ranks: Sequence[int]) -> RefusedError:
    """Of a torch that sorts the ranks of a new group."""
    listed = ", ".join(map(str, group_ranks[:6])) + (", …" if len(group_ranks) > 6 else "")
    return RefusedError(
        f"rank order {listed} needs `sort_ranks`",
        "this torch sorts the ranks of a new group; it can be told not to from 2.12",
    )
