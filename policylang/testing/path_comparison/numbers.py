"""Compares loss, gradients and buffers of two runs of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from policylang.testing.path_comparison.results import Equality, Numbers, NumbersComparison


def compare(plain: Numbers, found: Numbers) -> NumbersComparison:
    """What a path computed, held against the plain model."""
    return NumbersComparison(
        _equality({"the loss": plain.loss}, {"the loss": found.loss}),
        _equality(plain.gradients, found.gradients),
        _equality(plain.buffers, found.buffers),
    )


def _equality(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Equality:
    differing: list[str] = []
    largest, close = 0.0, True
    names = list(dict.fromkeys((*left, *right)))
    for name in names:
        one, other = left.get(name), right.get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            differing.append(name)
            largest, close = math.inf, False
        elif not _same_bits(one, other):
            differing.append(name)
            largest = max(largest, _distance(one, other))
            close = close and _is_close(one, other)
    return Equality(len(names), tuple(differing), largest, close)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN is equal to itself here, and zero is not minus zero."""
    if not one.numel():
        return True
    bits = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return bool(torch.equal(*bits))


def _distance(one: Tensor, other: Tensor) -> float:
    wide = torch.complex128 if one.is_complex() else torch.float64
    found = (one.detach().to(wide) - other.detach().to(wide)).abs().max().item()
    return math.inf if math.isnan(found) else found


def _is_close(one: Tensor, other: Tensor) -> bool:
    try:
        torch.testing.assert_close(one.detach(), other.detach())
    except AssertionError:
        return False
    return True
