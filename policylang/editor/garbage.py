"""Python's collector of cycles, kept out of the way: on the facts of a large graph it stops every thread for a tenth of
a second and more, again and again while a policy is planned.

Objects are freed without it, cycles alone wait for it. So it runs when nobody has typed for a while, or when very much
has come together, and never looks at what a graph is made of.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

_REST = 5.0
"""Seconds between two looks at whether it is quiet."""
_VERY_MUCH = 3_000_000
"""Objects more than at the last time: a few hundred MiB."""


def collect_when_told() -> None:
    """From now on in this process."""
    gc.disable()


def keep_what_is_there() -> None:
    """What was made so far, a graph among it, is not looked at again before the next graph is read: a plan on one that
    was replaced would stay for good otherwise."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


async def collect_when_quiet(changes: Callable[[], int], quiet: Callable[[], bool]) -> None:
    """Collect once after there were changes, when there have been none for a while. It never ends."""
    seen = collected = 0
    while True:
        await asyncio.sleep(_REST)
        now = changes()
        if (now == seen and now != collected and quiet()) or gc.get_count()[0] > _VERY_MUCH:
            gc.collect()
            collected = now
        seen = now
