"""Measures what a node returns (bytes, shape, type) by its fake value."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from policylang.torch_compat.graphs import has_data_symbol, hint, size_range


class Value(NamedTuple):
    bytes: int
    numel: int
    shape: tuple[int, ...] | None
    stride: tuple[int, ...] | None
    dtype: str
    device: str
    symbolic: bool
    by_data: tuple[int, ...] = ()
    """As in :attr:`policylang.graph.facts.Facts.data_sizes`."""


NOTHING = Value(0, 0, None, None, "", "", False)
SYMBOL = Value(0, 0, None, None, "", "", True)
NO_LIMIT = -1


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
            total = NOTHING._replace(bytes=size, numel=numel, by_data=_of_all(parts))
            return self._measured.setdefault(total, total)
        return NOTHING

    def _tensor(self, tensor: torch.Tensor) -> Value:
        size, dtype, device = tensor.shape, tensor.dtype, tensor.device
        stride = tensor.stride() if tensor.layout is torch.strided else None
        try:
            known = self._tensors.get((size, stride, dtype, device))
        except TypeError:  # symbolic sizes have no hash
            found = self._describe(tuple(hint(length) for length in size), None, dtype, device)
            return found if not has_data_symbol(tensor) else found._replace(by_data=_by_data(size, dtype.itemsize))
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


def _by_data(size: torch.Size, itemsize: int) -> tuple[int, int, int]:
    """Of a tensor some of whose sizes come from data."""
    ranges = [size_range(length) for length in size]
    counted = max(hint(length) for length in size if has_data_symbol(length))
    highest = [most for _, most in ranges if most is not None]
    most = itemsize * prod(highest) if len(highest) == len(ranges) else NO_LIMIT
    return counted, itemsize * prod(least for least, _ in ranges), most


def _of_all(parts: Sequence[Value]) -> tuple[int, ...]:
    if not any(part.by_data for part in parts):
        return ()
    found = [part.by_data or (0, part.bytes, part.bytes) for part in parts]
    most = NO_LIMIT if any(each[2] == NO_LIMIT for each in found) else sum(each[2] for each in found)
    return max(each[0] for each in found), sum(each[1] for each in found), most
