"""Attention and convolutions, forward and backward: matrix work that reaches more or less than products of its size."""

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

ATTENTION, CONVOLUTION = "attention", "convolution"
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
    """Of the forward, as :mod:`policylang.operators.work` counts it."""
    backward: float
    """How many times as many the backward has."""


def matrix_work(kind: str) -> Iterator[MatrixWork]:
    # a decoder's: the count knows no mask, so what a kernel saves by one is part of what it reaches
    causal = partial(functional.scaled_dot_product_attention, is_causal=True)
    for shape in HEADS[kind]:
        flops = 4.0 * prod(shape) * shape[2]
        yield MatrixWork(ATTENTION, (shape,) * 3, causal, flops, 2.5)
    batch, edge = IMAGES[kind]
    for channels, out, kernel in KERNELS:
        flops = 2.0 * batch * out * edge**2 * channels * kernel**2
        shapes = ((batch, channels, edge, edge), (out, channels, kernel, kernel))
        yield MatrixWork(CONVOLUTION, shapes, partial(functional.conv2d, padding=kernel // 2), flops, 2.0)


def shares(operands: Operands, dtype: torch.dtype) -> Iterator[Trial]:
    """Trials whose work is in FLOPs, under the name of what they do."""
    for work in matrix_work(operands.device.type):
        yield Trial(work.name, work.name, work.flops, partial(_forward, work, operands, dtype))
        flops = work.flops * work.backward
        yield Trial(f"{work.name}, backward", work.name, flops, partial(_backward, work, operands, dtype))


def _forward(work: MatrixWork, operands: Operands, dtype: torch.dtype) -> Run:
    inputs = operands.of(dtype, *work.shapes)
    return lambda: work.call(*inputs)


def _backward(work: MatrixWork, operands: Operands, dtype: torch.dtype) -> Run:
    inputs = [each.detach().requires_grad_() for each in operands.of(dtype, *work.shapes)]
    with torch.enable_grad():
        result = work.call(*inputs)
    gradient = result.detach().clone()
    return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)
