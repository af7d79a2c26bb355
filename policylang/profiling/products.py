"""Matrix products by dtype and size: square, as a linear layer has them, as its weight's gradient, and in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from policylang.profiling.operands import Operands
from policylang.profiling.trials import Run, Trial

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SIZES = {"cpu": (32, 64, 128, 256, 512, 1024, 2048), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384)}
"""Edges of a square product: each does eight times the work of the one before it."""

Shapes = Callable[[int], tuple[Sequence[int], Sequence[int]]]
FAMILIES: dict[str, tuple[Shapes, Callable[[Tensor, Tensor], Tensor]]] = {
    "square": (lambda n: ((n, n), (n, n)), torch.mm),
    "linear": (lambda n: ((4 * n, n // 2), (n // 2, n // 2)), lambda tokens, weight: torch.mm(tokens, weight.t())),
    "gradient": (lambda n: ((4 * n, n // 2), (4 * n, n // 2)), lambda grown, tokens: torch.mm(grown.t(), tokens)),
    "batched": (lambda n: ((8, n // 2, n // 2), (8, n // 2, n // 2)), torch.bmm),
}
"""Shapes by the edge n, and the product. Each does 2 n³ operations."""


def products(operands: Operands) -> Iterator[Trial]:
    """Trials whose work is in FLOPs, under the name of their dtype."""
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for family, (shapes, product) in FAMILIES.items():
            for n in SIZES[operands.device.type]:
                prepare = partial(_prepare, operands, dtype, shapes(n), product)
                yield Trial(f"{name} product, {family}", name, 2.0 * n**3, prepare, f"{name} {family}")


def _prepare(
    operands: Operands, dtype: torch.dtype, shapes: Sequence[Sequence[int]], product: Callable[[Tensor, Tensor], Tensor]
) -> Run:
    left, right = operands.of(dtype, *shapes)
    return lambda: product(left, right)
