"""What the modes have in common that see a block's operators: whose operators they see."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

from torch import Tensor

from policylang.backends.eager.observation.origins import tensors_in
from policylang.torch_compat.eager import DispatchMode, active_modes

moments = count()
"""Tells what began first."""


class Mode(DispatchMode):  # type: ignore[misc]  # torch does not say what it is
    """Sees every operator of one run of a block."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.began = next(moments)
        self.suspended = 0
        self.reading: frozenset[int] = frozenset()
        """By ``id``, the tensors whose readers are the block's all the same while this is suspended."""

    def aside(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """An operator that runs while this is suspended."""
        if not self.reading or not any(id(each) in self.reading for each in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        suspended, self.suspended = self.suspended, 0
        try:
            return self.__torch_dispatch__(func, types, args, kwargs)
        finally:
            self.suspended = suspended


@contextmanager
def unseen_since(moment: int) -> Iterator[None]:
    """What runs meanwhile is no operator of a block whose run began after a moment."""
    with ExitStack() as suspended:
        for mode in active_modes():
            if isinstance(mode, Mode) and mode.began >= moment:
                suspended.enter_context(_suspended(mode))
        yield


@contextmanager
def only_readers(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Of what runs meanwhile, only what reads one of these tensors is an operator of a block."""
    given = frozenset(id(each) for each in tensors)
    with ExitStack() as suspended:
        for mode in active_modes():
            if isinstance(mode, Mode) and not mode.suspended:
                suspended.enter_context(_suspended(mode, given))
        yield


@contextmanager
def _suspended(mode: Mode, reading: frozenset[int] = frozenset()) -> Iterator[None]:
    before, mode.reading = mode.reading, reading
    mode.suspended += 1
    try:
        yield
    finally:
        mode.suspended -= 1
        mode.reading = before
