"""The private names of torch's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def is_profiling() -> bool:
    """Whether a profiler runs, on any thread. Private, because the public ways to ask know the calling thread alone;
    torch's own optimizers and FSDP ask the same name."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", False))


def named_range(name: str) -> AbstractContextManager[Any]:
    """A range of a profile. Private because the public ``record_function`` is an operator: a dispatch mode around it
    would take it for one of the model's."""
    fast = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", None)
    return nullcontext() if fast is None else fast(name)
