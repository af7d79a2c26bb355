"""Copies between device and host that come as late as they may: a race shows as not-a-number, every time."""

import random
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from policylang.backends import copies

POISON = 113


class Late:
    """A link whose copies are made, in order, at a random time between their start and their wait.

    Until then the target holds poison, and so it stays where nobody holds the source any more: its memory would have
    gone to someone else.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.random = None if seed is None else random.Random(seed)
        self.pending: list[Callable[[], None]] = []
        self.sources: dict[int, tuple[StorageWeakRef, StorageWeakRef]] = {}
        """By the address of a copy on the host: that copy, and what it was made of."""
        self.out = 0
        self.back = 0
        self.held: list[bool] = []
        """For each copy back whether the memory that was copied out was still there."""

    def __call__(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Without a seed a copy is made when it is awaited, and not before."""
        known = self.sources.get(source.data_ptr())
        if known is None or known[0].expired():  # or else an address that someone else has by now
            self.out += 1
            self.sources[target.data_ptr()] = (
                StorageWeakRef(target.untyped_storage()),
                StorageWeakRef(source.untyped_storage()),
            )
        else:
            self.back += 1
            self.held.append(not known[1].expired())
        target.fill_(float("nan") if target.is_floating_point() else POISON % 2)
        held = weakref.ref(source)

        def make() -> None:
            if (still := held()) is not None:
                target.copy_(still)

        self.pending.append(make)
        if self.random is not None:
            self._run(self.random.randint(0, len(self.pending)))

        def wait() -> None:
            if make in self.pending:
                self._run(self.pending.index(make) + 1)

        return wait

    def _run(self, count: int) -> None:
        for make in self.pending[:count]:
            make()
        del self.pending[:count]


def copied_over(link: copies.HostLink) -> AbstractContextManager[object]:
    """Within, values of the CPU move to the host and back over ``link``."""
    return patch.dict(copies._links, {copies.HOST: link})
