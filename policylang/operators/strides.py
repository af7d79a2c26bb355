"""Shapes and strides of views, as torch computes them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

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
    """Whether elements lie in row-major order; strides of lengths of 1 do not matter."""
    expected = contiguous(shape)
    return prod(shape) == 0 or all(
        length == 1 or here == wanted for length, here, wanted in zip(shape, stride, expected, strict=True)
    )


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements fill a block of memory without gaps or overlaps, in whatever order of dimensions."""
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
    """The strides of a view of another shape; None where there is none and the elements would have to be copied.

    Dimensions are taken in runs that lie in memory as one; each run is cut anew (``computeStride`` in ATen).
    """
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
