"""Fusion of chains of collectives, the base of both ``fuse`` statements: finds chains and makes an edit of each.

Chains are as long as they go. One that cannot be fused whole gives up its last collective, and what follows is tried
anew; each collective that is given up is told with its reason.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import permutations
from typing import ClassVar

from attrs import evolve, frozen

from policylang.graph.facts import Flag
from policylang.language.syntax import Fuse
from policylang.planning.edits.collectives.element_moves import source_of
from policylang.planning.edits.collectives.lines import (
    ChainLink,
    ChainPath,
    Hop,
    last_row,
    links,
    path_between,
    rows_of,
)
from policylang.planning.edits.edit_planner import EditPlanner, NewNodes, RefusedError, Setting
from policylang.planning.edits.grids import Grid, dims_of
from policylang.planning.edits.offers import UNASKED
from policylang.planning.edits.proof.calls import ChainCall, old_calls
from policylang.planning.graph_edit import Edit, FusedGroup, Refusal

GROUPS_NOT_KNOWN = "groups of other ranks not known"
MOST_ORDERS = 4
"""Of how many collectives every order of ranks is tried; of more, only the usual one."""
_Found = tuple[int, Edit | Refusal]
"""What is found of a chain, and the row that puts it in order: of an edit the first collective's, so that it comes
after the one that makes what it starts from; of a refusal the last one's."""


@frozen
class CollectiveChain:
    """Collectives that read each other, the first to run first, and what lies between and after them."""

    collectives: tuple[int, ...]
    waits: tuple[int, ...]
    between: tuple[ChainPath, ...]
    """From each collective's wait to the input of the next."""
    tail: tuple[Hop, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        between = (row for path in self.between for row in path.rows)
        return tuple(sorted((*self.collectives, *self.waits, *between, *rows_of(self.tail))))

    @property
    def result(self) -> int:
        return last_row(self.tail[-1]) if self.tail else self.waits[-1]

    def part(self, start: int, end: int) -> CollectiveChain:
        """The collectives from one to another, that one included."""
        within = slice(start, end + 1)
        return CollectiveChain(self.collectives[within], self.waits[within], self.between[start:end])


class ChainFusion(EditPlanner[Fuse]):
    """One ``fuse`` statement on one graph."""

    collective: ClassVar[str]
    """The operator in full."""
    exact: ClassVar[bool] = True
    """Whether one collective gives the same bits as several."""

    def __init__(self, statement: Fuse, setting: Setting) -> None:
        super().__init__(statement, setting)
        self.existing = {group.ranks: group.name for group in reversed(list(setting.known.values())) if group.ranks}
        self._groups: dict[tuple[tuple[str, ...], tuple[int, ...]], FusedGroup] = {}

    @abstractmethod
    def check_line(self, link: ChainLink, wait: int, path: ChainPath) -> None:
        """Whether two collectives are two of a chain, by what lies between them. Raises :class:`RefusedError`."""

    @abstractmethod
    def wait(self, collective: int) -> int:
        """The one reader of a collective. Raises :class:`RefusedError` where there are others, or none."""

    @abstractmethod
    def planned(self, chain: CollectiveChain) -> Edit:
        """A chain as one collective. Raises :class:`RefusedError`."""

    def outcomes(self) -> list[Edit | Refusal]:
        found: list[_Found] = []
        for chain in self._chains(found):
            found.extend(self._fused(chain))
        return [outcome for _, outcome in sorted(found, key=lambda pair: pair[0])]

    # --- what the two of them share ---

    def check_link(self, link: ChainLink) -> None:
        """Whether the statement's ``over`` takes in both collectives. Raises :class:`RefusedError`."""
        facts, wanted = self.facts, self.statement.dims
        for row in (link.inner, link.outer) if wanted else ():
            group = facts.groups[facts.group_names[row]]
            spanned = dims_of(group, facts.meshes)
            if not spanned:
                raise RefusedError(f"mesh dimension of group `{group.name}` not known")
            if not set(spanned) <= set(wanted):
                raise RefusedError(f"over {', '.join(spanned)}: {facts.names[row]}")

    def orders(self, usual: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
        """The orders in which the ranks of so many collectives may be counted, the usual one first."""
        return permutations(usual) if len(usual) <= MOST_ORDERS else [usual]

    def source_of(self, chain: CollectiveChain) -> int:
        return source_of(self.facts, chain.collectives[0])

    def grid(self, groups: tuple[str, ...]) -> Grid:
        grid = super().grid(groups)
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

    def can_make(self, group: FusedGroup) -> bool:
        """Whether the torch that the graph is from can make a group whose ranks are in this order."""
        return group.name is not None or group.sorted or self.setting.capabilities.unsorted_groups

    def fused(
        self,
        chain: CollectiveChain,
        new: NewNodes,
        replaced: Mapping[int, str],
        *,
        latest: int,
        restrided: Sequence[tuple[int, tuple[int, ...]]] = (),
        note: str = "",
        calls: Sequence[ChainCall] | None = None,
    ) -> Edit:
        """The edit that puts new nodes in a chain's place, proven. As late as the first reader, ``latest``, allows;
        where memory is written on the way, where the first collective stood."""
        facts, first, source = self.facts, chain.collectives[0], self.source_of(chain)
        old, calls = old_calls(facts, chain.rows), new.calls() if calls is None else calls
        pairs = tuple((facts.names[row], name) for row, name in replaced.items())
        proof = self.prove([source], old, calls, pairs, self.groups_of(chain.collectives))
        new.take_names()
        written = any(facts.flags[row] & Flag.WRITES for row in range(first, latest))
        return Edit(
            statement=self.setting.number,
            kind=self.kind,
            collectives=self.names_of(chain.collectives),
            sources=self.names_of([source]),
            before=facts.names[first if written else latest],
            nodes=tuple(new.made),
            replaced=pairs,
            dead=self.names_of(chain.rows),
            proof=evolve(proof, exact=self.exact),
            restrided=tuple((facts.names[row], stride) for row, stride in restrided),
            note=note,
        )

    # --- chains ---

    def _chains(self, refused: list[_Found]) -> Iterator[CollectiveChain]:
        """Chains as long as they go; pairs that are none are put among the refused."""
        following: dict[int, tuple[int, ChainPath]] = {}
        continued = set()
        for link in links(self.facts, self.collective):
            try:
                if link.inner in following:
                    raise RefusedError(f"other consumer: {self.facts.names[following[link.inner][0]]}")
                following[link.inner] = link.outer, self._path_between(link)
                continued.add(link.outer)
            except RefusedError as why:
                refused.append((link.outer, self.refusal((link.inner, link.outer), why)))
        for first in sorted(following):
            if first in continued:
                continue
            rows, between = [first], []
            while rows[-1] in following:
                row, path = following[rows[-1]]
                rows.append(row)
                between.append(path)
            yield CollectiveChain(tuple(rows), tuple(map(self.wait, rows)), tuple(between))

    def _path_between(self, link: ChainLink) -> ChainPath:
        self.check_link(link)
        wait = self.wait(link.inner)
        self.wait(link.outer)
        path = path_between(self.facts, wait, source_of(self.facts, link.outer))
        if isinstance(path, str):
            raise RefusedError(path)
        self.check_line(link, wait, path)
        return path

    def _fused(self, chain: CollectiveChain) -> Iterator[_Found]:
        """A chain as one collective. Where it cannot be one, its last collective is given up, and the rest tried."""
        start, whole = 0, len(chain.between)
        while start < whole:
            end = whole
            why: RefusedError | None = None
            while end > start:
                part = chain.part(start, end)
                try:
                    words, groups = self.names_of(part.collectives), self.groups_of(part.collectives)
                    yield part.collectives[0], self.shared(words, groups, partial(self.planned, part))
                    break
                except RefusedError as error:
                    end, why = end - 1, error
            if why is not None:  # the collective that could not be added, and what follows it anew
                part = chain.part(start, end + 1)
                yield part.collectives[-1], self.refusal(part.collectives, why)
            start = end + 1


def needs_unsorted(group_ranks: Sequence[int]) -> RefusedError:
    """Of a torch that sorts the ranks of a new group."""
    listed = ", ".join(map(str, group_ranks[:6])) + (", …" if len(group_ranks) > 6 else "")
    return RefusedError(
        f"rank order {listed} needs `sort_ranks`",
        "this torch sorts the ranks of a new group; it can be told not to from 2.12",
    )
