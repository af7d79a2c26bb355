"""How many bytes one training step holds, measured on the tensors themselves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable

import torch
from attrs import frozen
from torch import Tensor

from policylang.torch_compat import eager


@frozen
class StepMemory:
    """Bytes beyond those that were there before the step: parameters, optimizer state, the batch."""

    saved: int
    """Alive between forward and backward, the loss left out: what the forward keeps for its backward."""
    peak: int
    """The most that was alive at once."""


def step_memory(forward: Callable[[], Tensor], resident: Iterable[Tensor], device: torch.device) -> StepMemory:
    """Run one forward and its backward. ``forward`` returns the loss; ``resident`` are the tensors not to count.

    On a CPU every operator's result is counted for as long as it lives, exact to the byte; on a GPU the caching
    allocator is asked, which rounds each tensor up.
    """
    gc.collect()
    return _by_allocator(forward) if device.type == "cuda" else _by_ledger(forward, resident)


def _by_allocator(forward: Callable[[], Tensor]) -> StepMemory:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = forward()
    saved = torch.cuda.memory_allocated() - before - _size(loss)
    loss.backward()
    torch.cuda.synchronize()
    return StepMemory(saved, torch.cuda.max_memory_allocated() - before)


def _by_ledger(forward: Callable[[], Tensor], resident: Iterable[Tensor]) -> StepMemory:
    ledger = _Ledger(resident)
    with eager.watching_results(ledger.count):
        loss = forward()
        saved = ledger.live - _size(loss)
        loss.backward()
    return StepMemory(saved, ledger.peak)


class _Ledger:
    """The storages alive, by address, and the most bytes they came to."""

    def __init__(self, resident: Iterable[Tensor]) -> None:
        self.live = 0
        self.peak = 0
        self._sizes = {tensor.untyped_storage().data_ptr(): 0 for tensor in resident}

    def count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or address in self._sizes:
            return
        self._sizes[address] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, address)

    def _release(self, address: int) -> None:
        self.live -= self._sizes.pop(address)


def _size(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())
