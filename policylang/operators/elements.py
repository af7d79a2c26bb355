"""A tensor as a list of elements with shape, strides and offset: what a proof runs operators on, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from policylang.operators.strides import Lengths, contiguous, is_contiguous, permuted


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
