"""The private names of torch's structured trace, which ``TORCH_TRACE`` turns on and tlparse reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal


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
