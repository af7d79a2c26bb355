"""Python's collector of cycles, kept out of the way: on the facts of a large graph it stops every thread for a tenth of
a second and more, again and again while a policy is planned.

Objects are freed without it, cycles alone wait for it. What an edit replaces is in none: its state, its plan and its
tasks are freed by counting at once, and so is a snapshot that another one replaces. What other cycles there are, those
of errors mostly, are collected when nobody has typed for a moment, or between two pieces of work when much has come
together. The facts of the graphs are not looked at then: it takes some hundredths of a second.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

_REST = 2.0
"""Seconds between two looks at whether it is quiet."""
_MUCH = 300_000
"""Objects more than when it collected last: some 70 MiB, a few plans of a graph of twenty thousand nodes."""


def collect_when_told() -> None:
    """From now on in this process."""
    gc.disable()


def keep_what_is_there(*, anew: bool = False) -> None:
    """What was made so far, a graph among it, is not looked at again. ``anew``: the graph replaces another one, what is
    left of which may be in a cycle; so all is looked at once more."""
    if anew:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


def collect_much() -> None:
    """Collect where much has come together, whether or not it is quiet."""
    if gc.get_count()[0] > _MUCH:
        gc.collect()


def forget_frames(error: BaseException) -> None:
    """Of an error that was dealt with: the frame of whoever asked for a task's result holds the task, which holds the
    error, which holds the frame, and with them the state that was asked about."""
    left: BaseException | None = error
    while left is not None:
        left.__traceback__ = None
        left = left.__context__


async def collect_when_quiet(changes: Callable[[], int], quiet: Callable[[], bool]) -> None:
    """Collect once after there were changes, when there have been none for a while. It never ends."""
    seen = collected = 0
    while True:
        await asyncio.sleep(_REST)
        now = changes()
        if now == seen and now != collected and quiet():
            gc.collect()
            collected = now
        collect_much()
        seen = now
