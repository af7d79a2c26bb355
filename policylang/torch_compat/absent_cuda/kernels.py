"""The kernels of a CUDA build that any other build lacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

CUDNN = 92_000
"""The version of cuDNN that is assumed: 9.20, which torch 2.13 for CUDA 13 brings along."""
ON_CUDA = ("_fused_rms_norm", "silu_backward", "mish_backward")
"""Operators that a CUDA build has a kernel for and that any other build decomposes."""


@contextmanager
def kernels_of_cuda(composite: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Registers what decides on CUDA, and that the operators of :data:`ON_CUDA` have a kernel there.

    ``composite``: operators that are made of others, by name and overload, and what calls the others.
    """
    added = [("AutogradCUDA", name, function) for name, function in composite.items()]
    for name in ON_CUDA:
        operator = getattr(torch.ops.aten, name).default
        if not _has_kernel(name, "CUDA"):
            added.append(("CUDA", name, operator.decompose))
        if name.endswith("_backward") and not _has_kernel(name, "Meta"):
            # autograd, which takes a gradient for one of meta, would decompose it
            added.append(("AutogradMeta", name, _below_autograd(operator)))
    if not torch.cuda.is_available():
        # a small constant of Python's keeps its value while it is traced: moved to CUDA, it is one on the CPU
        added += [("CUDA", "empty.memory_format", _constant), ("CUDA", "empty_strided", _strided_constant)]
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?s).*[Oo]verriding a previously registered kernel")
            for key, name, function in added:
                library.impl(name, function, key)
        yield
    finally:
        library._destroy()


def _below_autograd(operator: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return run


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key))


def _constant(size: Sequence[int], *, dtype: Any = None, memory_format: Any = None, **_kwargs: Any) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)


def _strided_constant(size: Sequence[int], stride: Sequence[int], *, dtype: Any = None, **_kwargs: Any) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def sdpa_priority() -> tuple[int, ...]:
    """The order in which attention kernels are tried, as numbers of ``torch.nn.attention.SDPBackend``."""
    return tuple(torch._C._get_sdp_priority_order())
