"""Shrinks the tensors of a proof: each length that no operator cuts or counts becomes 2, 3 or 5.

Layout operators and collectives act alike on tensors of any size: only what is cut or counted matters, the sizes of
groups and the lengths that views deal out. So a length of a shard is split into factors just where some operator of
the chains cuts it, and each factor is then made small. Group sizes stay as they are.

Different values joined along a dimension (a ``cat`` of flattened shards) are a digit of its own, which counts what its
parts count together: it becomes as long as the small parts are. It may be cut where one of them begins, nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from attrs import evolve, field, mutable

from policylang.operators.layouts import SHARD, Digit, DigitLayout, Digits, NoDigitsError, counted, shard, size_of
from policylang.operators.moves import Cut, Gather, Join, MoveError
from policylang.planning.edits.proof.calls import ChainCall

SMALL = (2, 3, 5)
ACROSS_JOINED = "cuts across joined values"


Factor = tuple[int, int, int]
"""A part of a digit that no operator cuts: its origin, and from one weight to another."""


@mutable
class Sizes:
    """Chains on their way through: every value as the digits of its lengths."""

    values: dict[str, DigitLayout] = field(factory=dict)
    small: dict[Factor, int] = field(factory=dict)
    cuts: list[tuple[DigitLayout, DigitLayout]] = field(factory=list)
    """What calls read and return: of a digit that is gone the size counts."""
    weights: dict[int, list[int]] = field(factory=dict)
    """Where the digits of an origin are cut, ascending."""
    joined: dict[int, tuple[Digits, ...]] = field(factory=dict)
    """Of a digit that counts different values, by its origin, those that they are joined along."""
    kept: dict[str, tuple[int, int]] = field(factory=dict)
    """Of a call that keeps one of joined values, by its name: the origin of their digit, and which of them."""

    def start(self, name: str, shape: Sequence[int]) -> None:
        self.values[name] = shard(shape, SHARD - len(self.values))

    def run(self, calls: Iterable[ChainCall]) -> None:
        """Raises :class:`MoveError` for what cannot be followed, as a sentence."""
        for call in calls:
            try:
                self.values[call.name] = self._after(call)
            except (NoDigitsError, MoveError) as why:
                raise MoveError(f"`{call.name}` {str(why) or 'cuts across shards'}") from None

    def _after(self, call: ChainCall) -> DigitLayout:
        """Of what a call returns."""
        move, read = call.move, [self.values[name] for name in call.reads]
        before = read[0]
        if isinstance(move, Join) and any(each != before for each in read):
            return self._join(move, read)
        if isinstance(move, Cut) and (digits := before.dims[move.dim]) and digits[0].origin in self.joined:
            return self._keep(call.name, move, before)
        count = move.ranks if isinstance(move, Gather) else len(read)
        after = move.layout(before, counted(len(self.values), count))
        self.cuts.append((before, after))
        return after

    def _join(self, move: Join, read: Sequence[DigitLayout]) -> DigitLayout:
        """Of different values: those with other lengths beside what is joined are told apart when they are run."""
        if move.stacked or any(len(each.dims) != len(read[0].dims) for each in read):
            raise MoveError("joins tensors of different shapes")
        dims, origin = list(read[0].dims), len(self.values)
        self.joined[origin] = tuple(each.dims[move.dim] for each in read)
        dims[move.dim] = (Digit(origin, 1, sum(map(size_of, self.joined[origin]))),)
        return DigitLayout(tuple(dims))

    def _keep(self, name: str, move: Cut, before: DigitLayout) -> DigitLayout:
        """Of a slice that keeps one of joined values."""
        dims = list(before.dims)
        (digit, *others), start = dims[move.dim], 0
        parts = self.joined[digit.origin]
        first, last = (0, 0) if others or move.step != 1 or move.drops else move.bounds(digit.size)
        for place, part in enumerate(parts):
            if (start, start + size_of(part)) == (first, last):
                self.kept[name], dims[move.dim] = (digit.origin, place), part
                return DigitLayout(tuple(dims))
            start += size_of(part)
        raise MoveError(ACROSS_JOINED)

    def shrink(self) -> None:
        """Give each factor its small size. Raises :class:`MoveError` where two operators cut a digit differently."""
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
                if origin in self.joined:  # its parts are values that came before it
                    parts = self.joined[origin]
                    if factor in fixed or size != sum(map(size_of, parts)):
                        raise MoveError(ACROSS_JOINED)
                    self.small[factor] = sum(map(self._small, parts))
                elif factor not in self.small:
                    free = origin <= SHARD and factor not in fixed
                    self.small[factor] = min(size, SMALL[count % len(SMALL)]) if free else size
                    count += self.small[factor] != size

    def small_shape(self, name: str) -> tuple[int, ...]:
        return tuple(map(self._small, self.values[name].dims))

    def small_call(self, call: ChainCall) -> ChainCall:
        """The call with the sizes among its arguments made small."""
        shape = self.small_shape(call.name)
        if call.name in self.kept and isinstance(call.move, Cut):
            origin, place = self.kept[call.name]
            lengths = list(map(self._small, self.joined[origin][: place + 1]))
            return evolve(call, move=Cut(call.move.dim, sum(lengths[:-1]), sum(lengths)), shape=shape)
        move = call.move.small(self.values[call.reads[0]], shape)
        return evolve(call, move=move, shape=None if call.shape is None else shape)

    def _small(self, digits: Digits) -> int:
        return prod(map(self.small.__getitem__, self._factors(digits)))

    def _factors(self, digits: Digits) -> list[Factor]:
        """Slow to fast."""
        found = []
        for digit in digits:
            weights = self.weights[digit.origin]
            low, high = weights.index(digit.weight), weights.index(digit.weight * digit.size)
            found += [(digit.origin, weights[at - 1], weights[at]) for at in range(high, low, -1)]
        return found
