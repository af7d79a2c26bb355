"""Shrinks the tensors of a proof: each length that no operator cuts or counts becomes 2, 3 or 5.

Layout operators and collectives act alike on tensors of any size: only what is cut or counted matters, the sizes of
groups and the lengths that views deal out. So a length of a shard is split into factors just where some operator of
the chains cuts it, and each factor is then made small. Group sizes stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from attrs import evolve, field, mutable

from policylang.operators.layouts import SHARD, DigitLayout, Digits, NoDigitsError, counted, shard
from policylang.operators.moves import Gather, MoveError
from policylang.planning.edits.proof.calls import ChainCall

SMALL = (2, 3, 5)


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

    def start(self, name: str, shape: Sequence[int]) -> None:
        self.values[name] = shard(shape, SHARD - len(self.values))

    def run(self, calls: Iterable[ChainCall]) -> None:
        """Raises :class:`MoveError` for what cannot be followed, as a sentence."""
        for call in calls:
            count = call.move.ranks if isinstance(call.move, Gather) else len(call.reads)
            before = self.values[call.reads[0]]
            try:
                after = call.move.layout(before, counted(len(self.values), count))
            except (NoDigitsError, MoveError) as why:
                raise MoveError(f"`{call.name}` {str(why) or 'cuts across shards'}") from None
            self.values[call.name] = after
            self.cuts.append((before, after))

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
                if factor not in self.small:
                    free = origin <= SHARD and factor not in fixed
                    self.small[factor] = min(size, SMALL[count % len(SMALL)]) if free else size
                    count += self.small[factor] != size

    def small_shape(self, name: str) -> tuple[int, ...]:
        return tuple(prod(map(self.small.__getitem__, self._factors(dim))) for dim in self.values[name].dims)

    def small_call(self, call: ChainCall) -> ChainCall:
        """The call with the sizes among its arguments made small."""
        shape = self.small_shape(call.name)
        move = call.move.small(self.values[call.reads[0]], shape)
        return evolve(call, move=move, shape=None if call.shape is None else shape)

    def _factors(self, digits: Digits) -> list[Factor]:
        """Slow to fast."""
        found = []
        for digit in digits:
            weights = self.weights[digit.origin]
            low, high = weights.index(digit.weight), weights.index(digit.weight * digit.size)
            found += [(digit.origin, weights[at - 1], weights[at]) for at in range(high, low, -1)]
        return found
