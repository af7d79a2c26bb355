"""What a compiler leaves of the traffic of pointwise operators: chains of them compiled and not, beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from policylang.profiling.operands import Operands
from policylang.profiling.trials import Run, Trial

FUSED, UNFUSED = "fused", "unfused"
ROWS = {"cpu": 2048, "cuda": 2**15}
COLUMNS = 1024


def _norm(x: Tensor, y: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """A residual sum and a root-mean-square norm: a decoder block has two."""
    added = x + y
    return added, added * torch.rsqrt(added.square().mean(-1, keepdim=True) + 1e-6) * row


def _rotated(x: Tensor, y: Tensor, row: Tensor) -> Tensor:
    """Rotary embeddings: halves exchanged, two products and a sum."""
    left, right = x.chunk(2, -1)
    return x * row + torch.cat((-right, left), -1) * y


def _gated(x: Tensor, y: Tensor, row: Tensor) -> Tensor:
    """A gate with its product, a bias and a scale."""
    return torch.relu(x + row) * y * 0.5


CHAINS = (_norm, _rotated, _gated)


def fused(operands: Operands) -> Iterator[Trial]:
    """Trials of the chains, compiled and in eager."""
    for chain in CHAINS:
        name = chain.__name__.removeprefix("_")
        yield Trial(f"{name} in eager", UNFUSED, 1, partial(_prepare, operands, chain))
        yield Trial(f"{name} compiled", FUSED, 1, partial(_compiled, operands, chain))


def _prepare(operands: Operands, chain: Any) -> Run:
    rows = ROWS[operands.device.type]
    x, y, row = operands.of(torch.float32, (rows, COLUMNS), (rows, COLUMNS), (COLUMNS,))
    return lambda: chain(x, y, row)


def _compiled(operands: Operands, chain: Any) -> Run:
    return _prepare(operands, _compile(chain))


@cache
def _compile(chain: Any) -> Any:
    return torch.compile(chain, fullgraph=True)
