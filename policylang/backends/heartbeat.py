"""A sign of life in the store, so that a rank that is slow is told from one that is gone.

Tracing a large model takes minutes, on one rank more than on another, and says nothing meanwhile. So from the moment a
policy is loaded or a backend made, a thread counts up a number in the store of the default process group. Who waits for
the rank watches whether the number moves; no two clocks are compared.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from pathlib import Path
from types import FrameType
from typing import Any

from attrs import define, field

from policylang import _torch_store

INTERVAL = 2.0
"""Seconds between two signs of life."""
PREFIX = "policylang"
SWITCH = "POLICYLANG_AGREE"
_OUR_FOLDER = str(Path(__file__).resolve().parent.parent)


@define(eq=False)
class Board:
    """Where this rank posts and reads: the default store, over a connection of policylang's own."""

    rank: int
    store: Any
    default: weakref.ref[Any]
    """The store of torch.distributed. Not kept alive: its server's port belongs to the user."""
    stop: threading.Event = field(factory=threading.Event)
    thread: threading.Thread | None = None

    def write(self, key: str, value: str | bytes) -> None:
        self.store.set(f"{PREFIX}/{key}", value)

    def has(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        return bool(self.store.check([f"{PREFIX}/{key}" for key in keys]))

    def read(self, keys: list[str]) -> list[bytes]:
        """Blocks until they are there, so ask :meth:`has` first."""
        values: list[bytes] = self.store.multi_get([f"{PREFIX}/{key}" for key in keys])
        return values

    def read_if_there(self, key: str) -> str:
        return self.read([key])[0].decode() if self.has([key]) else ""


_current: Board | None = None
_lock = threading.Lock()


def is_on() -> bool:
    """``POLICYLANG_AGREE=0`` turns the comparison of ranks off for the whole program."""
    return os.environ.get(SWITCH, "1") not in ("0", "false", "off")


def board() -> Board | None:
    """The board of the default process group, with the heart beating; None where there are no ranks to compare with."""
    global _current
    default = _torch_store.default_store() if is_on() else None
    if default is None:
        return None
    with _lock:
        if _current is None or _current.default() is not default:
            _current = Board(_torch_store.own_rank(), _torch_store.own_connection(default), weakref.ref(default))
            _start(_current)
    return _current


def begin() -> None:
    """Give the first sign of life, where there is anybody to see it."""
    board()


def sign(rank: int) -> str:
    return f"alive/{rank}"


def _start(board: Board) -> None:
    thread = threading.Thread(target=_beat, args=(board,), name="policylang heartbeat", daemon=True)
    board.thread = thread
    # A daemon thread that is inside torch when the interpreter shuts down ends the process with an abort, so it is
    # stopped before.
    atexit.register(_end, board)
    thread.start()


def _end(board: Board) -> None:
    board.stop.set()
    if board.thread is not None:
        board.thread.join(timeout=10)


def _beat(board: Board) -> None:
    started = time.monotonic()
    while board.default() is not None and _torch_store.default_store() is board.default():
        try:
            board.write(sign(board.rank), f"{time.monotonic() - started:.1f} {_place()}")
        except RuntimeError:  # the store is gone, and with it all who could read
            return
        if board.stop.wait(INTERVAL):
            return


def _place() -> str:
    """Where the main thread is, in the user's own code if it is there at all: ``train.py:80 in step``."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    shown = frame
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_OUR_FOLDER, sys.prefix, sys.base_prefix, "<")):
            shown = frame
            break
        frame = frame.f_back
    if shown is None:
        return ""
    return f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno} in {shown.f_code.co_name}"
