"""Times the stages of carrying out a plan, and pauses Python's cyclic garbage collector while a graph is rebuilt."""

from __future__ import annotations

import gc
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


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection within; what it found before holds again after.

    Splitting a graph makes hundreds of thousands of objects that all stay. Each full collection on the way walks every
    node of every graph in memory to free none of them: on a 32-layer Llama they took half of the whole partition, and
    they make its time grow faster than the graph.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
