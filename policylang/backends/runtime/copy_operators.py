"""The operators that copy a value to the host and back, and wait: ``policylang::offload``, ``reload`` and ``wait``.

::

    ticket = policylang.offload(value)              # starts the copy to pinned host memory
    host = policylang.wait(ticket, value, cpu)      # the copy has ended; `value` is held until here
    ticket = policylang.reload(host, device)        # starts the copy back
    value = policylang.wait(ticket, host, device)   # the copy has ended; `host` is held until here

All order is in the arguments. A copy is handed out by ``wait`` alone, so no reader can come before its end, and
``wait`` takes what is copied from, so nothing can have that memory before. Each operator is a function of its arguments
whose result shares memory with none of them: a compiler has to be told of no effect and no alias, and may drop, merge
or move the three as it likes.

On an accelerator copies run on a stream of their own, one a device, and ``wait`` lets the stream that computes wait for
one copy; the host does not wait. On a CPU a copy is made at once. PyTorch has operators for the same purpose
(``ao::offload``, in 2.12 and later); they run on accelerators alone, and free what they copy from, whoever else reads
that memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import torch
from attrs import frozen
from torch import Tensor

HOST = torch.device("cpu")


HostLink = Callable[[Tensor, Tensor], Callable[[], None] | None]
"""A way between a device and the host: starts filling the first tensor from the second, and returns what makes the
computation wait for the end, if it has to. Copies are made in the order in which they are started."""


def _at_once(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _on_own_stream(device: torch.device) -> HostLink:
    """Copies on a stream of their own, beside the one that computes."""
    stream = torch.Stream(device=device)

    def copy(target: Tensor, source: Tensor) -> Callable[[], None]:
        """The copy starts when all has run that was asked of the computing stream before: it made the source, and what
        had the target's memory before."""
        computing = torch.accelerator.current_stream(device)
        stream.wait_stream(computing)
        torch.accelerator.set_stream(stream)
        try:
            target.copy_(source, non_blocking=True)
            done = stream.record_event()
        finally:
            torch.accelerator.set_stream(computing)
        return lambda: torch.accelerator.current_stream(device).wait_event(done)

    return copy


@frozen(eq=False)
class _Copy:
    target: Tensor
    wait: Callable[[], None] | None


_links: dict[torch.device, HostLink] = {}
_copies: dict[int, _Copy] = {}
"""By what stands on the ticket; for as long as the ticket lives."""
_numbers = count()


@contextmanager
def copied_over(link: HostLink, device: torch.device = HOST) -> Iterator[None]:
    """Within, values of ``device`` move over ``link``."""
    before = _links.get(device)
    _links[device] = link
    try:
        yield
    finally:
        if before is None:
            del _links[device]
        else:
            _links[device] = before


def _link(device: torch.device) -> HostLink:
    found = _links.get(device)
    if found is None:
        found = _links[device] = _at_once if device.type == "cpu" else _on_own_stream(device)
    return found


def _start(device: torch.device, target: Tensor, source: Tensor) -> Tensor:
    number = next(_numbers)
    ticket = torch.tensor([number], dtype=torch.int64, device=HOST)
    _copies[number] = _Copy(target, _link(device)(target, source))
    weakref.finalize(ticket, _copies.pop, number).atexit = False
    return ticket


def _like(source: Tensor, device: torch.device, *, pinned: bool = False) -> Tensor:
    size, stride = source.size(), source.stride()
    return torch.empty_strided(size, stride, dtype=source.dtype, device=device, pin_memory=pinned)


def _ticket() -> Tensor:
    return torch.empty(1, dtype=torch.int64, device=HOST)


def _offload(value: Tensor) -> Tensor:
    return _start(value.device, _like(value, HOST, pinned=value.device.type != "cpu"), value)


def _reload(host: Tensor, device: torch.device) -> Tensor:
    target = _like(host, device)
    return _start(target.device, target, host)


def _wait(ticket: Tensor, source: Tensor, device: torch.device) -> Tensor:
    copy = _copies[int(ticket)]
    if copy.wait is not None:
        copy.wait()
    return copy.target


_library = torch.library.Library("policylang", "DEF")
for _signature, _kernel, _fake in (
    ("offload(Tensor value) -> Tensor", _offload, lambda value: _ticket()),
    ("reload(Tensor host, Device device) -> Tensor", _reload, lambda host, device: _ticket()),
    (
        "wait(Tensor ticket, Tensor source, Device device) -> Tensor",
        _wait,
        lambda ticket, source, device: _like(source, device),
    ),
):
    _library.define(_signature, tags=(torch.Tag.needs_exact_strides,))
    _library.impl(_signature.partition("(")[0], _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"policylang::{_signature.partition('(')[0]}", _fake, lib=_library)

OFFLOAD_OP = torch.ops.policylang.offload.default
RELOAD_OP = torch.ops.policylang.reload.default
WAIT_OP = torch.ops.policylang.wait.default
