"""What the ranks of a process group do together, as moves: gathers, scatters of sums, sums."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import Any

from attrs import frozen

from policylang.operators.elements import Tensor
from policylang.operators.layouts import DigitLayout, Digits
from policylang.operators.moves import Move, MoveError


@frozen
class GroupMove(Move):
    """What the ranks of a group do together; its values are one for each of them, in group order."""

    ranks: int
    """The size of the group, as the call has it; 0 where the call does not say."""

    def _check(self, shards: Sequence[Tensor]) -> None:
        if self.ranks not in (0, len(shards)):
            raise MoveError(f"is told of {self.ranks} ranks and has {len(shards)}")
        if any(not shard.contiguous for shard in shards):
            raise MoveError("reads a tensor that is not contiguous")
        if any(shard.shape != shards[0].shape for shard in shards):
            raise MoveError("reads tensors of different shapes")

    def _check_dims(self, shards: Sequence[Tensor]) -> None:
        self._check(shards)
        if not shards[0].shape:
            raise MoveError("reads a tensor without dimensions")


@frozen
class Gather(GroupMove):
    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        return value.joined(added, 0)

    def values(self, value: Sequence[Tensor]) -> Sequence[Tensor]:
        self._check_dims(value)
        shape = value[0].shape
        elements = [element for shard in value for element in shard.elements()]
        return [Tensor.fresh(elements, (shape[0] * len(value), *shape[1:]))] * len(value)


@frozen
class Reduction(GroupMove):
    """Sums or means of what all ranks have."""

    reduction: str

    def totals(self, value: Sequence[Tensor]) -> list[Any]:
        """Element by element. Ranks that have one and the same tensor stand for any tensors of that kind: what is added
        is alike where the elements are."""
        if self.reduction not in ("sum", "avg"):
            raise MoveError(f"reduces with `{self.reduction}`")
        if all(part is value[0] for part in value):
            totals = [element * len(value) for element in value[0].elements()]
        else:
            totals = list(map(sum, zip(*(part.elements() for part in value), strict=True)))
        if self.reduction == "avg":  # exact, so that a mean of all and a mean of means compare equal
            totals = [Fraction(total) / len(value) for total in totals]
        return totals


@frozen
class AllReduce(Reduction):
    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        return value

    def values(self, value: Sequence[Tensor]) -> Sequence[Tensor]:
        self._check(value)
        return [Tensor.fresh(self.totals(value), value[0].shape)] * len(value)


@frozen
class Scatter(Reduction):
    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        return value.cut(0, self.ranks)[1]

    def values(self, value: Sequence[Tensor]) -> Sequence[Tensor]:
        self._check_dims(value)
        length, rest = divmod(value[0].shape[0], self.ranks)
        if rest:
            raise MoveError("scatters unevenly")
        totals = self.totals(value)
        shape = (length, *value[0].shape[1:])
        count = prod(shape)
        return [Tensor.fresh(totals[place * count : (place + 1) * count], shape) for place in range(self.ranks)]
