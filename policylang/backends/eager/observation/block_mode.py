"""The dispatch mode that sees one run of a block, suspended while operators run that are none of the block's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

from torch import Tensor

from policylang.backends.eager.observation.origins import addresses, tensors_in
from policylang.torch_compat.eager import DispatchMode, active_modes

moments = count()
"""Tells what began first."""


_written: dict[int, int] = {}
"""When a block wrote last to memory, by address. Of memory that has been given back an entry says nothing: who asks
holds what it asks about."""


def note_write(tensors: Iterable[Tensor]) -> None:
    """A block has written to these."""
    _written.update(dict.fromkeys(addresses(tensors), next(moments)))


def written_since(address: int | None, moment: int) -> bool:
    """Whether a block has written to memory since a moment."""
    return address is not None and _written.get(address, -1) > moment


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


def unseen_since(moment: int) -> AbstractContextManager[None]:
    """What runs meanwhile is no operator of a block whose run began after a moment."""
    return _suspended(lambda mode: mode.began >= moment)


def only_readers(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Of what runs meanwhile, only what reads one of these tensors is an operator of a block."""
    return _suspended(lambda mode: not mode.suspended, frozenset(map(id, tensors)))


@contextmanager
def _suspended(which: Callable[[BlockMode], bool], reading: frozenset[int] = frozenset()) -> Iterator[None]:
    modes = [mode for mode in active_modes() if isinstance(mode, BlockMode) and which(mode)]
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
