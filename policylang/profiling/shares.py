"""Attention and convolutions: matrix work that reaches more or less than products of its size do.

Each is measured in its forward and in its backward, and stands under the operator that torch chooses for it here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from policylang.profiling.operands import Operands
from policylang.profiling.trials import Run, Trial
from policylang.torch_compat.eager import operators_called

HEADS = {"cpu": ((2, 8, 256, 64), (2, 8, 512, 64)), "cuda": ((4, 16, 2048, 128), (2, 16, 4096, 128))}
"""Batch, heads, tokens and the width of a head: queries, keys and values."""
IMAGES = {"cpu": (4, 28), "cuda": (64, 56)}
"""Batch and edge of the images."""
KERNELS = ((128, 128, 3), (256, 64, 1), (64, 256, 1))
"""Channels in and out, and the edge of the kernel: those of a residual network's blocks."""


@frozen(eq=False)
class MatrixWork:
    """One call of an operator with a backward."""

    name: str
    shapes: Sequence[Sequence[int]]
    call: Callable[..., Tensor]
    flops: float
    """Of the forward, as :mod:`policylang.operators.flops` counts it."""
    backward: float
    """How many times as many the backward has."""


def matrix_work(kind: str) -> Iterator[MatrixWork]:
    # a decoder's: the count knows no mask, so what a kernel saves by one is part of what it reaches
    causal = partial(functional.scaled_dot_product_attention, is_causal=True)
    for shape in HEADS[kind]:
        flops = 4.0 * prod(shape) * shape[2]
        yield MatrixWork("attention", (shape,) * 3, causal, flops, 2.5)
    batch, edge = IMAGES[kind]
    for channels, out, kernel in KERNELS:
        flops = 2.0 * batch * out * edge**2 * channels * kernel**2
        shapes = ((batch, channels, edge, edge), (out, channels, kernel, kernel))
        yield MatrixWork("convolution", shapes, partial(functional.conv2d, padding=kernel // 2), flops, 2.0)


def shares(operands: Operands, dtype: torch.dtype) -> Iterator[Trial]:
    """Trials whose work is in FLOPs, under the name of the operator, ``convolution_backward``; nothing where torch has
    no such operation here."""
    for work in matrix_work(operands.device.type):
        try:
            forward, backward = _called(work, operands, dtype)
        except (RuntimeError, NotImplementedError):
            continue
        yield Trial(work.name, forward, work.flops, partial(_forward, work, operands, dtype))
        if backward:
            flops = work.flops * work.backward
            yield Trial(f"{work.name}, backward", backward, flops, partial(_backward, work, operands, dtype))


def _called(work: MatrixWork, operands: Operands, dtype: torch.dtype) -> tuple[str, str]:
    """The operators that run forward and backward: of those that are called, the ones that are named after it."""
    stem = work.name
    inputs = [each.detach().requires_grad_() for each in operands.of(dtype, *work.shapes)]
    with operators_called() as forward:
        result = work.call(*inputs)
    with operators_called() as backward:
        torch.autograd.grad(result, inputs, result.detach())
    named = [[name for name in names if stem in name] for names in (forward, backward)]
    if not named[0]:
        raise NotImplementedError(f"no operator of {work.name}")
    return named[0][0], named[1][0] if named[1] else ""


def _forward(work: MatrixWork, operands: Operands, dtype: torch.dtype) -> Run:
    inputs = operands.of(dtype, *work.shapes)
    return lambda: work.call(*inputs)


def _backward(work: MatrixWork, operands: Operands, dtype: torch.dtype) -> Run:
    inputs = [each.detach().requires_grad_() for each in operands.of(dtype, *work.shapes)]
    result = work.call(*inputs)
    gradient = result.detach().clone()
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)
