"""The ways in which operators move elements, one class each, and what each does to every view of a value.

=================  =====================================================================================================
:meth:`layout`     the digits of where each element comes from (:mod:`policylang.operators.layouts`)
:meth:`strides`    a tensor that lies otherwise in memory than it was traced with
:meth:`factors`    the factors of a shape's lengths: which may be made small in a proof, and what the call is then
:meth:`values`     the elements themselves
=================  =====================================================================================================

Which operator is which move stands in :mod:`policylang.operators.table`. Elements are moved in pure Python: a proof has
to run where there is no torch (plans are made from snapshots), for hundreds of ranks at once, on elements that are no
machine numbers (a sum tells which ranks it is of, a mean is exact). The tests hold every move against torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import Any, ClassVar

from attrs import evolve, frozen

from policylang.operators import layouts, strides
from policylang.operators.elements import Tensor
from policylang.operators.factors import (
    CallError,
    Dim,
    Factor,
    MoveError,
    Pieces,
    dealt,
    parts,
    sized,
    small_shape,
    small_size,
)
from policylang.operators.layouts import Layout
from policylang.operators.strides import Lengths


@frozen
class Move:
    """One call. As it is here: a call through which a value is followed, and of which no more is known."""

    keeps_part: ClassVar[bool] = False
    """Whether it may leave out elements, or return several tensors."""

    def layout(self, value: Layout) -> Layout | None:
        """None where it is none of the same elements. Raises ``NoDigitsError`` where it cuts digits."""
        return None

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        """Of its result; None where it needs what it was traced with."""
        return None

    def copies(self, shape: Lengths, stride: Lengths) -> bool:
        """Whether it writes its result anew."""
        return False

    def factors(self, value: Any) -> Any:
        """From those of what it reads, one list a dimension, to those of its result."""
        raise CallError("returns no single tensor")

    def small(self, before: Any, after: Any) -> Move:
        """The same call on small tensors, by the factors of what it reads and returns."""
        return self

    def on(self, rank: int) -> Move:
        """As one rank has it."""
        return self

    def values(self, value: Any) -> Any:
        """Of a tensor, or of all that a join reads; the pieces of a split are a tuple."""
        raise CallError("is not known to move elements only")


@frozen
class Alias(Move):
    def layout(self, value: Layout) -> Layout | None:
        return value

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        return stride

    def factors(self, value: Any) -> Any:
        return value

    def values(self, value: Any) -> Any:
        return value


@frozen
class Copy(Alias):
    """A copy or a cast, which is refused where the dtype changes."""

    memory_format: str | None = None
    cast: bool = False
    where_needed: bool = False
    """Only of what is not contiguous."""

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        if self.memory_format == "contiguous_format" and not self.cast:
            return None if self.where_needed else strides.contiguous(shape)
        preserves = self.memory_format in (None, "preserve_format") and strides.is_dense(shape, stride)
        return stride if preserves else None

    def copies(self, shape: Lengths, stride: Lengths) -> bool:
        return not strides.is_contiguous(shape, stride) if self.where_needed else not self.cast

    def values(self, value: Tensor) -> Tensor:
        """Strides are preserved where they may be: a view that follows is refused where it might be."""
        if self.where_needed and value.contiguous:
            return value
        if self.memory_format == "contiguous_format" or value.contiguous:
            return Tensor.fresh(value.elements(), value.shape)
        order = sorted(range(len(value.shape)), key=lambda dim: -value.stride[dim])
        slow_first = value.permuted(order)
        back = [order.index(dim) for dim in range(len(order))]
        return Tensor.fresh(slow_first.elements(), slow_first.shape).permuted(back)


@frozen
class View(Move):
    """By the shape of its result, which the graph knows."""

    shape: Lengths
    copy: bool = False
    """Whether it copies what cannot be viewed."""

    def layout(self, value: Layout) -> Layout | None:
        return layouts.viewed(value, self.shape)

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        found = strides.viewed(shape, stride, self.shape)
        return strides.contiguous(self.shape) if found is None and self.copy else found

    def copies(self, shape: Lengths, stride: Lengths) -> bool:
        return self.copy and strides.viewed(shape, stride, self.shape) is None

    def factors(self, value: Any) -> Any:
        return dealt(value, self.shape)

    def small(self, before: Any, after: Any) -> Move:
        return evolve(self, shape=small_shape(after))

    def values(self, value: Tensor) -> Tensor:
        if prod(self.shape) != prod(value.shape):
            raise CallError(f"views {list(value.shape)} as {list(self.shape)}")
        stride = strides.viewed(value.shape, value.stride, self.shape)
        if stride is not None:
            return Tensor(value.memory, self.shape, stride, value.offset)
        if not self.copy:
            raise CallError("views a tensor whose elements do not lie side by side")
        return Tensor.fresh(value.elements(), self.shape)


@frozen
class Expand(View):
    """Followed where it repeats nothing."""

    keeps_part = True

    def layout(self, value: Layout) -> Layout | None:
        return value

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        return None

    def values(self, value: Tensor) -> Tensor:
        if value.shape != self.shape:
            raise CallError("repeats elements")
        return value


@frozen
class Pad(Alias):
    """Followed where it adds nothing and takes nothing away."""

    keeps_part = True
    changes: bool

    def layout(self, value: Layout) -> Layout | None:
        return None if self.changes else value

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        return None

    def values(self, value: Tensor) -> Tensor:
        if self.changes:
            raise CallError("pads")
        return value


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
    """Which dimension comes to stand at each place."""

    def layout(self, value: Layout) -> Layout | None:
        return layouts.permuted(value, self.dims)

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        return strides.permuted(stride, self.dims)

    def factors(self, value: Any) -> Any:
        return [value[dim] for dim in self.dims]

    def values(self, value: Tensor) -> Tensor:
        return value.permuted(self.dims)


@frozen
class Part:
    """As an end of a slice: a boundary between equal parts of the dimension, which one depends on the rank."""

    index: tuple[tuple[int, int], ...]
    """For each rank, which boundary: 0 is the beginning, :attr:`count` the end."""
    count: int


@frozen
class Cut(Move):
    """A part of one dimension."""

    keeps_part = True
    dim: int
    start: Any
    """A number, None or, with :attr:`stop`, a :class:`Part`."""
    stop: Any = None
    step: int = 1
    length: int | None = None
    """In place of ``stop``."""
    drops: bool = False
    """Whether the dimension, of which one index is left, goes."""

    def layout(self, value: Layout) -> Layout | None:
        return value

    def bounds(self, length: int) -> tuple[int, int]:
        first = _within(self.start, length, 0)
        return first, min(first + self.length, length) if self.length is not None else _within(
            self.stop, length, length
        )

    def piece(self, length: int) -> tuple[int, int] | None:
        """Which of how many equal parts of a dimension it keeps; None where it keeps something else."""
        if self.drops or self.step != 1 or not all(isinstance(end, int | None) for end in (self.start, self.stop)):
            return None
        first, last = self.bounds(length)
        size = last - first
        if size <= 0 or first % size or length % size:
            return None
        return first // size, length // size

    def factors(self, value: Any) -> Any:
        dim = self.dim % len(value)
        if isinstance(self.start, Part):
            rest = parts(value[dim], self.start.count)[1]
        else:
            found = self.piece(sized(value[dim]))
            if found is None:
                raise CallError("keeps a part")
            rest = parts(value[dim], found[1], fix=True)[1]
        return [*value[:dim], rest, *value[dim + 1 :]]

    def small(self, before: Any, after: Any) -> Move:
        if isinstance(self.start, Part):
            return self
        length, whole = small_size(before[self.dim]), sized(before[self.dim])
        first, last = (end * length // whole for end in self.bounds(whole))
        return Cut(self.dim, first, last)

    def on(self, rank: int) -> Move:
        if not isinstance(self.start, Part):
            return self
        return evolve(self, start=_end(self.start, rank), stop=_end(self.stop, rank))

    def values(self, value: Tensor) -> Tensor:
        dim = self.dim % len(value.shape)
        first, last = self.bounds(value.shape[dim])
        kept = (max(0, -(-(last - first) // self.step)),)
        after = dim + 1
        between = () if self.drops else kept, () if self.drops else (value.stride[dim] * self.step,)
        shape = value.shape[:dim] + between[0] + value.shape[after:]
        stride = value.stride[:dim] + between[1] + value.stride[after:]
        return Tensor(value.memory, shape, stride, value.offset + first * value.stride[dim])


def _end(part: Part, rank: int) -> tuple[int, int]:
    return dict(part.index)[rank], part.count


def _within(bound: Any, length: int, default: int) -> int:
    if bound is None:
        return default
    if isinstance(bound, tuple):
        index, count = bound
        if length % count:
            raise MoveError(f"{length} has no {count} equal parts")
        return int(length // count * index)
    return int(max(0, min(length, bound + length if bound < 0 else bound)))


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
                raise CallError(f"splits {length} as {list(self.size)}")
            return self.size
        size = self.size if self.count is None else max(1, -(-length // self.count))
        return tuple(min(size, length - at) for at in range(0, length, size))

    def factors(self, value: Any) -> Any:
        dim = self.dim % len(value)
        length = sized(value[dim])
        sizes = self.sizes(length)
        if len(set(sizes)) != 1:
            raise CallError("cuts unevenly")
        return Pieces(value, dim, parts(value[dim], len(sizes), fix=True)[0], self.drops)

    def small(self, before: Any, after: Any) -> Move:
        return Split(after.dim, count=small_size(after.count), drops=self.drops)

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

    def factors(self, value: Pieces) -> Any:
        dims, dim = value.dims, value.dim
        rest = [] if value.drops else [parts(dims[dim], sized(value.count))[1]]
        return [*dims[:dim], *rest, *dims[dim + 1 :]]

    def values(self, value: Sequence[Tensor]) -> Tensor:
        return value[self.index]


@frozen
class Join(Move):
    """Several tensors one after the other along a dimension, which is a new one where they are stacked."""

    dim: int
    stacked: bool = False

    def copies(self, shape: Lengths, stride: Lengths) -> bool:
        return True

    def factors(self, value: Sequence[list[Dim]]) -> Any:
        dims = list(value[0])
        dim = self.dim % (len(dims) + self.stacked)
        count = [Factor(len(value), fixed=True)]
        if self.stacked:
            dims.insert(dim, count)
        else:
            dims[dim] = count + dims[dim]
        return dims

    def values(self, value: Sequence[Tensor]) -> Tensor:
        shape = value[0].shape
        dim = self.dim % (len(shape) + self.stacked)
        lengths = [1 if self.stacked else each.shape[dim] for each in value]
        after = dim if self.stacked else dim + 1
        if any(each.shape[:dim] + each.shape[after:] != shape[:dim] + shape[after:] for each in value):
            raise CallError("joins tensors of different shapes")
        elements, sizes = [each.elements() for each in value], [length * prod(shape[after:]) for length in lengths]
        joined: list[Any] = []
        for at in range(prod(shape[:dim])):
            for each, size in zip(elements, sizes, strict=True):
                joined += each[at * size : (at + 1) * size]
        return Tensor.fresh(joined, (*shape[:dim], sum(lengths), *shape[after:]))


@frozen
class Collective(Move):
    """What the ranks of a group do together; its values are one for each of them, in group order."""

    ranks: int
    """The size of the group, as the call has it."""

    def _check(self, shards: Sequence[Tensor]) -> None:
        if self.ranks != len(shards):
            raise CallError(f"is told of {self.ranks} ranks and has {len(shards)}")
        if any(not shard.contiguous for shard in shards):
            raise CallError("reads a tensor that is not contiguous")
        if any(shard.shape != shards[0].shape or not shard.shape for shard in shards):
            raise CallError("reads tensors of different shapes")


@frozen
class Gather(Collective):
    def factors(self, value: Any) -> Any:
        return [[Factor(self.ranks, fixed=True), *value[0]], *value[1:]]

    def values(self, value: Sequence[Tensor]) -> Sequence[Tensor]:
        self._check(value)
        shape = value[0].shape
        elements = [element for shard in value for element in shard.elements()]
        return [Tensor.fresh(elements, (shape[0] * len(value), *shape[1:]))] * len(value)


@frozen
class Scatter(Collective):
    reduction: str

    def factors(self, value: Any) -> Any:
        return [parts(value[0], self.ranks, fix=True)[1], *value[1:]]

    def values(self, value: Sequence[Tensor]) -> Sequence[Tensor]:
        self._check(value)
        if self.reduction not in ("sum", "avg"):
            raise CallError(f"reduces with `{self.reduction}`")
        length, rest = divmod(value[0].shape[0], self.ranks)
        if rest:
            raise CallError("scatters unevenly")
        totals: list[Any] = list(map(sum, zip(*(part.elements() for part in value), strict=True)))
        if self.reduction == "avg":  # exact, so that a mean of all and a mean of means compare equal
            totals = [Fraction(total) / self.ranks for total in totals]
        shape = (length, *value[0].shape[1:])
        count = prod(shape)
        return [Tensor.fresh(totals[place * count : (place + 1) * count], shape) for place in range(self.ranks)]
