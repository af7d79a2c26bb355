"""Proof of an edit: the old and the new nodes give the same tensors on every rank, or the edit is refused.

Both are run on labelled shards of all ranks of the grid, with the groups' true rank lists, in this one process: see
:mod:`policylang.planning.edits.proof.evaluator`. Nothing here knows how the new nodes were found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

from attrs import frozen

from policylang.operators.layouts import Tensor
from policylang.operators.moves import Cut, Gather, GroupMove, MoveError, Part, Reduction
from policylang.planning.edits.grids import Grid
from policylang.planning.edits.proof.calls import ChainCall, group_of
from policylang.planning.edits.proof.evaluator import run
from policylang.planning.edits.proof.shrinking import Sizes
from policylang.planning.graph_edit import FusedGroup, Node, Proof

MOST_ELEMENTS = 1 << 22
"""Of all ranks' shards together: what could not be made smaller than this is not tried."""


@frozen
class Equivalence:
    """That old and new calls give the same tensors: what a proof proves.

    ``sources`` are the values that both start from, with the shape that each rank's has; ``pairs`` are the old and new
    values that have to be the same; ``groups`` names the old collectives' groups in the order of ``grid``.
    """

    sources: tuple[tuple[str, tuple[int, ...]], ...]
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
        return hashlib.sha256(repr(self._numbered(self._without_own)).encode()).hexdigest()[:32]

    def _numbered(self, spelled: Callable[[Any], Hashable]) -> Hashable:
        number: dict[str, int] = {}
        for name in (*(name for name, _ in self.sources), *(call.name for call in (*self.old, *self.new))):
            number.setdefault(name, len(number))

        def of(value: Any) -> Hashable:
            if isinstance(value, Node):
                return "node", number[value.name]
            return tuple(map(of, value)) if isinstance(value, tuple) else spelled(value)

        calls = tuple((call.target, of(call.arguments), call.shape) for call in (*self.old, *self.new))
        same = tuple((number[was], number[now]) for was, now in self.pairs)
        return tuple(shape for _, shape in self.sources), len(self.old), calls, same

    def _without_own(self, value: Any) -> Hashable:
        if isinstance(value, Part):
            return "own part", value.count
        if isinstance(value, FusedGroup):
            return "group", len(value.ranks)
        return "group" if isinstance(value, str) and value in self.groups else value


class Prover:
    """Proofs of one plan. What differs in names only is checked once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Proof | str] = {}

    def prove(self, claimed: Equivalence) -> Proof | str:
        """The proof, or a phrase that says what it found."""
        key = claimed.signature()
        if key not in self._known:
            self._known[key] = _prove(claimed)
        return self._known[key]


def _prove(claimed: Equivalence) -> Proof | str:
    old, new, ranks = claimed.old, claimed.new, claimed.grid.ranks
    sizes = Sizes()
    first: dict[tuple[int, ...], str] = {}
    for name, shape in claimed.sources:  # those of one shape are made small alike: they may be joined
        if shape in first:
            sizes.values[name] = sizes.values[first[shape]]
        else:
            sizes.start(first.setdefault(shape, name), shape)
    try:
        sizes.run(old)
        sizes.run(new)
        sizes.shrink()
        small = {name: sizes.small_shape(name) for name, _ in claimed.sources}
        count = sum(map(prod, small.values()))
        sums = any(isinstance(call.move, Reduction) for call in old)
        once = _meets_once(claimed)
        # Of one sum alone that every rank takes alike: what is added to an element is alike on all ranks.
        alike = once and not any(isinstance(call.move, Gather) for call in (*old, *new))
        each = 1 if alike or len(ranks) == 1 else len(ranks) if sums or once else len(ranks) ** 2
        if count * each > MOST_ELEMENTS:
            shards = " and ".join(str(list(shape)) for shape in small.values())
            return f"shards of {shards} on {len(ranks)} ranks are too much to check"
        label = _labels_of_any if alike else _labels_to_add if sums else _labels
        shards_of = _labelled(small, sorted(ranks), label)
        groups = _groups(claimed)
        before = run([sizes.small_call(call) for call in old], shards_of, groups)
        after = run([sizes.small_call(call) for call in new], shards_of, groups)
    except MoveError as error:
        return str(error)
    seen = set()  # many ranks have the very same values
    for was, now in claimed.pairs:
        for rank in ranks:
            one, other = before[was][rank], after[now][rank]
            if (id(one), id(other)) in seen:
                continue
            seen.add((id(one), id(other)))
            if not _equal(one, other):
                return f"`{was}` would be another value on rank {rank}"
    return Proof(len(ranks), tuple(small.values()), claim=claimed.alike())


def _labelled(
    small: Mapping[str, tuple[int, ...]], ranks: Sequence[int], label: Callable[[int, int, int], Sequence[int]]
) -> dict[str, dict[int, Tensor]]:
    """What each rank starts from: elements with numbers of their own, all sources of a rank together."""
    count = sum(map(prod, small.values()))
    found: dict[str, dict[int, Tensor]] = {name: {} for name in small}
    for place, rank in enumerate(ranks):
        if place and label is _labels_of_any:
            for of_ranks in found.values():
                of_ranks[rank] = of_ranks[ranks[0]]
            continue
        labels, start = label(place, count, len(ranks)), 0
        for name, shape in small.items():
            found[name][rank] = Tensor.fresh(labels[start : start + prod(shape)], shape)
            start += prod(shape)
    return found


def _labels(place: int, count: int, _world: int) -> Sequence[int]:
    """A number for each element of a rank's shard that no other element of any rank has."""
    return range(place * count, (place + 1) * count)


def _labels_to_add(place: int, count: int, world: int) -> Sequence[int]:
    """Numbers whose sums tell what was added: each rank's indices have binary digits of their own."""
    width = (count * world).bit_length() + 1
    return [index + 1 << place * width for index in range(count)]


def _labels_of_any(_place: int, count: int, _world: int) -> Sequence[int]:
    """One number for an element of all ranks' shards."""
    return range(1, count + 1)


def _meets_once(claimed: Equivalence) -> bool:
    """Whether all ranks do the very same, as one group, and nothing that has met there meets again.

    Then what a sum adds up lies at one place of every rank's shards, and is told by that place.
    """
    met: set[str] = set()
    for call in (*claimed.old, *claimed.new):
        if isinstance(call.move, Cut) and isinstance(call.move.start, Part):
            return False
        behind = not met.isdisjoint(call.reads)
        if isinstance(call.move, GroupMove):
            group = group_of(call)
            whole = group.ranks == claimed.grid.ranks if isinstance(group, FusedGroup) else len(claimed.groups) == 1
            if behind or not whole:
                return False
        if behind or isinstance(call.move, GroupMove):
            met.add(call.name)
    return True


def _groups(claimed: Equivalence) -> Callable[[str | FusedGroup, int], tuple[int, ...]]:
    index = {name: at for at, name in enumerate(claimed.groups)}
    members = cache(lambda name, rank: claimed.grid.group(index[name], rank))
    return lambda group, rank: group.ranks if isinstance(group, FusedGroup) else members(group, rank)


def _equal(one: Any, other: Any) -> bool:
    return one is other or (one.shape == other.shape and one.elements() == other.elements())
