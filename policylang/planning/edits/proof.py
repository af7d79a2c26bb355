"""Proof of an edit: the old and the new nodes give the same tensors on every rank, or the edit is refused.

Both run element by element on labelled shards of all ranks of the grid, with the groups' true rank lists, in this one
process. The operator table (:mod:`policylang.operators.layouts`) gives what each call does to elements, and the tests
compare it with torch; a view that torch would refuse is refused here too. Nothing here knows how edits are found.

Tensors are made small first: a length that no operator cuts or counts may have any size. A length of a shard is split
into factors just where some operator cuts it, and each factor becomes 2, 3 or 5; group sizes stay. Different values
joined along a dimension (a ``cat`` of flattened shards) form a separate digit, as long as its small parts are together;
it may be cut only where one of them begins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

from attrs import Factory, evolve, field, frozen, mutable

from policylang.graph.facts import Facts, Ref, replaced_in
from policylang.operators import layouts
from policylang.operators.layouts import Cut, Gather, GroupMove, Join, Move, MoveError, Part, Reduction, move_of
from policylang.planning.edits.other_ranks import Grid
from policylang.planning.graph_edit import FusedGroup, NewNode, Node, Proof


@frozen
class ChainCall:
    name: str
    target: str
    arguments: tuple[Any, ...]
    """Arguments in the form of :class:`~policylang.planning.graph_edit.NewNode`; collectives have a group's name or
    `FusedGroup`."""
    shape: tuple[int, ...] | None
    """The shape of its result; None for a tuple."""
    move: Move = field(default=Factory(lambda it: move_of(it.target, it.arguments, it.shape), True), repr=False)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of its inputs; one unless it joins several."""
        first = self.arguments[0]
        return (first.name,) if isinstance(first, Node) else tuple([part.name for part in first])


def old_calls(facts: Facts, rows: Iterable[int]) -> list[ChainCall]:
    """The calls in some nodes, in graph order."""
    found = []
    for row in rows:
        arguments = replaced_in(facts.arguments[row], Ref, lambda source: Node(facts.names[source.row]))
        if group := facts.group_names[row]:  # what a group is called in the graph and in the facts may differ
            arguments = (*arguments[:-1], group)
        found.append(ChainCall(facts.names[row], facts.targets[row], arguments, facts.shapes[row]))
    return found


def new_call(node: NewNode) -> ChainCall:
    return ChainCall(node.name, node.target, node.arguments, node.shape)


def group_argument(call: ChainCall) -> str | FusedGroup:
    """The group of a collective, which is the last argument of all."""
    group = call.arguments[-1]
    assert isinstance(group, (str, FusedGroup))
    return group


RankValue = layouts.Tensor | tuple[layouts.Tensor, ...]
RankGroups = Callable[[str | FusedGroup, int], tuple[int, ...]]
"""The ranks of the group in which a rank takes part, in group order."""


def run_on_ranks(
    calls: Iterable[ChainCall], inputs: Mapping[str, Mapping[int, RankValue]], groups: RankGroups
) -> dict[str, dict[int, RankValue]]:
    """The result of every call on every rank.

    Args:
        calls: in order.
        inputs: node name to rank to value.
        groups: who takes part in a collective.

    Raises:
        MoveError: where torch would raise, as a sentence.
    """
    values: dict[str, dict[int, RankValue]] = {name: dict(of_ranks) for name, of_ranks in inputs.items()}
    for call in calls:
        try:
            found = _together if isinstance(call.move, GroupMove) else _apart
            values[call.name] = found(call, values, groups)
        except MoveError as why:
            raise MoveError(f"`{call.name}` {why}") from None
    return values


def _together(call: ChainCall, values: Mapping[str, Mapping[int, Any]], groups: RankGroups) -> dict[int, RankValue]:
    shards, group = values[call.reads[0]], group_argument(call)
    met: dict[tuple[int, ...], Sequence[layouts.Tensor]] = {}
    found: dict[int, RankValue] = {}
    for rank in shards:
        if rank not in found:
            members = groups(group, rank)  # the same list for each of them
            read = [shards[member] for member in members]
            key = tuple(map(id, read))
            if key not in met:
                met[key] = _values(call, call.move, read)
            found.update(zip(members, met[key], strict=True))
    return found


def _apart(call: ChainCall, values: Mapping[str, Mapping[int, Any]], _: RankGroups) -> dict[int, RankValue]:
    known: dict[Any, RankValue] = {}
    found: dict[int, RankValue] = {}
    for rank in values[call.reads[0]]:
        read, move = [values[name][rank] for name in call.reads], call.move.on(rank)
        key = move, tuple(map(id, read))
        if key not in known:
            known[key] = _values(call, move, read if isinstance(move, Join) else read[0])
        found[rank] = known[key]
    return found


def _values(call: ChainCall, move: Move, read: Any) -> Any:
    found = move.values(read)
    one = found[0] if isinstance(move, GroupMove) else found
    if isinstance(one, layouts.Tensor) and one.shape != call.shape:
        raise MoveError(f"returns {list(one.shape)}")
    return found


SMALL = (2, 3, 5)
ACROSS_JOINED = "cuts across joined values"


Factor = tuple[int, int, int]
"""A part of a digit that no operator cuts: its origin, and from one weight to another."""


@mutable
class Sizes:
    """Every value of both chains as the digits of its lengths, and their small sizes."""

    values: dict[str, layouts.DigitLayout] = field(factory=dict)
    small: dict[Factor, int] = field(factory=dict)
    cuts: list[tuple[layouts.DigitLayout, layouts.DigitLayout]] = field(factory=list)
    """Inputs and results of calls: a digit that is gone keeps its size."""
    weights: dict[int, list[int]] = field(factory=dict)
    """The bounds at which the digits of an origin are cut, ascending."""
    joined: dict[int, tuple[layouts.Digits, ...]] = field(factory=dict)
    """By origin of a digit that counts joined values, the digits along which they are joined."""
    kept: dict[str, tuple[int, int]] = field(factory=dict)
    """By call that keeps one of joined values: the origin of their digit, and which value."""

    def run(self, calls: Iterable[ChainCall]) -> None:
        """Follow the calls. Raises :class:`MoveError` with a sentence for one that cannot be followed."""
        for call in calls:
            try:
                self.values[call.name] = self._after(call)
            except (layouts.NoDigitsError, MoveError) as why:
                raise MoveError(f"`{call.name}` {str(why) or 'cuts across shards'}") from None

    def _after(self, call: ChainCall) -> layouts.DigitLayout:
        """The layout of a call's result."""
        move, read = call.move, [self.values[name] for name in call.reads]
        before = read[0]
        if isinstance(move, Join) and any(each != before for each in read):
            return self._join(move, read)
        if isinstance(move, Cut) and (digits := before.dims[move.dim]) and digits[0].origin in self.joined:
            return self._keep(call.name, move, before)
        count = move.ranks if isinstance(move, Gather) else len(read)
        after = move.layout(before, layouts.counted(len(self.values), count))
        self.cuts.append((before, after))
        return after

    def _join(self, move: Join, read: Sequence[layouts.DigitLayout]) -> layouts.DigitLayout:
        """Join different values; other lengths beside the joined dimension differ when they are run."""
        if move.stacked or any(len(each.dims) != len(read[0].dims) for each in read):
            raise MoveError("joins tensors of different shapes")
        dims, origin = list(read[0].dims), len(self.values)
        self.joined[origin] = tuple(each.dims[move.dim] for each in read)
        dims[move.dim] = (layouts.Digit(origin, 1, sum(map(layouts.size_of, self.joined[origin]))),)
        return layouts.DigitLayout(tuple(dims))

    def _keep(self, name: str, move: Cut, before: layouts.DigitLayout) -> layouts.DigitLayout:
        """Slice one of joined values."""
        dims = list(before.dims)
        (digit, *others), start = dims[move.dim], 0
        parts = self.joined[digit.origin]
        first, last = (0, 0) if others or move.step != 1 or move.drops else move.bounds(digit.size)
        for place, part in enumerate(parts):
            if (start, start + layouts.size_of(part)) == (first, last):
                self.kept[name], dims[move.dim] = (digit.origin, place), part
                return layouts.DigitLayout(tuple(dims))
            start += layouts.size_of(part)
        raise MoveError(ACROSS_JOINED)

    def shrink(self) -> None:
        """Give each factor its small size. Raises :class:`MoveError` if two operators cut a digit differently."""
        weights: dict[int, set[int]] = {}
        for layout in self.values.values():
            for digit in layout.flat:
                weights.setdefault(digit.origin, set()).update((digit.weight, digit.weight * digit.size))
        self.weights = {origin: sorted(found) for origin, found in weights.items()}
        fixed: set[Factor] = set()
        for before, after in self.cuts:
            fixed.update(set(self._factors(before.flat)).difference(self._factors(after.flat)))
        count = 0
        for layout in self.values.values():
            for factor in self._factors(layout.flat):
                origin, low, high = factor
                size, rest = divmod(high, low)
                if rest:
                    raise MoveError(f"{high} is cut into parts of {low}")
                if origin in self.joined:  # its parts are earlier values
                    parts = self.joined[origin]
                    if factor in fixed or size != sum(map(layouts.size_of, parts)):
                        raise MoveError(ACROSS_JOINED)
                    self.small[factor] = sum(map(self._small, parts))
                elif factor not in self.small:
                    free = origin <= layouts.SHARD and factor not in fixed
                    self.small[factor] = min(size, SMALL[count % len(SMALL)]) if free else size
                    count += self.small[factor] != size

    def small_shape(self, name: str) -> tuple[int, ...]:
        return tuple(map(self._small, self.values[name].dims))

    def small_call(self, call: ChainCall) -> ChainCall:
        """The call with small sizes as arguments."""
        shape = self.small_shape(call.name)
        if call.name in self.kept and isinstance(call.move, Cut):
            origin, place = self.kept[call.name]
            lengths = list(map(self._small, self.joined[origin][: place + 1]))
            return evolve(call, move=Cut(call.move.dim, sum(lengths[:-1]), sum(lengths)), shape=shape)
        move = call.move.small(self.values[call.reads[0]], shape)
        return evolve(call, move=move, shape=None if call.shape is None else shape)

    def _small(self, digits: layouts.Digits) -> int:
        return prod(map(self.small.__getitem__, self._factors(digits)))

    def _factors(self, digits: layouts.Digits) -> list[Factor]:
        """Slow to fast."""
        found = []
        for digit in digits:
            weights = self.weights[digit.origin]
            low, high = weights.index(digit.weight), weights.index(digit.weight * digit.size)
            found += [(digit.origin, weights[at - 1], weights[at]) for at in range(high, low, -1)]
        return found


MOST_ELEMENTS = 1 << 22
"""In all ranks' shards together, at most; larger proofs are refused."""


@frozen
class Equivalence:
    """The claim that old and new calls give the same tensors. ``sources`` are the values that both start from, with the
    shape that each rank's has; ``pairs`` are the old and new values that have to be the same; ``groups`` names the old
    collectives' groups in the order of ``grid``."""

    sources: tuple[tuple[str, tuple[int, ...]], ...]
    old: Sequence[ChainCall]
    new: Sequence[ChainCall]
    pairs: Sequence[tuple[str, str]]
    grid: Grid
    groups: tuple[str, ...]

    def signature(self) -> Hashable:
        """All that a proof depends on, with names numbered."""
        return self._numbered(lambda value: value), self.grid, self.groups

    def alike(self) -> str:
        """A digest of the signature without what is each rank's own: its groups, and the parts that it takes."""

        def without_own(value: Any) -> Hashable:
            if isinstance(value, Part):
                return "own part", value.count
            if isinstance(value, FusedGroup):
                return "group", len(value.ranks)
            return "group" if isinstance(value, str) and value in self.groups else value

        return hashlib.sha256(repr(self._numbered(without_own)).encode()).hexdigest()[:32]

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


class Prover:
    """Proofs of one plan; claims that differ in names only are checked once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Proof | str] = {}

    def prove(self, claimed: Equivalence) -> Proof | str:
        """The proof, or what differs, as a phrase."""
        key = claimed.signature()
        if key not in self._known:
            self._known[key] = _prove(claimed)
        return self._known[key]


def _prove(claimed: Equivalence) -> Proof | str:
    old, new, ranks = claimed.old, claimed.new, claimed.grid.ranks
    sizes = Sizes()
    # those of one shape are made small alike: they may be joined
    of_shape: dict[tuple[int, ...], layouts.DigitLayout] = {}
    for name, shape in claimed.sources:
        if shape not in of_shape:
            of_shape[shape] = layouts.shard(shape, layouts.SHARD - len(sizes.values))
        sizes.values[name] = of_shape[shape]
    try:
        sizes.run(old)
        sizes.run(new)
        sizes.shrink()
        small = {name: sizes.small_shape(name) for name, _ in claimed.sources}
        count = sum(map(prod, small.values()))
        sums = any(isinstance(call.move, Reduction) for call in old)
        once = _meets_once(claimed)
        # In a single sum that every rank takes alike, the same elements are added on all ranks.
        alike = once and not any(isinstance(call.move, Gather) for call in (*old, *new))
        each = 1 if alike or len(ranks) == 1 else len(ranks) if sums or once else len(ranks) ** 2
        if count * each > MOST_ELEMENTS:
            shards = " and ".join(str(list(shape)) for shape in small.values())
            return f"shards of {shards} on {len(ranks)} ranks are too much to check"
        shards_of = _labelled(small, sorted(ranks), alike=alike, sums=sums)
        index = {name: at for at, name in enumerate(claimed.groups)}
        members = cache(lambda name, rank: claimed.grid.group(index[name], rank))

        def groups(group: str | FusedGroup, rank: int) -> tuple[int, ...]:
            return group.ranks if isinstance(group, FusedGroup) else members(group, rank)

        before = run_on_ranks([sizes.small_call(call) for call in old], shards_of, groups)
        after = run_on_ranks([sizes.small_call(call) for call in new], shards_of, groups)
    except MoveError as error:
        return str(error)
    seen = set()  # many ranks have the very same values
    for was, now in claimed.pairs:
        for rank in ranks:
            one: Any = before[was][rank]
            other: Any = after[now][rank]
            if one is other or (id(one), id(other)) in seen:
                continue
            seen.add((id(one), id(other)))
            if one.shape != other.shape or one.elements() != other.elements():
                return f"`{was}` would be another value on rank {rank}"
    return Proof(len(ranks), tuple(small.values()), claim=claimed.alike())


def _labelled(
    small: Mapping[str, tuple[int, ...]], ranks: Sequence[int], *, alike: bool, sums: bool
) -> dict[str, dict[int, layouts.Tensor]]:
    """The sources of each rank, with labels as elements: the same on all ranks if ``alike``; for ``sums``, such that a
    sum identifies its summands, by separate binary digits for each rank; else labels that nothing else has."""
    count = sum(map(prod, small.values()))
    width = (count * len(ranks)).bit_length() + 1
    found: dict[str, dict[int, layouts.Tensor]] = {name: {} for name in small}
    for place, rank in enumerate(ranks):
        if place and alike:
            for of_ranks in found.values():
                of_ranks[rank] = of_ranks[ranks[0]]
            continue
        first = 1 if alike else place * count
        labels: Sequence[int] = range(first, first + count)
        if sums and not alike:
            labels = [index + 1 << place * width for index in range(count)]
        start = 0
        for name, shape in small.items():
            found[name][rank] = layouts.Tensor.fresh(labels[start : start + prod(shape)], shape)
            start += prod(shape)
    return found


def _meets_once(claimed: Equivalence) -> bool:
    """True if all ranks do the same, as one group, and no elements are reduced together twice. Then a sum adds elements
    at one place of every rank's shards, and that place identifies them."""
    met: set[str] = set()
    for call in (*claimed.old, *claimed.new):
        if isinstance(call.move, Cut) and isinstance(call.move.start, Part):
            return False
        behind = not met.isdisjoint(call.reads)
        if isinstance(call.move, GroupMove):
            group = group_argument(call)
            whole = group.ranks == claimed.grid.ranks if isinstance(group, FusedGroup) else len(claimed.groups) == 1
            if behind or not whole:
                return False
        if behind or isinstance(call.move, GroupMove):
            met.add(call.name)
    return True
