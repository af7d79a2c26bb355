"""Operands of trials: views of one buffer of random values a dtype, so that no trial waits for its own."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from attrs import define, field
from torch import Tensor


@define(eq=False)
class Operands:
    """Tensors on a device, for one trial at a time: those of one call do not share memory, those of two do."""

    device: torch.device
    _buffers: dict[torch.dtype, Tensor] = field(factory=dict, repr=False)

    def of(self, dtype: torch.dtype, *shapes: Sequence[int]) -> list[Tensor]:
        sizes = [prod(shape) for shape in shapes]
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < sum(sizes):
            self._buffers.pop(dtype, None)  # the memory of both may not be there
            generator = torch.Generator(self.device).manual_seed(0)
            drawn = torch.randn(sum(sizes), generator=generator, device=self.device)
            buffer = self._buffers[dtype] = drawn.to(dtype)
        parts = buffer[: sum(sizes)].split(sizes)
        return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]
