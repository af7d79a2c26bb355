"""The private names of torch's profiler, and of its structured trace: ``TORCH_TRACE`` turns it on, tlparse reads it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch


def is_tracing() -> bool:
    """Whether a structured trace is written.

    Private because torch has no public way to ask. Without ``TORCH_TRACE`` a handler without a folder stands there,
    until the first record takes it away.
    """
    try:
        from torch._logging._internal import trace_log
    except ImportError:
        return False
    return any(getattr(handler, "root_dir", None) is not None for handler in trace_log.handlers)


def trace_artifact(name: str, encoding: Literal["string", "json"], payload: Callable[[], str]) -> None:
    """Put a text into the trace, under the compilation that runs now where there is one.

    Private because torch has no public way to add to its trace. tlparse writes an artifact to a file of its own.
    """
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )


def is_profiling() -> bool:
    """Whether a profiler runs, on any thread. Private, because the public ways to ask know the calling thread alone;
    torch's own optimizers and FSDP ask the same name."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", False))


def named_range(name: str) -> AbstractContextManager[Any]:
    """A range of a profile. Private because the public ``record_function`` is an operator: a dispatch mode around it
    would take it for one of the model's."""
    fast = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", None)
    return nullcontext() if fast is None else fast(name)
