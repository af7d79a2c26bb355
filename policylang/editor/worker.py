"""One thread beside the event loop for what takes long, where all of it can be given up.

While the event loop reads a text, the thread waits, rather than take turns with it: Python runs one of them at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any, TypeVar

from policylang.language.cancellation import Cancelled, cancellable, check_cancelled

_IDLE = 0.1
"""Seconds after which what gave way is tried again."""
T = TypeVar("T")


class Worker:
    """Does one thing after the other, in the order in which they are asked for."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "planning")
        self._goes_on = Event()
        self._goes_on.set()
        self._asked: set[Future[Any]] = set()

    async def do(self, work: Callable[[], T], wanted: Callable[[], bool]) -> T:
        """The result of some work. Raises :class:`Cancelled` once it is not ``wanted`` any more."""
        job = self._submitted(work, wanted)
        self._asked.add(job)
        job.add_done_callback(self._asked.discard)
        return await asyncio.wrap_future(job)

    async def do_when_idle(self, work: Callable[[], T], wanted: Callable[[], bool]) -> T:
        """The same of what gives way to everything that somebody waits for, and is begun again afterwards."""
        while True:
            try:
                return await asyncio.wrap_future(self._submitted(work, lambda: wanted() and not self._asked))
            except Cancelled:
                if not wanted():
                    raise
                await asyncio.sleep(_IDLE)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is under way stands still meanwhile, from the next place on where it could be given up."""
        self._goes_on.clear()
        try:
            yield
        finally:
            self._goes_on.set()

    def close(self) -> None:
        """Nothing is begun any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _submitted(self, work: Callable[[], T], wanted: Callable[[], bool]) -> Future[T]:
        def goes_on() -> bool:
            if not self._goes_on.is_set():
                self._goes_on.wait()
            return wanted()

        def run() -> T:
            with cancellable(goes_on):
                check_cancelled()
                found = work()
                check_cancelled()
                return found

        return self._thread.submit(run)
