"""The layout algebra: where each element of a value comes from, as digits of mixed-radix numbers.

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

from collections.abc import Sequence
from math import prod
from typing import Any

from attrs import frozen

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
"""As the origin of a digit: the row-major index of an element in its shard. Origins from 0 number the gathers; a
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
