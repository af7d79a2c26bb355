"""Lengths as products of factors: which of them an operator cuts or counts, and how small the others may be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from attrs import mutable


class MoveError(Exception):
    """A call that torch would refuse, or that is not known here."""


class CallError(MoveError):
    """The same as a phrase that goes after the name of the call."""


@mutable(eq=False)
class Factor:
    """A factor of a length. Once an operator cuts it, its parts stand for it wherever it occurs."""

    size: int
    fixed: bool
    """Whether its size counts: the number of ranks of a group, or of pieces."""
    parts: tuple[Factor, Factor] | None = None
    small: int = 0

    def cut(self, first: int) -> None:
        self.parts = Factor(first, self.fixed), Factor(self.size // first, self.fixed)


Dim = list[Factor]


@mutable(eq=False)
class Pieces:
    """What a split makes: equal pieces of one dimension."""

    dims: list[Dim]
    """Of the whole."""
    dim: int
    count: Dim
    """The factors that count pieces."""
    drops: bool
    """Whether each has lost the dimension."""


def leaves(dim: Iterable[Factor]) -> list[Factor]:
    found: list[Factor] = []
    for factor in dim:
        found.extend([factor] if factor.parts is None else leaves(factor.parts))
    return found


def sized(dim: Iterable[Factor]) -> int:
    return prod(factor.size for factor in dim)


def small_size(dim: Iterable[Factor]) -> int:
    return prod(factor.small for factor in leaves(dim))


def small_shape(dims: Iterable[Dim]) -> tuple[int, ...]:
    return tuple(map(small_size, dims))


def parts(dim: Dim, count: int, *, fix: bool = False) -> tuple[Dim, Dim]:
    """The slowest factors of a length that make up ``count``, and the others. Cuts one where it has to.

    ``fix``: what makes up ``count`` cannot be made smaller.
    """
    taken, left, wanted = [], leaves(dim), count
    while wanted > 1:
        if not left:
            raise MoveError("lengths do not fit")
        factor = left.pop(0)
        if wanted % factor.size == 0:
            taken.append(factor)
            wanted //= factor.size
        elif factor.size % wanted == 0:
            factor.cut(wanted)
            assert factor.parts is not None
            taken.append(factor.parts[0])
            left.insert(0, factor.parts[1])
            wanted = 1
        else:
            raise MoveError(f"{factor.size} is cut into {wanted} parts")
    for factor in leaves(taken) if fix else ():
        factor.fixed = True
    return taken, left


def dealt(dims: Sequence[Dim], shape: Sequence[int]) -> list[Dim]:
    """The factors of all lengths, in order, as those of another shape."""
    if tuple(map(sized, dims)) == tuple(shape):
        return list(dims)
    found, factors = [], [factor for dim in dims for factor in dim]
    for length in shape:
        taken, factors = parts(factors, length)
        found.append(taken)
    if sized(factors) != 1:
        raise CallError("changes the number of elements")
    return found
