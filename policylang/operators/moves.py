"""Element moves, one class each (view, permute, split, gather, …), and their effect on layouts, strides and values.

===============  =======================================================================================================
``layout``       the digits of where each element comes from (:mod:`policylang.operators.layouts`)
``strides``      a tensor that lies otherwise in memory than it was traced with
``small``        the call on tensors whose lengths a proof has made small
``values``       the elements themselves
===============  =======================================================================================================

Which operator is which move stands in :mod:`policylang.operators.table`. Elements are moved in pure Python and not by
torch: plans are made where there is none, and a sum that tells which of hundreds of ranks it is of, or an exact mean,
is no machine number. The tests hold every move against torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

from attrs import evolve, frozen

from policylang.operators.elements import Tensor
from policylang.operators.layouts import DigitLayout, Digits, NoDigitsError, size_of
from policylang.operators.strides import Lengths, contiguous, is_contiguous, is_dense, permuted, viewed


class MoveError(Exception):
    """What torch would refuse, or what is not known here: a phrase that goes after the name of the call."""


@frozen
class Move:
    """One call. As it is here: one through which a value is followed, and of which no more is known."""

    keeps_part: ClassVar[bool] = False
    """Whether it may leave out elements, add some, or return several tensors."""

    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        """Of its result, of a split of each piece. ``added``: the digits that count what it puts together.

        Raises :class:`NoDigitsError`.
        """
        raise NoDigitsError("is no layout operator")

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        """Of its result; None where it needs what it was traced with."""
        return None

    def copies(self, shape: Lengths, stride: Lengths) -> bool:
        """Whether it writes its result anew."""
        return False

    def small(self, before: DigitLayout, shape: Lengths) -> Move:
        """The same call on small tensors, by the layout of what it reads and the small shape of its result."""
        return self

    def on(self, rank: int) -> Move:
        """As one rank has it."""
        return self

    def values(self, value: Any) -> Any:
        """Of a tensor, of all that a join reads, or of the pieces that a split returns. Raises :class:`MoveError`."""
        raise MoveError("is not known to move elements only")


@frozen
class Alias(Move):
    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        return value

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        return stride

    def values(self, value: Any) -> Any:
        return value


@frozen
class Clone(Alias):
    """A copy or a cast; casts to another dtype are refused where layouts are followed."""

    memory_format: str | None = None
    cast: bool = False
    where_needed: bool = False
    """Only of what is not contiguous."""

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        if self.memory_format == "contiguous_format" and not self.cast:
            return None if self.where_needed else contiguous(shape)
        preserves = self.memory_format in (None, "preserve_format") and is_dense(shape, stride)
        return stride if preserves else None

    def copies(self, shape: Lengths, stride: Lengths) -> bool:
        return not is_contiguous(shape, stride) if self.where_needed else not self.cast

    def values(self, value: Tensor) -> Tensor:
        """Strides are preserved where they may be: what might be no view of the result is none."""
        if self.where_needed and value.contiguous:
            return value
        if self.memory_format == "contiguous_format" or value.contiguous:
            return Tensor.fresh(value.elements(), value.shape)
        order = sorted(range(len(value.shape)), key=lambda dim: -value.stride[dim])
        slow_first = value.permuted(order)
        return Tensor.fresh(slow_first.elements(), slow_first.shape).permuted(list(map(order.index, range(len(order)))))


@frozen
class Pad(Clone):
    """Followed where it adds nothing and takes nothing away."""

    keeps_part = True
    changes: bool = True

    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        if self.changes:
            raise NoDigitsError("keeps a part")
        return value

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        return None

    def values(self, value: Tensor) -> Tensor:
        if self.changes:
            raise MoveError("pads")
        return super().values(value)


@frozen
class View(Move):
    """By the shape of its result, which the graph knows."""

    shape: Lengths
    copy: bool = False
    """Whether it copies what cannot be viewed."""

    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        return value.viewed(self.shape)

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        found = viewed(shape, stride, self.shape)
        return contiguous(self.shape) if found is None and self.copy else found

    def copies(self, shape: Lengths, stride: Lengths) -> bool:
        return self.copy and viewed(shape, stride, self.shape) is None

    def small(self, before: DigitLayout, shape: Lengths) -> Move:
        return evolve(self, shape=shape)

    def values(self, value: Tensor) -> Tensor:
        if prod(self.shape) != prod(value.shape):
            raise MoveError(f"views {list(value.shape)} as {list(self.shape)}")
        stride = viewed(value.shape, value.stride, self.shape)
        if stride is None and not self.copy:
            raise MoveError("views a tensor whose elements do not lie side by side")
        if stride is None:
            return Tensor.fresh(value.elements(), self.shape)
        return Tensor(value.memory, self.shape, stride, value.offset)


@frozen
class Expand(View):
    """Followed where it repeats nothing."""

    keeps_part = True

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        return None

    def values(self, value: Tensor) -> Tensor:
        if value.shape != self.shape:
            raise MoveError("repeats elements")
        return value


@frozen
class Flatten(View):
    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        """One dimension, flattened, is left as it is."""
        return stride if shape == self.shape else super().strides(shape, stride)


@frozen
class Squeeze(View):
    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        """Which of several lengths of 1 are dropped makes no difference to the others' strides."""
        kept = tuple(step for length, step in zip(shape, stride, strict=True) if length != 1)
        return kept if len(kept) == len(self.shape) else None


@frozen
class Unsqueeze(View):
    dim: int = 0

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        dim = self.dim % (len(shape) + 1)
        step = shape[dim] * stride[dim] if dim < len(shape) else 1
        return (*stride[:dim], step, *stride[dim:])


@frozen
class Permute(Move):
    dims: tuple[int, ...]
    """Which dimension each place has afterwards."""

    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        return value.permuted(self.dims)

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        return permuted(stride, self.dims)

    def values(self, value: Tensor) -> Tensor:
        return value.permuted(self.dims)


@frozen
class Part:
    """In place of a slice's bounds: one of equal parts of the dimension, which one depends on the rank."""

    places: tuple[tuple[int, int], ...]
    """Of each rank."""
    count: int


@frozen
class Cut(Move):
    """A part of one dimension."""

    keeps_part = True
    dim: int
    start: Any
    """A number or None; a :class:`Part`, and then of one rank a pair of its place and count."""
    stop: Any = None
    step: int = 1
    length: int | None = None
    """In place of ``stop``."""
    drops: bool = False
    """Whether the dimension, of which one index is left, goes."""

    def bounds(self, length: int) -> tuple[int, int]:
        if isinstance(self.start, tuple):
            place, count = self.start
            if length % count:
                raise MoveError(f"cuts {length} into {count} equal parts")
            return length // count * place, length // count * (place + 1)
        first = _within(self.start, length, 0)
        return first, _within(self.stop, length, length) if self.length is None else min(first + self.length, length)

    def piece(self, length: int) -> tuple[int, int] | None:
        """Which of how many equal parts of a dimension it keeps; None where it keeps something else."""
        if self.drops or self.step != 1 or not all(isinstance(end, int | None) for end in (self.start, self.stop)):
            return None
        first, last = self.bounds(length)
        size = last - first
        return None if size <= 0 or first % size or length % size else (first // size, length // size)

    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        return value.cut(self.dim, self._piece(value)[1])[1]

    def small(self, before: DigitLayout, shape: Lengths) -> Move:
        return self if isinstance(self.start, Part) else Cut(self.dim, self._piece(before))

    def _piece(self, value: DigitLayout) -> tuple[int, int]:
        if isinstance(self.start, Part):
            return 0, self.start.count
        found = self.piece(size_of(value.dims[self.dim]))
        if found is None:
            raise NoDigitsError("keeps a part")
        return found

    def on(self, rank: int) -> Move:
        start = self.start
        return evolve(self, start=(dict(start.places)[rank], start.count)) if isinstance(start, Part) else self

    def values(self, value: Tensor) -> Tensor:
        dim = self.dim % len(value.shape)
        first, last = self.bounds(value.shape[dim])
        shape, stride = list(value.shape), list(value.stride)
        shape[dim], stride[dim] = max(0, -(-(last - first) // self.step)), stride[dim] * self.step
        if self.drops:
            del shape[dim], stride[dim]
        return Tensor(value.memory, tuple(shape), tuple(stride), value.offset + first * value.stride[dim])


def _within(bound: int | None, length: int, default: int) -> int:
    """An index that may count from the end and lie outside."""
    return default if bound is None else max(0, min(length, bound + length if bound < 0 else bound))


@frozen
class Split(Move):
    """Parts of one dimension, one after the other."""

    keeps_part = True
    dim: int
    size: Any = None
    """Of each part but the last, or of each."""
    count: int | None = None
    """In place of ``size``: of how many parts there are at most."""
    drops: bool = False
    """Whether the parts, each of one index, lose the dimension."""

    def sizes(self, length: int) -> tuple[int, ...]:
        if isinstance(self.size, tuple):
            if sum(self.size) != length:
                raise MoveError(f"splits {length} as {list(self.size)}")
            return self.size
        size = self.size if self.count is None else max(1, -(-length // self.count))
        return tuple(min(size, length - at) for at in range(0, length, size))

    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        return value.cut(self.dim, self._count(value), drops=self.drops)[1]

    def small(self, before: DigitLayout, shape: Lengths) -> Move:
        return Split(self.dim, count=self._count(before), drops=self.drops)

    def _count(self, value: DigitLayout) -> int:
        sizes = self.sizes(size_of(value.dims[self.dim]))
        if len(set(sizes)) != 1:
            raise NoDigitsError("cuts unevenly")
        return len(sizes)

    def values(self, value: Tensor) -> tuple[Tensor, ...]:
        found, at = [], 0
        for size in self.sizes(value.shape[self.dim]):
            found.append(Cut(self.dim, at, length=size, drops=self.drops).values(value))
            at += size
        return tuple(found)


@frozen
class Pick(Move):
    """One of the parts of a split."""

    keeps_part = True
    index: int

    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        return value

    def values(self, value: Sequence[Tensor]) -> Tensor:
        return value[self.index]


@frozen
class Join(Move):
    """Several tensors one after the other along a dimension, which is a new one where they are stacked."""

    dim: int
    stacked: bool = False

    def copies(self, shape: Lengths, stride: Lengths) -> bool:
        return True

    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        return value.joined(added, self.dim, stacked=self.stacked)

    def values(self, value: Sequence[Tensor]) -> Tensor:
        shape = value[0].shape
        dim = self.dim % (len(shape) + self.stacked)
        lengths = [1 if self.stacked else each.shape[dim] for each in value]
        after = dim if self.stacked else dim + 1
        if any(each.shape[:dim] + each.shape[after:] != shape[:dim] + shape[after:] for each in value):
            raise MoveError("joins tensors of different shapes")
        elements, sizes = [each.elements() for each in value], [length * prod(shape[after:]) for length in lengths]
        joined: list[Any] = []
        for at in range(prod(shape[:dim])):
            for each, size in zip(elements, sizes, strict=True):
                joined += each[at * size : (at + 1) * size]
        return Tensor.fresh(joined, (*shape[:dim], sum(lengths), *shape[after:]))
