"""Long work: it can be cancelled, and runs without the garbage collector.

The caller passes a test whether the work is still wanted, and long work calls it now and then.

``check_cancelled`` is called where no lasting state is half written: per statement, rule, or scheduler node. It costs
one read of a context variable for work that is not cancellable.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_WANTED: ContextVar[Callable[[], bool] | None] = ContextVar("wanted", default=None)


class Cancelled(Exception):
    """Nobody waits any more for what was being worked out."""


@contextmanager
def cancellable(wanted: Callable[[], bool]) -> Iterator[None]:
    """Code inside ends with :class:`Cancelled` soon after ``wanted`` returns False, which is called often."""
    token = _WANTED.set(wanted)
    try:
        yield
    finally:
        _WANTED.reset(token)


def check_cancelled() -> None:
    """Raise :class:`Cancelled` where whoever asked for this work does not want it any more."""
    wanted = _WANTED.get()
    if wanted is not None and not wanted():
        raise Cancelled


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disables the automatic garbage collection within, and restores the setting after. Plans and graphs are hundreds
    of thousands of objects that all stay, and each full collection walks them to free none: a third of the time of a
    plan for 55,000 nodes, which grows faster than the graph, and half of a partition's."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
