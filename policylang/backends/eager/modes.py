"""What the modes have in common that see a block's operators: whose operators they see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

from policylang._torch_eager import DispatchMode, active_modes

moments = count()
"""Tells what began first."""


class Mode(DispatchMode):  # type: ignore[misc]  # torch does not say what it is
    """Sees every operator of one run of a block."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.began = next(moments)
        self.suspended = 0


@contextmanager
def unseen_since(moment: int) -> Iterator[None]:
    """What runs meanwhile is no operator of a block whose run began after a moment."""
    with ExitStack() as suspended:
        for mode in active_modes():
            if isinstance(mode, Mode) and mode.began >= moment:
                suspended.enter_context(_suspended(mode))
        yield


@contextmanager
def _suspended(mode: Mode) -> Iterator[None]:
    mode.suspended += 1
    try:
        yield
    finally:
        mode.suspended -= 1
