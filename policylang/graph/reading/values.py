"""Measures what a node returns (bytes, shape, type) by its fake value."""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch

from policylang.torch_compat.graphs import hint


class Value(NamedTuple):
    bytes: int
    numel: int
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    dtype: str
    device: str
    symbolic: bool


NOTHING = Value(0, 0, None, None, "", "", False)
SYMBOL = Value(0, 0, None, None, "", "", True)


class Measurements:
    """Measures values; equal shapes, types and whole measurements are one object, however many nodes have them."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[torch.Size, tuple[int, ...] | None, torch.dtype, torch.device], Value] = {}
        self._measured: dict[Value, Value] = {}

    def measure(self, value: Any) -> Value:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return SYMBOL
        if isinstance(value, (tuple, list)):
            parts = [self.measure(part) for part in value]
            size, numel = sum(part.bytes for part in parts), sum(part.numel for part in parts)
            total = NOTHING._replace(bytes=size, numel=numel)
            return self._measured.setdefault(total, total)
        return NOTHING

    def _tensor(self, tensor: torch.Tensor) -> Value:
        size, dtype, device = tensor.shape, tensor.dtype, tensor.device
        stride = tensor.stride() if tensor.layout is torch.strided else None
        try:
            known = self._tensors.get((size, stride, dtype, device))
        except TypeError:  # symbolic sizes have no hash
            return self._describe(tuple(hint(length) for length in size), None, dtype, device)
        if known is None:
            known = self._describe(tuple(size), stride, dtype, device)
            self._tensors[size, stride, dtype, device] = known
        return known

    def _describe(
        self, shape: tuple[int, ...], stride: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
    ) -> Value:
        numel = prod(shape)
        name = str(dtype).removeprefix("torch.")
        value = Value(numel * dtype.itemsize, numel, shape, stride, name, str(device), False)
        return self._measured.setdefault(value, value)
