"""A rewrite is accepted only if the old and the new chain give the same tensors on every rank.

Both are run on labelled shards of all ranks of the grid, with the groups' true rank lists, in this one process: see
:mod:`policylang.planning.edits.proof.evaluator`. Nothing here knows how the new chain was found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any

from attrs import frozen

from policylang.operators.elements import Tensor
from policylang.operators.moves import MoveError, Part, Scatter
from policylang.planning.edits.collectives.grids import Grid
from policylang.planning.edits.data import FusedGroup, Node, Proof
from policylang.planning.edits.proof.calls import ChainCall
from policylang.planning.edits.proof.evaluator import run
from policylang.planning.edits.proof.shrinking import Sizes

MOST_ELEMENTS = 1 << 22
"""Of all ranks' shards together: what could not be made smaller than this is not tried."""


@frozen
class Claim:
    """That an old and a new chain give the same tensors.

    ``shard`` is the shape of each rank's value of ``source``, which both chains start from; ``pairs`` are the old and
    new values that have to be the same; ``groups`` names the old collectives' groups in the order of ``grid``.
    """

    shard: tuple[int, ...]
    source: str
    old: Sequence[ChainCall]
    new: Sequence[ChainCall]
    pairs: Sequence[tuple[str, str]]
    grid: Grid
    groups: tuple[str, ...]

    def signature(self) -> Hashable:
        """All that a proof depends on, with numbers for names."""
        return self._numbered(lambda value: value), self.grid, self.groups

    def alike(self) -> str:
        """The same as one number, without what is each rank's own: its groups, and which parts it takes."""
        groups = frozenset(self.groups)
        return hashlib.sha256(repr(self._numbered(lambda value: _alike(value, groups))).encode()).hexdigest()[:32]

    def _numbered(self, plain: Callable[[Any], Hashable]) -> Hashable:
        number = {self.source: 0}
        for call in (*self.old, *self.new):
            number.setdefault(call.name, len(number))

        def of(value: Any) -> Hashable:
            if isinstance(value, Node):
                return "node", number[value.name]
            return tuple(map(of, value)) if isinstance(value, tuple) else plain(value)

        calls = tuple((call.target, of(call.arguments), call.shape) for call in (*self.old, *self.new))
        return self.shard, len(self.old), calls, tuple((number[was], number[now]) for was, now in self.pairs)


class Prover:
    """Proofs of one plan. Chains that differ in names only are checked once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Proof | str] = {}

    def prove(self, claim: Claim) -> Proof | str:
        """The proof, or a phrase that says what it found."""
        key = claim.signature()
        if key not in self._known:
            self._known[key] = _prove(claim)
        return self._known[key]


def _prove(claim: Claim) -> Proof | str:
    source, old, new, grid = claim.source, claim.old, claim.new, claim.grid
    sizes = Sizes()
    sizes.start(source, claim.shard)
    try:
        sizes.run(old)
        sizes.run(new)
        sizes.shrink()
        small = sizes.small_shape(source)
        count = prod(small)
        world, sums = len(grid.ranks), any(isinstance(call.move, Scatter) for call in old)
        if count * world * (1 if sums else world) > MOST_ELEMENTS:
            return f"shards of {list(small)} on {world} ranks are too much to check"
        label = _labels_to_add if sums else _labels
        shards = {
            rank: Tensor.fresh(label(place, count, world), small) for place, rank in enumerate(sorted(grid.ranks))
        }
        groups = _groups(claim)
        before = run([sizes.small_call(call) for call in old], {source: shards}, groups)
        after = run([sizes.small_call(call) for call in new], {source: shards}, groups)
    except MoveError as error:
        return str(error)
    seen = set()  # many ranks have the very same values
    for was, now in claim.pairs:
        for rank in grid.ranks:
            one, other = before[was][rank], after[now][rank]
            if (id(one), id(other)) in seen:
                continue
            seen.add((id(one), id(other)))
            if not _equal(one, other):
                return f"`{was}` would be another value on rank {rank}"
    return Proof(len(grid.ranks), small, claim=claim.alike())


def _labels(place: int, count: int, _world: int) -> Sequence[int]:
    """A number for each element of a rank's shard that no other element of any rank has."""
    return range(place * count, (place + 1) * count)


def _labels_to_add(place: int, count: int, world: int) -> Sequence[int]:
    """Numbers whose sums tell what was added: each rank's indices have binary digits of their own."""
    width = (count * world).bit_length() + 1
    return [index + 1 << place * width for index in range(count)]


def _groups(claim: Claim) -> Callable[[str | FusedGroup, int], tuple[int, ...]]:
    grid = claim.grid
    index = {name: at for at, name in enumerate(claim.groups)}
    known: dict[tuple[str, int], tuple[int, ...]] = {}

    def of(group: str | FusedGroup, rank: int) -> tuple[int, ...]:
        if isinstance(group, FusedGroup):
            return group.ranks
        if (group, rank) not in known:
            known[group, rank] = grid.group(index[group], rank)
        return known[group, rank]

    return of


def _equal(one: Any, other: Any) -> bool:
    return one is other or (one.shape == other.shape and one.elements() == other.elements())


def _alike(value: Any, groups: frozenset[str]) -> Hashable:
    if isinstance(value, Part):
        return "own part", value.count
    if isinstance(value, FusedGroup):
        return "group", len(value.ranks)
    return "group" if isinstance(value, str) and value in groups else value
