"""Operators that replace values between forward and backward: copies on the host, and narrower values.

The operators ``policylang::offload``, ``reload`` and ``wait`` copy values to the host and back.

::

    ticket = policylang.offload(value)              # starts the copy to pinned host memory
    host = policylang.wait(ticket, value, cpu)      # the copy has ended; `value` is held until here
    ticket = policylang.reload(host, device)        # starts the copy back
    value = policylang.wait(ticket, host, device)   # the copy has ended; `host` is held until here

The arguments give the order: only ``wait`` returns a copy, and it reads the source, whose memory cannot be reused
before. No result aliases an argument: a compiler may drop, merge or move all three.

On an accelerator copies run on streams of their own, one each way and device, and ``wait`` lets the stream that
computes wait for one copy; the host does not wait. Host memory is taken from one pool. On a CPU a copy is made at once.
PyTorch's own (``ao::offload``, in 2.12 and later) run on accelerators alone, and free what they copy from, whoever else
reads that memory.

``narrow`` and ``widen`` change the type of a value: rounded to the nearest number of the narrow type, and exactly
back, with the same sizes and strides. With a scale for each row, along the last dimension, the largest number of a row
becomes the largest of the type; ``scales`` returns them. A row that holds an infinity, NaN or nothing but zeros has the
scale 1: its numbers become what PyTorch's conversion makes of them.

A schedule places copies in a graph: one to the host right after the step before it, one back right before the step
after it, and each after its source and before its readers, which may be of other passes.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx

from policylang.graph import marks
from policylang.graph.facts import Schedule, StepKind
from policylang.language.syntax import NarrowForm
from policylang.planning.schedule import IN_FLIGHT, SMALLER, pool_bytes
from policylang.torch_compat.eager import empty_host_cache, storage_address, storage_bytes, storage_users, version
from policylang.torch_compat.graphs import outside_of_modes
from policylang.torch_compat.tracing import replaced

HOST = torch.device("cpu")
HostLink = Callable[[Tensor, Tensor], Callable[[], None] | None]
"""A link between a device and the host: starts filling the first tensor from the second, and returns a function that
makes the computation wait for the end, if needed. Copies run in the order in which they start."""


def _at_once(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _on_own_stream(device: torch.device) -> HostLink:
    out, back = torch.Stream(device=device), torch.Stream(device=device)

    def copy(target: Tensor, source: Tensor) -> Callable[[], None]:
        """The copy starts when all has run that was asked of the computing stream before: it made the source, and what
        had the target's memory before."""
        stream = out if source.device == device else back
        computing = torch.accelerator.current_stream(device)
        stream.wait_stream(computing)
        with torch.accelerator.device_index(device.index):  # which a stream sets as well
            torch.accelerator.set_stream(stream)
            try:
                target.copy_(source, non_blocking=True)
                done = stream.record_event()
            finally:
                torch.accelerator.set_stream(computing)

        def wait() -> None:
            computing.wait_event(done)  # whichever thread waits: the memory of both sides is that stream's
            if (own := torch.accelerator.current_stream(device)) != computing:
                own.wait_event(done)

        return wait

    return copy


class HostPool:
    """Host memory for offloaded values: buffers of rounded size, one device each, reused as soon as no tensor shares
    their memory. It never holds more than was in use at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a model may be collected while a buffer is taken
        self._free = defaultdict[tuple[torch.device, int], list[Tensor]](list)
        self._taken: list[tuple[tuple[torch.device, int], Tensor]] = []
        """Buffers that were in use at the last check."""
        self.out = self.back = 0
        """The bytes that were copied out, and back."""
        self.most = 0
        """The most bytes that were in use at once."""
        self.slower = ""
        """Why copies take longer than they have to: host memory cannot be pinned, or there are no streams."""

    def take(self, size: int, device: torch.device) -> Tensor:
        """A buffer for so many bytes of a device."""
        kind = device, pool_bytes(size)
        with self._lock:
            if not (free := self._free[kind]):
                in_use = self._look()
            if free:
                buffer = free.pop()
            else:
                self.most = max(self.most, in_use + kind[1])
                self._free.clear()
                buffer = self._allocate(*kind)
            self._taken.append((kind, buffer))
            return buffer[:size]

    @property
    def in_use(self) -> int:
        with self._lock:
            return self._look()

    @property
    def held(self) -> int:
        return self.in_use + sum(size * len(free) for (_, size), free in self._free.items())

    def give_back(self) -> None:
        """Give back what is not in use. PyTorch keeps pinned memory that nobody uses until it is told to."""
        with self._lock:
            self._look()
            self._free.clear()
        empty_host_cache()

    def _look(self) -> int:
        """Find what is free by now; the bytes that are in use."""
        before, self._taken = self._taken, []
        for kind, buffer in before:
            if storage_users(buffer) == 1:
                self._free[kind].append(buffer)
            else:
                self._taken.append((kind, buffer))
        return sum(size for (_, size), _ in self._taken)

    def _allocate(self, device: torch.device, size: int) -> Tensor:
        if device.type != "cpu":
            try:
                return torch.empty(size, dtype=torch.uint8, device=HOST, pin_memory=True)
            except RuntimeError as error:  # copies work all the same, and the host waits for them
                self.slower = str(error).partition("\n")[0]
        return torch.empty(size, dtype=torch.uint8, device=HOST)


pool = HostPool()

_links: dict[torch.device, HostLink] = {}
_copies: dict[int, tuple[Tensor, Callable[[], None] | None]] = {}
"""By the number on the ticket, for as long as the ticket lives, the target, and what waits: any number of times."""
_numbers = count()


def _link(device: torch.device) -> HostLink:
    if device not in _links:
        _links[device] = _at_once
        try:
            _links[device] = _at_once if device.type == "cpu" else _on_own_stream(device)
        except RuntimeError as error:
            pool.slower = str(error).partition("\n")[0]
    return _links[device]


@contextmanager
def timed_copies(timed: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """Under it ``timed`` is around each wait for a copy, and around each that is made at once."""

    def link(device: torch.device) -> HostLink:
        copy = plain(device)

        def start(target: Tensor, source: Tensor) -> Callable[[], None] | None:
            name = "copy to the host" if source.device == device else "copy from the host"
            with timed(name) if copy is _at_once else nullcontext():
                wait = copy(target, source)

            def awaited() -> None:
                with timed(name):
                    wait()  # type: ignore[misc]

            return None if wait is None else awaited

        return start

    plain = _link
    with replaced((sys.modules[__name__], "_link", link)):
        yield


def _start(device: torch.device, target: Tensor, source: Tensor) -> Tensor:
    number = next(_numbers)
    ticket = torch.tensor([number], dtype=torch.int64, device=HOST)
    _copies[number] = target, _link(device)(target, source)
    weakref.finalize(ticket, _ended, number).atexit = False
    return ticket


def _ended(number: int) -> None:
    """A copy that nobody awaited, because an error came between, has an end, too: its memory is someone else's then."""
    _, wait = _copies.pop(number)
    if wait is not None:
        wait()


def _like(source: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device=device)


def _over(memory: Tensor, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    """A tensor in the memory of another."""
    found = torch.empty(0, dtype=dtype, device=memory.device)
    return found.set_(memory.untyped_storage(), offset, tuple(size), tuple(stride))


def _ticket(*given: Any) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device=HOST)


def _offload(value: Tensor) -> Tensor:
    last = sum((size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True))
    size = (last + 1) * value.itemsize if value.numel() else 0
    buffer = pool.take(size, value.device)
    pool.out += size
    return _start(value.device, _over(buffer, value.dtype, value.size(), value.stride()), value)


def _reload(host: Tensor, device: torch.device) -> Tensor:
    target = _like(host, device)
    pool.back += storage_bytes(target)
    return _start(target.device, target, host)


def _wait(ticket: Tensor, source: Tensor, device: torch.device) -> Tensor:
    target, wait = _copies[int(ticket)]
    if wait is not None:
        wait()
    return target


_SLICES, _SMALL = 16, 1 << 20
"""Values of more bytes are narrowed and widened in so many slices, which bounds what that takes beside the result."""


def _slices(tensor: Tensor, like: Tensor) -> Sequence[Tensor]:
    """Slices of a tensor, along the dimension of ``like`` before its last that has most."""
    if like.dim() < 2 or like.numel() * like.itemsize <= _SMALL:
        return (tensor,)
    dim = max(range(like.dim() - 1), key=lambda each: int(like.size(each)))
    found: Sequence[Tensor] = tensor.split(-(-int(like.size(dim)) // _SLICES), dim)
    return found


def _scales(value: Tensor, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(value.dtype, torch.float32)
    largest = torch.linalg.vector_norm(value, torch.inf, -1, keepdim=True, dtype=wide)
    scale = largest.to(torch.float32) / torch.finfo(dtype).max
    is_usable = torch.isfinite(scale) & (scale >= torch.finfo(torch.float32).tiny)
    return torch.where(is_usable, scale, 1.0).contiguous()


def _narrow(value: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    found = _of_type(value, dtype)
    if scale is None:
        return found.copy_(value)
    parts = (_slices(each, value) for each in (found, value, scale))
    for target, source, divisor in zip(*parts, strict=True):
        target.copy_(source / divisor)
    return found


def _widen(narrow: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    found, wide = _of_type(narrow, dtype), torch.promote_types(dtype, torch.float32)
    if scale is None:
        return found.copy_(narrow)
    parts = (_slices(each, found) for each in (found, narrow, scale))
    for target, source, factor in zip(*parts, strict=True):
        target.copy_(source.to(wide).mul_(factor))
    return found


def _of_type(value: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(value.size(), value.stride(), dtype=dtype, device=value.device)


def narrowed(value: Tensor, form: NarrowForm) -> tuple[Tensor, ...]:
    """A value in a narrower form, and its scales where the form has any."""
    dtype = getattr(torch, form.dtype)
    scale = _scales(value, dtype) if form.per_row else None
    return (_narrow(value, scale, dtype),) if scale is None else (_narrow(value, scale, dtype), scale)


def widened(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """A value from its narrower form."""
    return _widen(parts[0], parts[1] if len(parts) > 1 else None, dtype)


def _fake_scales(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.new_empty((*value.size()[:-1], 1) if value.dim() else (), dtype=torch.float32)


_library = torch.library.Library("policylang", "DEF")
for _name, _arguments, _kernel, _fake in (
    ("scales", "Tensor value, ScalarType dtype", _scales, _fake_scales),
    (
        "narrow",
        "Tensor value, Tensor? scale, ScalarType dtype",
        _narrow,
        lambda value, _, dtype: _of_type(value, dtype),
    ),
    ("widen", "Tensor narrow, Tensor? scale, ScalarType dtype", _widen, lambda value, _, dtype: _of_type(value, dtype)),
    ("offload", "Tensor value", _offload, _ticket),
    ("reload", "Tensor host, Device device", _reload, _ticket),
    ("wait", "Tensor ticket, Tensor source, Device device", _wait, lambda _, source, device: _like(source, device)),
):
    _library.define(f"{_name}({_arguments}) -> Tensor", tags=(torch.Tag.needs_exact_strides,))
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"policylang::{_name}", _fake, lib=_library)

_leaving = defaultdict[torch.device, deque[weakref.ref["HostValue"]]](deque)
"""By device, the copies to the host that are under way, in order."""
_lock = threading.RLock()  # of that


class HostValue:
    """The memory of some tensors, on its way to the host, there, or on its way back. Each of them is asked for once in
    a backward; when all were, the device's memory is theirs alone."""

    _wait: Callable[[], None] | None = None

    def __init__(self, tensor: Tensor) -> None:
        """Starts the copy of a plain tensor's memory. At most :data:`IN_FLIGHT` are under way: before that, the oldest
        is awaited, unless it is much larger."""
        self.device, self.bytes, self.address = tensor.device, storage_bytes(tensor), storage_address(tensor)
        self.tensors = self._given = 0
        self.written = False
        """The memory was written to while it was copied: it stayed on the device."""
        self.source: Tensor | None = _over(tensor, torch.uint8, (self.bytes,), (1,))
        self._of, self.version = tensor, version(tensor)
        self._back: Tensor | None = None
        with _lock:
            under_way = _leaving[self.device]
            while len(under_way) >= IN_FLIGHT and self._waits_for(under_way[0]()):
                _next_has_left(under_way)
            self._host: Tensor | None = pool.take(self.bytes, self.device)
            self._wait = _link(self.device)(self._host, self.source)
            pool.out += self.bytes
            under_way.append(weakref.ref(self))

    def _waits_for(self, oldest: HostValue | None) -> bool:
        return oldest is None or oldest.bytes <= SMALLER * self.bytes

    def left(self) -> None:
        """The copy to the host is awaited, and the device's memory is not held any longer."""
        self._await()
        self.written = version(self._of) != self.version
        if self.written:
            self._host = None
        else:
            self.source = None
        del self._of

    def fetch(self) -> None:
        """Start the copy back."""
        if self.source is not None or self._back is not None:
            return
        assert self._host is not None
        with outside_of_modes():
            self._back = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
            self._wait = _link(self.device)(self._back, self._host)
        pool.back += self.bytes

    def tensor(self, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        """One of the tensors, in the memory that came back."""
        if self.source is not None:
            return _over(self.source, dtype, size, stride, offset)
        self.fetch()
        assert self._back is not None
        self._await()
        found = _over(self._back, dtype, size, stride, offset)
        self._given += 1
        if self._given >= self.tensors:
            self._back, self._given = None, 0
        return found

    def _await(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            with outside_of_modes():
                wait()

    def __del__(self) -> None:
        self._await()  # before anyone has the memory that is copied from or to


def _next_has_left(under_way: deque[weakref.ref[HostValue]]) -> None:
    if (value := under_way.popleft()()) is not None:
        value.left()


def await_copies() -> None:
    """All copies to the host are awaited: a backward begins."""
    with _lock:
        for under_way in _leaving.values():
            while under_way:
                _next_has_left(under_way)


OFFLOAD_OP = torch.ops.policylang.offload.default
RELOAD_OP = torch.ops.policylang.reload.default
WAIT_OP = torch.ops.policylang.wait.default
SCALES_OP = torch.ops.policylang.scales.default
NARROW_OP = torch.ops.policylang.narrow.default
WIDEN_OP = torch.ops.policylang.widen.default


_NOT_CARRIED = ("recompute", "ac_graph_id", "tensor_meta", "should_offload", "saved_for_offloading")
"""Tags, those of PyTorch's offloading among them, and repeated facts about a value."""
_NOT_OF_A_COPY = (marks.SAVED, marks.RANDOM_STATE)
_PHASES = ("phase", marks.PHASE)
_STARTS = {
    OFFLOAD_OP: StepKind.COPY_TO_HOST,
    RELOAD_OP: StepKind.COPY_FROM_HOST,
    SCALES_OP: StepKind.SCALE,
    NARROW_OP: StepKind.NARROW,
    WIDEN_OP: StepKind.WIDEN,
}


Nodes = Sequence[fx.Node | None]
"""By step of a schedule: the node that runs then, None where the graph has none."""


Waiting = Mapping[int, tuple[fx.Node, ...]]
"""By row, what waits in place of its value: the copy on the host, or the narrow value and its scales."""


def copy_out(graph: fx.Graph, schedule: Schedule, nodes: Nodes, values: Mapping[int, fx.Node]) -> Waiting:
    """Copy values, given by node, to the host, or narrow them."""
    following = _following(graph, nodes)
    last = max((step for step, kind in enumerate(schedule.kinds) if kind == StepKind.COPY_TO_HOST), default=-1)
    tickets: dict[int, fx.Node] = {}
    hosts: dict[int, tuple[fx.Node, ...]] = {}
    behind: fx.Node | None = None
    for step, (kind, row, _) in enumerate(schedule):
        if kind == StepKind.COPY_TO_HOST:
            value = values[row]
            behind = value if behind is None or behind < value else behind
            with graph.inserting_after(behind):
                behind = tickets[row] = _call(graph, value, "offload", OFFLOAD_OP, (value,), value)
        elif kind in (StepKind.SCALE, StepKind.NARROW):
            value, dtype, scale = values[row], getattr(torch, schedule.forms[row].dtype), tickets.get(row)
            behind = value if behind is None or behind < value else behind
            with graph.inserting_after(behind):
                if kind == StepKind.SCALE:
                    behind = tickets[row] = _call(graph, value, "scales", SCALES_OP, (value, dtype), value)
                else:
                    behind = _call(graph, value, "narrow", NARROW_OP, (value, scale, dtype), value)
                    hosts[row] = (behind,) if scale is None else (behind, scale)
        elif kind == StepKind.WAIT_TO_HOST:
            value, args = values[row], (tickets[row], values[row], HOST)
            assert behind is not None  # the copy is there
            with graph.inserting_after(behind) if step < last else graph.inserting_before(following[step]):
                behind = _call(graph, value, "host", WAIT_OP, args, value)
            hosts[row] = (behind,)
        elif (node := nodes[step]) is not None:
            behind = node
    return hosts


def copy_in(
    graph: fx.Graph,
    schedule: Schedule,
    nodes: Nodes,
    values: Mapping[int, fx.Node],
    dtypes: Sequence[str],
    hosts: Waiting,
    region_of: Callable[[fx.Node], int],
) -> None:
    """Fetch or widen values, given by node, before their readers of each region, which from then on read that."""
    following = _following(graph, nodes)
    readers: dict[tuple[int, int], list[fx.Node]] = {}
    for row, value in values.items():
        for reader in value.users:
            readers.setdefault((row, region_of(reader)), []).append(reader)
    tickets: dict[int, fx.Node] = {}
    for step, (kind, row, region) in enumerate(schedule):
        comes_back = kind in (StepKind.COPY_FROM_HOST, StepKind.WAIT_FROM_HOST, StepKind.WIDEN)
        if not comes_back or (row, region) not in readers:
            continue
        value, host, reading = values[row], hosts[row][0], readers[row, region]
        fake, anchor = value.meta.get("val"), min(following[step], *reading)
        device = fake.device if isinstance(fake, Tensor) else HOST
        with graph.inserting_before(anchor):
            if kind == StepKind.COPY_FROM_HOST:
                tickets[row] = _call(graph, value, "reload", RELOAD_OP, (host, device), anchor)
                continue
            if kind == StepKind.WIDEN:
                scale, dtype = (*hosts[row], None)[1], getattr(torch, dtypes[row])
                back = _call(graph, value, "widened", WIDEN_OP, (host, scale, dtype), anchor)
            else:
                back = _call(graph, value, "reloaded", WAIT_OP, (tickets[row], host, device), anchor)
        for reader in reading:
            reader.replace_input_with(value, back)


def copies_in(nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[StepKind, str]]:
    """The copies among some nodes, in their order: which step each is, and the name of the value that it moves, as far
    back as the edges of the graph lead."""
    return {node: (kind, _moved(node).name) for node in nodes if (kind := _kind_of(node)) is not None}


def _kind_of(node: fx.Node) -> StepKind | None:
    if node.op != "call_function":
        return None
    if node.target is WAIT_OP and isinstance(node.args[0], fx.Node):
        is_out = node.args[0].target is OFFLOAD_OP
        return StepKind.WAIT_TO_HOST if is_out else StepKind.WAIT_FROM_HOST
    return _STARTS.get(node.target)


def _moved(node: fx.Node) -> fx.Node:
    while _kind_of(node) is not None:
        source = node.args[1] if node.target is WAIT_OP else node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _following(graph: fx.Graph, nodes: Nodes) -> list[fx.Node]:
    """By step the node that comes next, the output at last."""
    found, coming = [], graph.output_node()
    for node in reversed(nodes):
        coming = coming if node is None else node
        found.append(coming)
    return found[::-1]


def _call(graph: fx.Graph, value: fx.Node, word: str, target: Any, args: tuple[Any, ...], beside: fx.Node) -> fx.Node:
    """A call with the metadata of the value that it moves, in the phase of the node ``beside`` it."""
    node = graph.create_node("call_function", target, args, name=f"{value.name}_{word}")
    node.meta = without_marks(value.meta)
    annotations = {key: own for key, own in node.meta["custom"].items() if key not in _PHASES}
    annotations |= {key: theirs for key, theirs in marks.custom(beside.meta).items() if key in _PHASES}
    node.meta["custom"] = {**annotations, marks.MOVED: value.name}
    node.meta.pop("autograd_backward", None)
    if beside.meta.get("autograd_backward"):
        node.meta["autograd_backward"] = True
    node.meta["val"] = _value(target, args)
    return node


def without_marks(found: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a value as far as it holds of a copy of it, too."""
    meta = {key: value for key, value in found.items() if key not in _NOT_CARRIED}
    meta["custom"] = {key: value for key, value in marks.custom(found).items() if key not in _NOT_OF_A_COPY}
    return meta


def _value(target: Any, args: Iterable[Any]) -> torch.Tensor | None:
    """The fake tensor that a call returns; None where the graph carries none."""
    values = [each.meta.get("val") if isinstance(each, fx.Node) else each for each in args]
    mode = next((mode for each in values if (mode := getattr(each, "fake_mode", None)) is not None), None)
    if mode is None or values[0] is None:
        return None
    with mode:
        found: torch.Tensor = target(*values)
    return found
