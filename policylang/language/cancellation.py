"""Work that may be given up: who asks for it says whether it is still wanted, and what takes long asks now and then.

``check_cancelled`` is called where nothing is partly written that outlives the work: per statement, rule, or unit of
a step. Nobody pays for it who did not say that work may be given up: it reads one context variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_WANTED: ContextVar[Callable[[], bool] | None] = ContextVar("wanted", default=None)


class Cancelled(Exception):
    """Nobody waits any more for what was being worked out."""


@contextmanager
def cancellable(wanted: Callable[[], bool]) -> Iterator[None]:
    """What runs inside ends with :class:`Cancelled` soon after ``wanted`` says no. It is asked often: keep it cheap."""
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
