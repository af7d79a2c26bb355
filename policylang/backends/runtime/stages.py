"""Times the stages of carrying out a plan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    """Note under ``stage`` the wall seconds spent within, also where it ends in an error."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[stage] = time.perf_counter() - start
