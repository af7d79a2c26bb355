"""The process of the client: a server must not outlive it.

Its end closes the connection, unless another process that it started holds the pipes too. So the process that the
client names in ``initialize`` is watched, as the protocol asks for, in a thread: the event loop may be waiting to write
to a pipe that nobody reads.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable
from threading import Thread

_LOOK = 2.0
"""Seconds between two looks, where the system does not tell of the end of a process."""
_GRACE = 5.0
"""Seconds in which the server may end by itself."""


def end_with(process: int | None, end: Callable[[], None]) -> None:
    """Call ``end`` once the process is gone, and end this one where that is of no use. A process that is not there to
    begin with is of another machine, or of another container, and says nothing."""
    if process is None or process <= 0 or sys.platform == "win32":  # there a pipe ends with the process that made it
        return
    wait = _waiter(process)
    if wait is None:
        return

    def watch() -> None:
        wait()
        end()
        time.sleep(_GRACE)
        os._exit(1)

    Thread(target=watch, name="lifeline", daemon=True).start()


def _waiter(process: int) -> Callable[[], None] | None:
    """What returns when a process ends; None where there is none."""
    if sys.platform == "linux" and hasattr(os, "pidfd_open"):
        try:
            file = os.pidfd_open(process)
        except ProcessLookupError:
            return None
        except OSError:  # a sandbox that does not allow it
            return _looking(process)
        poll = select.poll()
        poll.register(file, select.POLLIN)

        def wait() -> None:
            poll.poll()

        return wait
    return _looking(process)


def _looking(process: int) -> Callable[[], None] | None:
    def look() -> None:
        while _is_there(process):
            time.sleep(_LOOK)

    return look if _is_there(process) else None


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        return True
    return True
