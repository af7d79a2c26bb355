"""The dispatch mode that sees one run of a block, suspended while operators run that are none of the block's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

from torch import Tensor

from policylang.backends.eager.observation.origins import tensors_in
from policylang.torch_compat.eager import DispatchMode, active_modes

moments = count()
"""Tells what began first."""


class BlockMode(DispatchMode):  # type: ignore[misc]  # torch does not say what it is
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


def _active() -> list[BlockMode]:
    return [mode for mode in active_modes() if isinstance(mode, BlockMode)]


def unseen_since(moment: int) -> AbstractContextManager[None]:
    """What runs meanwhile is no operator of a block whose run began after a moment."""
    return _suspended([mode for mode in _active() if mode.began >= moment])


def only_readers(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Of what runs meanwhile, only what reads one of these tensors is an operator of a block."""
    return _suspended([mode for mode in _active() if not mode.suspended], frozenset(map(id, tensors)))


@contextmanager
def _suspended(modes: Collection[BlockMode], reading: frozenset[int] = frozenset()) -> Iterator[None]:
    before = [mode.reading for mode in modes]
    for mode in modes:
        mode.reading = reading
        mode.suspended += 1
    try:
        yield
    finally:
        for mode, earlier in zip(modes, before, strict=True):
            mode.suspended -= 1
            mode.reading = earlier
