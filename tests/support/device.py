"""A device apart from the host, on a machine that has none: its memory is counted, and its time passes.

Tensors lie in the memory of the CPU. What operators return is the device's, and counts for as long as its storage
lives; the buffers of the pool are the host's. A device that is registered with operators in Python would not do: its
tensors have no storage, and it is storages that the runtime moves.

An operator that runs takes the time of a roofline, worked out here from the tensors that it is given. A copy takes the
time of its bytes, behind the others of its direction and beside what computes. Its bytes are there when that time has
passed; until then its target holds poison, and for good if its source was freed before. The computation waits for a
copy where the runtime has it wait. The clock is the device's own, so that a busy machine changes no figure; with
``slept`` the time passes on the machine's clock as well, which is then read.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from attrs import define, field
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from policylang.backends import copies
from policylang.backends.eager import moved_values
from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.torch_compat.graphs import outside_of_modes
from tests.support.late import POISON

OUT, BACK = "to the host", "from the host"

PROFILE = DeviceProfile("measured", {"float32": Rate.constant(4e9)}, Rate.constant(1e9), host_bandwidth=1e9)


class Copy(NamedTuple):
    """Seconds since the step began."""

    way: str
    bytes: int
    asked: float
    start: float
    end: float


class Step(NamedTuple):
    """What a step came to: bytes beside those that were there before, seconds."""

    peak: int
    host: int
    """The most that was in use at once of the pool of host memory."""
    seconds: float
    exposed: float
    """Time in which the computation waited for copies, or had ended before them."""
    copies: tuple[Copy, ...]


@define(eq=False)
class Device:
    profile: DeviceProfile = PROFILE
    slept: bool = False
    now: float = 0.0
    exposed: float = 0.0
    live: int = 0
    peak: int = 0
    copies: list[Copy] = field(factory=list)
    _sizes: dict[int, int] = field(factory=dict)
    """By storage alive, its bytes on the device."""
    _on_host: set[int] = field(factory=set)
    _pending: list[tuple[float, Callable[[], None]]] = field(factory=list)
    _free: dict[str, float] = field(factory=dict)
    _began: float = 0.0

    def step(self, run: Callable[[], Any], resident: Iterable[Tensor]) -> Step:
        """Run a step beside what lies on the device already."""
        with self.counting(resident) as pool:
            run()
            computed = self.now
            self._until(max([computed, *self._free.values()]))
            exposed = self.exposed + self.now - computed
            return Step(self.peak, pool.most, self.now, exposed, tuple(self.copies))

    @contextmanager
    def counting(self, resident: Iterable[Tensor]) -> Iterator[copies.HostPool]:
        """Within, this is the device, and the pool is one of its own. Yields the pool."""
        self.now = self.exposed = 0.0
        self._sizes = {_address(each): 0 for each in resident}
        self.live = self.peak = 0
        self.copies, self._free, self._began = [], {}, time.perf_counter()
        pool = _Pool(self)
        with ExitStack() as stack:
            stack.enter_context(patch.object(copies, "pool", pool))
            stack.enter_context(patch.dict(copies._links, {copies.HOST: self.link}))
            for name in ("narrowed", "widened"):
                converted = partial(self._converted, getattr(moved_values, name))
                stack.enter_context(patch.object(moved_values, name, converted))
            stack.enter_context(_Running(self))
            yield pool

    def has(self, tensor: Tensor) -> None:
        """A tensor is on the device."""
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage._cdata not in self._sizes and storage._cdata not in self._on_host:
            self._sizes[storage._cdata] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._freed, self._sizes, storage._cdata).atexit = False

    def has_on_host(self, tensor: Tensor) -> None:
        self._on_host.add(_address(tensor))
        weakref.finalize(tensor.untyped_storage(), self._on_host.discard, _address(tensor)).atexit = False

    def _converted(self, convert: Callable[..., Any], given: Any, to: Any) -> Any:
        """A value that is narrowed, with a pass over it for its scales, or widened."""
        found = convert(given, to)
        steps = found if isinstance(given, Tensor) else [given]
        for each in _by_storage(found).values():
            self.has(each)
        for step in reversed(steps):
            moved = sum(map(_extent, _by_storage((given, found) if step is steps[0] else (given, step)).values()))
            self._until(self._clock() + self.profile.overhead + moved / self.profile.bandwidth.at(moved))
        return found

    def _freed(self, sizes: dict[int, int], address: int) -> None:
        if sizes is self._sizes:  # else a step has begun since
            self.live -= sizes.pop(address)

    def link(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """A copy starts. It is one back where it is made of what is on the host."""
        way, size = (BACK, target) if _address(source) in self._on_host else (OUT, source)
        length = size.numel() * size.itemsize
        start = max(self._clock(), self._free.get(way, 0.0))
        end = self._free[way] = start + length / self.profile.host_bandwidth
        self.copies.append(Copy(way, length, self.now, start, end))
        if way == BACK:
            self.has(target)
        with outside_of_modes():
            target.fill_(float("nan") if target.is_floating_point() else POISON)
        held = weakref.ref(source)

        def make() -> None:
            if (still := held()) is not None:
                with outside_of_modes():
                    target.copy_(still)

        def wait() -> None:
            self.exposed += max(end - self._clock(), 0.0)
            self._until(end)

        self._pending.append((end, make))
        return wait

    def ran(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator has run: what it returns is there, and its time has passed."""
        read, made = _by_storage((args, kwargs)), _by_storage(result)
        for each in made.values():
            self.has(each)
        writes = operator._schema.is_mutable
        fresh = {address: each for address, each in made.items() if address not in read}
        if not (fresh or writes) or str(operator).partition(".")[2].startswith(("empty", "new_empty", "policylang")):
            return
        moved = sum(map(_extent, [*read.values(), *fresh.values()]))
        seconds = moved / self.profile.bandwidth.at(moved)
        if count := _flops(operator):
            flops = count(*args, **kwargs, out_val=result)
            seconds = max(seconds, flops / self.profile.compute["float32"].at(flops))
        self._until(self._clock() + self.profile.overhead + seconds)

    def _clock(self) -> float:
        if self.slept:
            self.now = max(self.now, time.perf_counter() - self._began)
        return self.now

    def _until(self, moment: float) -> None:
        """The computation goes on at a moment; what has been copied by then is there."""
        self.now = max(self.now, moment)
        left = self._began + self.now - time.perf_counter() if self.slept else 0.0
        if left > 1e-3:  # shorter sleeps are less exact
            time.sleep(left)
        there = [make for end, make in self._pending if end <= self.now]
        self._pending = [each for each in self._pending if each[0] > self.now]
        for make in there:
            make()


class _Pool(copies.HostPool):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.owner = device

    def _allocate(self, size: int, device: torch.device) -> Tensor:
        found = super()._allocate(size, device)
        self.owner.has_on_host(found)
        return found


class _Running(TorchDispatchMode):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.device.ran(operator, args, kwargs or {}, result)
        return result


def _flops(operator: Any) -> Any:
    """What counts an operator's FLOPs; PyTorch's registry names attention as it is on a GPU."""
    name = operator._overloadpacket.__name__.replace("_for_cpu", "")
    return flop_registry.get(getattr(torch.ops.aten, name, None), flop_registry.get(operator._overloadpacket))


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _by_storage(values: Any) -> dict[int, Tensor]:
    return {_address(each): each for each in tree_leaves(values) if isinstance(each, Tensor)}


def _extent(tensor: Tensor) -> int:
    """The bytes of memory behind a tensor: fewer than it has where elements lie in one place."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return min(tensor.numel(), last + 1) * tensor.itemsize
