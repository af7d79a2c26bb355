"""The layout algebra: where each element of a value comes from, as digits, and what operators move.

A chain of gathers and layout operators moves elements and computes nothing. Each element of the result is one element
of one rank's shard; its index there and the ranks' positions in their groups consist of the same digits as its index in
the result, in another order. So a value is, for each of its dimensions, a list of digits, slow to fast; every operator
of the chain cuts, moves or joins digits.

========================  ==============================================================
gather                    a new slowest digit, the position in its group, of dimension 0
permute, transpose        dimensions change places
view, reshape             digits are dealt out anew, in order
split → getitem* → cat    the slowest digit of one dimension becomes that of another
clone                     nothing: an index means the same in a copy
========================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache, lru_cache
from math import prod
from typing import Any, ClassVar

from attrs import evolve, frozen

from policylang.operators.names import ALL_REDUCE, GATHER, GETITEM, SCATTER, WAIT, Category

Lengths = tuple[int, ...]


def contiguous(shape: Sequence[int]) -> Lengths:
    """The strides of a fresh tensor. A length of 0 counts as 1, as in torch."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Elements are in row-major order; strides of lengths of 1 do not matter."""
    expected = contiguous(shape)
    dims = zip(shape, stride, expected, strict=True)
    return prod(shape) == 0 or all(length == 1 or here == wanted for length, here, wanted in dims)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Elements fill a block of memory without gaps or overlaps, in whatever order of dimensions."""
    order = sorted((dim for dim, length in enumerate(shape) if length != 1), key=lambda dim: stride[dim])
    expected = 1
    for dim in order:
        if stride[dim] != expected:
            return False
        expected *= shape[dim]
    return True


def permuted(lengths: Sequence[int], dims: Sequence[int]) -> Lengths:
    return tuple(lengths[dim] for dim in dims)


def viewed(shape: Sequence[int], stride: Sequence[int], wanted: Sequence[int]) -> Lengths | None:
    """The strides of a view of another shape; None if the elements would have to be copied. Each run of dimensions that
    are contiguous in memory is split anew (``computeStride`` in ATen)."""
    if prod(shape) == 0:
        return tuple(stride) if tuple(shape) == tuple(wanted) else contiguous(wanted)
    strides = [0] * len(wanted)
    at = len(wanted) - 1
    step = stride[-1] if stride else 1
    run = covered = 1
    for dim in range(len(shape) - 1, -1, -1):
        run *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and stride[dim - 1] != run * step):
            while at >= 0 and (covered < run or wanted[at] == 1):
                strides[at] = covered * step
                covered *= wanted[at]
                at -= 1
            if covered != run:
                return None
            if dim > 0:
                step = stride[dim - 1]
                run = covered = 1
    if not shape:
        strides = [1] * len(wanted)
        at = -1
    return tuple(strides) if at == -1 else None


@frozen(eq=False)
class Tensor:
    memory: Sequence[Any]
    shape: Lengths
    stride: Lengths
    offset: int = 0

    @staticmethod
    def fresh(elements: Sequence[Any], shape: Sequence[int]) -> Tensor:
        """Row-major."""
        return Tensor(elements, tuple(shape), contiguous(shape))

    def elements(self) -> list[Any]:
        """In row-major order of the indices."""
        places = [self.offset]
        for length, step in zip(self.shape, self.stride, strict=True):
            places = [place + step * index for place in places for index in range(length)]
        memory = self.memory
        return [memory[place] for place in places]

    def permuted(self, dims: Sequence[int]) -> Tensor:
        return Tensor(self.memory, permuted(self.shape, dims), permuted(self.stride, dims), self.offset)

    @property
    def contiguous(self) -> bool:
        return is_contiguous(self.shape, self.stride)


SHARD = -1
"""An origin of a digit: the row-major index of an element in its shard. Origins from 0 number the gathers; a
proof that starts from several values counts down from here for the others."""


@frozen
class Digit:
    """One digit of an index: it counts ``size`` and is worth ``weight`` in the number that it is a digit of."""

    origin: int
    weight: int
    size: int


Digits = tuple[Digit, ...]
"""Slow to fast; none of them has size 1."""


@frozen
class DigitLayout:
    """A value as the digits of each of its dimensions."""

    dims: tuple[Digits, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(size_of(digits) for digits in self.dims)

    @property
    def flat(self) -> Digits:
        return tuple(digit for digits in self.dims for digit in digits)

    def permuted(self, dims: Sequence[int]) -> DigitLayout:
        return DigitLayout(tuple(self.dims[dim] for dim in dims))

    def viewed(self, shape: Sequence[int]) -> DigitLayout:
        """Raises :class:`NoDigitsError` where a dimension would have to cut a digit that it does not divide."""
        return self if self.shape == tuple(shape) else _dealt(self.flat, shape)

    def gathered(self, origin: int, size: int) -> DigitLayout:
        """The shards of a group one after the other."""
        return self.joined(counted(origin, size), 0)

    def cut(self, dim: int, count: int, *, drops: bool = False) -> tuple[Digits, DigitLayout]:
        """The digits that count a dimension's equal pieces, and each piece; ``drops``: without the dimension."""
        dim %= len(self.dims)
        taken, rest = first(self.dims[dim], count)
        return taken, DigitLayout((*self.dims[:dim], *(() if drops else (rest,)), *self.dims[dim + 1 :]))

    def joined(self, digits: Digits, dim: int, *, stacked: bool = False) -> DigitLayout:
        """Pieces that the digits count, one after the other along a dimension; ``stacked``: along a new one."""
        dim %= len(self.dims) + stacked
        own, after = ((), dim) if stacked else (self.dims[dim], dim + 1)
        return DigitLayout((*self.dims[:dim], digits + own, *self.dims[after:]))


class NoDigitsError(Exception):
    """An operator that does not only move digits. The message is empty, or a phrase behind the operator's name."""


def shard(shape: Sequence[int], origin: int = SHARD) -> DigitLayout:
    """The row-major layout that a chain starts from."""
    count = prod(shape)
    return _dealt((Digit(origin, 1, count),) if count > 1 else (), shape)


def counted(origin: int, size: int) -> Digits:
    """A new digit; none for a size of 1."""
    return (Digit(origin, 1, size),) if size > 1 else ()


def size_of(digits: Digits) -> int:
    return prod(digit.size for digit in digits)


def relative(value: DigitLayout, home: DigitLayout) -> DigitLayout:
    """A value's digits in the row-major index of its element of ``home``. Raises :class:`NoDigitsError` for others."""
    weights: list[tuple[Digit, int]] = []
    worth = 1
    for digit in reversed(home.flat):
        weights.append((digit, worth))
        worth *= digit.size

    def of(digit: Digit) -> Digit:
        for whole, worth in weights:
            inside = whole.weight <= digit.weight and digit.weight * digit.size <= whole.weight * whole.size
            if whole.origin == digit.origin and inside and digit.weight % whole.weight == 0:
                return Digit(SHARD, worth * (digit.weight // whole.weight), digit.size)
        raise NoDigitsError

    return DigitLayout(tuple(tuple(map(of, digits)) for digits in value.dims))


def _dealt(digits: Digits, shape: Sequence[int]) -> DigitLayout:
    dims = []
    for length in shape:
        taken, digits = first(digits, length)
        dims.append(taken)
    if digits:
        raise NoDigitsError
    return DigitLayout(tuple(dims))


def first(digits: Digits, length: int) -> tuple[Digits, Digits]:
    """The slowest digits that count ``length`` together, and the others. A digit is cut where it has to be."""
    taken: list[Digit] = []
    for index, digit in enumerate(digits):
        if length == 1:
            return tuple(taken), digits[index:]
        if length % digit.size == 0:
            taken.append(digit)
            length //= digit.size
        elif digit.size % length == 0:
            fast = digit.size // length
            taken.append(Digit(digit.origin, digit.weight * fast, length))
            return tuple(taken), (Digit(digit.origin, digit.weight, fast), *digits[index + 1 :])
        else:
            raise NoDigitsError
    if length != 1:
        raise NoDigitsError
    return tuple(taken), ()


class MoveError(Exception):
    """Torch would refuse the call, or it is not known here: a phrase that goes after its name."""


@frozen
class Move:
    """One call, a class for each kind (view, permute, split, gather, …), and its effect.

    ===============  ===================================================================================================
    ``layout``       the digits of where each element comes from
    ``strides``      a tensor with other strides than it was traced with
    ``small``        the call on tensors whose lengths a proof has made small
    ``values``       the elements themselves
    ===============  ===================================================================================================

    ``MOVERS`` maps operators to moves. Elements are moved in pure Python, not by torch: planning needs no torch, and a
    sum that identifies hundreds of ranks, or an exact mean, is no machine number. The tests compare every move with
    torch. As it is here: a call through which a value is followed, and of which no more is known."""

    keeps_part: ClassVar[bool] = False
    """It may leave out elements, add some, or return several tensors."""

    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        """The layout of its result; of a split, of each piece. ``added``: the digits that count the values it joins.
        Raises :class:`NoDigitsError`."""
        raise NoDigitsError("is no layout operator")

    def strides(self, shape: Lengths, stride: Lengths) -> Lengths | None:
        """The strides of its result; None where it needs those that it was traced with."""
        return None

    def copies(self, shape: Lengths, stride: Lengths) -> bool:
        """Its result is new memory."""
        return False

    def small(self, before: DigitLayout, shape: Lengths) -> Move:
        """Itself on small tensors, by the layout of what it reads and the small shape of its result."""
        return self

    def on(self, rank: int) -> Move:
        return self

    def values(self, value: Any) -> Any:
        """The result for a tensor, for all that a join reads, or for a split's pieces. Raises :class:`MoveError`."""
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
    """It copies what cannot be viewed."""

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
            raise MoveError("views a tensor that is not contiguous")
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
        """The others' strides do not depend on which lengths of 1 are dropped."""
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
    """The dimension that each place has afterwards."""

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
    """The dimension, of which one index is left, goes."""

    def bounds(self, length: int) -> tuple[int, int]:
        if isinstance(self.start, tuple):
            place, count = self.start
            if length % count:
                raise MoveError(f"cuts {length} into {count} equal parts")
            return length // count * place, length // count * (place + 1)
        first = _within(self.start, length, 0)
        return first, _within(self.stop, length, length) if self.length is None else min(first + self.length, length)

    def piece(self, length: int) -> tuple[int, int] | None:
        """The equal part of a dimension that it keeps, and of how many; None where it keeps something else."""
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
    """An index that may count from the end and be out of range."""
    return default if bound is None else max(0, min(length, bound + length if bound < 0 else bound))


@frozen
class Split(Move):
    """Parts of one dimension, one after the other."""

    keeps_part = True
    dim: int
    size: Any = None
    """The size of each part but the last, or sizes."""
    count: int | None = None
    """In place of ``size``: of how many parts there are at most."""
    drops: bool = False
    """The parts, each of one index, lose the dimension."""

    def sizes(self, length: int) -> tuple[int, ...]:
        if not isinstance(self.size, tuple):
            size = self.size if self.count is None else max(1, -(-length // self.count))
            return tuple(min(size, length - at) for at in range(0, length, size))
        if sum(self.size) != length:
            raise MoveError(f"splits {length} as {list(self.size)}")
        return self.size

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


@frozen
class GroupMove(Move):
    """A move of the ranks of a group together; its values are one for each of them, in group order."""

    ranks: int
    """The size of the group, as the call gives it; 0 if it does not."""

    def _check(self, shards: Sequence[Tensor], *, has_dimensions: bool = False) -> None:
        if self.ranks not in (0, len(shards)):
            raise MoveError(f"expects {self.ranks} ranks and has {len(shards)}")
        if any(not shard.contiguous for shard in shards):
            raise MoveError("reads a tensor that is not contiguous")
        if any(shard.shape != shards[0].shape for shard in shards):
            raise MoveError("reads tensors of different shapes")
        if has_dimensions and not shards[0].shape:
            raise MoveError("reads a tensor without dimensions")


@frozen
class Gather(GroupMove):
    def layout(self, value: DigitLayout, added: Digits = ()) -> DigitLayout:
        return value.joined(added, 0)

    def values(self, value: Sequence[Tensor]) -> Sequence[Tensor]:
        self._check(value, has_dimensions=True)
        shape = value[0].shape
        elements = [element for shard in value for element in shard.elements()]
        return [Tensor.fresh(elements, (shape[0] * len(value), *shape[1:]))] * len(value)


@frozen
class Reduction(GroupMove):
    """Sums or means of what all ranks have."""

    reduction: str

    def totals(self, value: Sequence[Tensor]) -> list[Any]:
        """Element by element. Ranks that have one and the same tensor represent any tensors of that kind: what is added
        is alike where the elements are."""
        if self.reduction not in ("sum", "avg"):
            raise MoveError(f"reduces with `{self.reduction}`")
        if all(part is value[0] for part in value):
            totals = [element * len(value) for element in value[0].elements()]
        else:
            totals = list(map(sum, zip(*(part.elements() for part in value), strict=True)))
        # a mean is exact, so that a mean of all and a mean of means compare equal
        return [Fraction(total) / len(value) for total in totals] if self.reduction == "avg" else totals


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
        self._check(value, has_dimensions=True)
        length, rest = divmod(value[0].shape[0], self.ranks)
        if rest:
            raise MoveError("scatters unevenly")
        totals = self.totals(value)
        shape = (length, *value[0].shape[1:])
        count = prod(shape)
        return [Tensor.fresh(totals[place * count : (place + 1) * count], shape) for place in range(self.ranks)]


_ROW_MAJOR = "contiguous_format"
A_VIEW, VIEWS = Category.VIEW, Category.VIEW | Category.MULTI_OUTPUT


@frozen
class Mover:
    """An operator that moves elements."""

    kind: type[Move]
    read: Callable[..., Move]
    """From the shape of the result and the arguments after the first."""
    categories: int = 0
    """The categories that its schema declares."""
    defaults: tuple[Any, ...] = ()
    """The defaults of the arguments after the first, None where there is none; plain, as in ``Facts.arguments``."""

    def completed(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a call that leaves out defaults at the end."""
        return arguments + self.defaults[len(arguments) - 1 :]


def move_of(target: str, arguments: tuple[Any, ...], shape: Lengths | None) -> Move:
    """The move of a call, by its target, its arguments, the tensors among them, and the shape of what it returns."""
    return _read(target, arguments[1:], shape)


@lru_cache(maxsize=4096)
def _read(target: str, arguments: tuple[Any, ...], shape: Lengths | None) -> Move:
    mover = MOVERS.get(target)
    if mover is None or (shape is None and issubclass(mover.kind, View | Permute)):
        return Move()
    return mover.read(shape, *arguments)


def _movedim(shape: Lengths, sources: Any, destinations: Any) -> Move:
    rank = len(shape)
    as_tuples = (dims if isinstance(dims, tuple) else (dims,) for dims in (sources, destinations))
    froms, tos = ([dim % rank for dim in dims] for dims in as_tuples)
    moved = dict(zip(tos, froms, strict=True))
    free = iter([dim for dim in range(rank) if dim not in froms])
    return Permute(tuple([moved[dim] if dim in moved else next(free) for dim in range(rank)]))


def _transpose(shape: Lengths, one: int, other: int) -> Move:
    dims = list(range(len(shape)))
    dims[one], dims[other] = dims[other], dims[one]
    return Permute(tuple(dims))


_ALIAS = Mover(Alias, lambda *_: Alias(), A_VIEW)
_MOVEDIM = Mover(Permute, _movedim, A_VIEW)
_SPLIT = Mover(Split, lambda _, size, dim=0: Split(dim, size), VIEWS, (None, 0))
_SQUEEZE = Mover(Squeeze, lambda shape, *_: Squeeze(shape), A_VIEW)
_UNKNOWN = Mover(Move, lambda *_: Move(), A_VIEW)
_VIEW = Mover(View, lambda shape, *_: View(shape), A_VIEW)

MOVERS: dict[str, Mover] = {
    GATHER: Mover(Gather, lambda _, ranks, group: Gather(ranks), Category.COLLECTIVE),
    SCATTER: Mover(Scatter, lambda _, how, ranks, group: Scatter(ranks, how), Category.COLLECTIVE),
    ALL_REDUCE: Mover(AllReduce, lambda _, how, group: AllReduce(0, how), Category.COLLECTIVE),
    WAIT: evolve(_ALIAS, categories=0),
    "aten._reshape_alias.default": _UNKNOWN,
    "aten._to_copy.default": Mover(
        Clone, lambda _, *options: Clone(options[-1], cast=True), defaults=(None, None, None, None, False, None)
    ),
    "aten._unsafe_view.default": evolve(_VIEW, categories=0),
    "aten.alias.default": _ALIAS,
    "aten.cat.default": Mover(Join, lambda _, dim=0: Join(dim), defaults=(0,)),
    "aten.chunk.default": Mover(Split, lambda _, count, dim=0: Split(dim, count=count), VIEWS, (None, 0)),
    "aten.clone.default": Mover(Clone, lambda _, memory_format=None: Clone(memory_format), defaults=(None,)),
    "aten.constant_pad_nd.default": Mover(Pad, lambda _, pads, *__: Pad(changes=any(pads)), defaults=(None, 0)),
    "aten.contiguous.default": Mover(
        Clone,
        lambda _, memory_format=0: Clone(_ROW_MAJOR, where_needed=True) if memory_format in (0, _ROW_MAJOR) else Move(),
        A_VIEW,
        (0,),
    ),
    "aten.detach.default": _ALIAS,
    "aten.expand.default": Mover(Expand, lambda shape, *_: Expand(shape), A_VIEW, (None, False)),
    "aten.flatten.using_ints": Mover(Flatten, lambda shape, *_: Flatten(shape, copy=True), A_VIEW, (0, -1)),
    "aten.lift_fresh.default": _ALIAS,
    "aten.movedim.int": _MOVEDIM,
    "aten.movedim.intlist": _MOVEDIM,
    "aten.narrow.default": Mover(Cut, lambda _, dim, start, length: Cut(dim, start, length=length), A_VIEW),
    "aten.permute.default": Mover(
        Permute, lambda shape, dims: Permute(tuple([dim % len(shape) for dim in dims])), A_VIEW
    ),
    "aten.reshape.default": Mover(View, lambda shape, *_: View(shape, copy=True), A_VIEW),
    "aten.select.int": Mover(Cut, lambda _, dim, at: Cut(dim, at, length=1, drops=True), A_VIEW),
    "aten.slice.Tensor": Mover(
        Cut, lambda _, dim=0, start=None, stop=None, step=1: Cut(dim, start, stop, step), A_VIEW, (0, None, None, 1)
    ),
    "aten.split.Tensor": _SPLIT,
    "aten.split.sizes": _SPLIT,
    "aten.split_with_sizes.default": _SPLIT,
    "aten.squeeze.default": _SQUEEZE,
    "aten.squeeze.dim": _SQUEEZE,
    "aten.squeeze.dims": _SQUEEZE,
    "aten.stack.default": Mover(Join, lambda _, dim=0: Join(dim, stacked=True), defaults=(0,)),
    "aten.t.default": Mover(Permute, lambda shape: Permute(tuple(range(len(shape)))[::-1]), A_VIEW),
    "aten.transpose.int": Mover(Permute, _transpose, A_VIEW),
    "aten.unbind.int": Mover(Split, lambda _, dim=0: Split(dim, 1, drops=True), VIEWS, (0,)),
    "aten.unflatten.int": _VIEW,
    "aten.unsqueeze.default": Mover(Unsqueeze, lambda shape, dim: Unsqueeze(shape, dim=dim), A_VIEW),
    "aten.view.default": _VIEW,
    "aten.view.dtype": _UNKNOWN,
    GETITEM: Mover(Pick, lambda _, index: Pick(index)),
    "prims.convert_element_type.default": Mover(Clone, lambda *_: Clone(cast=True)),
}


@cache
def movers_of(*kinds: type[Move]) -> frozenset[str]:
    """The operators that are moves of one of these kinds."""
    return frozenset(name for name, mover in MOVERS.items() if issubclass(mover.kind, kinds))


SPLITS = movers_of(Split)
JOINS = movers_of(Join)
PASSING = frozenset(MOVERS) - JOINS - movers_of(GroupMove)
"""Operators of one tensor through which a chain is followed, whether or not it can then be rewritten."""
