"""What only moves bytes: copies and sums by size, the overhead of a kernel, and copies to and from the host."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from policylang.profiling.operands import Operands
from policylang.profiling.trials import Run, Trial

STREAM, OVERHEAD, TO_HOST, FROM_HOST = "stream", "overhead", "to host", "from host"
SIZES = {"cpu": [4.0**i for i in range(7, 15)], "cuda": [4.0**i for i in range(8, 17)]}
"""Bytes that one operator reads and writes: 16 KiB to 256 MiB, 64 KiB to 4 GiB."""
AFAR = 2**28
"""Bytes in which operands lie, and results are kept: more than caches hold."""
MOST_PLACES = 2048
"""More tensors at once would be a matter for Python's garbage collector."""
HOST_BYTES = 2**27


def streams(operands: Operands) -> Iterator[Trial]:
    """Trials whose work is in bytes read and written; of the overhead, in kernels."""
    for size in SIZES[operands.device.type]:
        yield Trial("copy", STREAM, size, partial(_copy, operands, size), "copy")
    for size in SIZES[operands.device.type]:
        yield Trial("add", STREAM, size, partial(_add, operands, size), "add")
    for size in SIZES[operands.device.type]:
        yield Trial("add, from afar", STREAM, size, partial(_from_afar, operands, size), "add, from afar")
    yield Trial("smallest kernel", OVERHEAD, 1, partial(_smallest, operands))


def host_copies(operands: Operands) -> Iterator[Trial]:
    """Trials whose work is in bytes copied; pinned memory on a GPU's host, and on a CPU a plain copy."""
    size = HOST_BYTES if operands.device.type == "cuda" else HOST_BYTES // 4
    yield Trial("copy to the host", TO_HOST, size, partial(_to_host, operands, size))
    yield Trial("copy from the host", FROM_HOST, size, partial(_from_host, operands, size))


# aten's operators, as a graph calls them: what Python adds to each call is part of it


def _copy(operands: Operands, size: float) -> Run:
    (source,) = operands.of(torch.float32, (int(size / 8),))
    return lambda: torch.ops.aten.clone.default(source)


def _add(operands: Operands, size: float) -> Run:
    left, right = operands.of(torch.float32, (int(size / 12),), (int(size / 12),))
    return lambda: torch.ops.aten.add.Tensor(left, right)


def _from_afar(operands: Operands, size: float) -> Run:
    """As a step does it: operands that no cache holds any more, and results that are kept for the backward."""
    length = int(size / 12)
    places = min(MOST_PLACES, max(2, int(AFAR / 4 / length)))
    (buffer,) = operands.of(torch.float32, (places * length,))
    parts = buffer.split(length)
    kept: list[object] = []
    at = 0

    def run() -> None:
        nonlocal at
        kept.append(torch.ops.aten.add.Tensor(parts[at], parts[at - 1]))
        at = (at + 2) % places
        if len(kept) >= places:
            kept.clear()

    return run


def _smallest(operands: Operands) -> Run:
    left, right = operands.of(torch.float32, (16,), (16,))
    return lambda: torch.ops.aten.add.Tensor(left, right)


def _to_host(operands: Operands, size: int) -> Run:
    (source,) = operands.of(torch.float32, (size // 4,))
    if operands.device.type == "cpu":
        return lambda: source.to("cpu", copy=True)
    host = torch.empty(size // 4, pin_memory=True)
    return lambda: host.copy_(source, non_blocking=True)


def _from_host(operands: Operands, size: int) -> Run:
    if operands.device.type == "cpu":
        return _to_host(operands, size)
    (target,) = operands.of(torch.float32, (size // 4,))
    host = torch.empty(size // 4, pin_memory=True)
    return lambda: target.copy_(host, non_blocking=True)
