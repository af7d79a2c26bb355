"""Copies of values to the host and back: the operators ``policylang::offload``, ``reload`` and ``wait``.

::

    ticket = policylang.offload(value)              # starts the copy to pinned host memory
    host = policylang.wait(ticket, value, cpu)      # the copy has ended; `value` is held until here
    ticket = policylang.reload(host, device)        # starts the copy back
    value = policylang.wait(ticket, host, device)   # the copy has ended; `host` is held until here

The arguments give the order. Only ``wait`` returns a copy, so no reader can run before its end, and ``wait`` reads the
source of the copy, so that memory cannot be reused before. Each operator is a function of its arguments whose result
aliases none of them: they have no effects, and a compiler may drop, merge or move all three.

On an accelerator copies run on a separate stream per device, and ``wait`` lets the stream that computes wait for one
copy; the host does not wait. On a CPU a copy is made at once. PyTorch has operators for the same purpose
(``ao::offload``, in 2.12 and later); they run on accelerators alone, and free what they copy from, whoever else reads
that memory.

A schedule places copies in a graph: a copy to the host right after the step before it, a copy back right before the
step after it; steps whose node the graph lacks are skipped. Nodes of other passes may read the copies too: a copy is
placed after its source and before its readers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, fx

from policylang.graph import marks
from policylang.graph.facts import Schedule, StepKind

HOST = torch.device("cpu")


HostLink = Callable[[Tensor, Tensor], Callable[[], None] | None]
"""A link between a device and the host: starts filling the first tensor from the second, and returns a function that
makes the computation wait for the end, if needed. Copies run in the order in which they start."""


def _at_once(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _on_own_stream(device: torch.device) -> HostLink:
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
"""By the number on the ticket; for as long as the ticket lives."""
_numbers = count()


def _start(device: torch.device, target: Tensor, source: Tensor) -> Tensor:
    if device not in _links:
        _links[device] = _at_once if device.type == "cpu" else _on_own_stream(device)
    number = next(_numbers)
    ticket = torch.tensor([number], dtype=torch.int64, device=HOST)
    _copies[number] = _Copy(target, _links[device](target, source))
    weakref.finalize(ticket, _copies.pop, number).atexit = False
    return ticket


def _like(source: Tensor, device: torch.device, *, pinned: bool = False) -> Tensor:
    size, stride = source.size(), source.stride()
    return torch.empty_strided(size, stride, dtype=source.dtype, device=device, pin_memory=pinned)


def _ticket(*given: Any) -> Tensor:
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
for _name, _arguments, _kernel, _fake in (
    ("offload", "Tensor value", _offload, _ticket),
    ("reload", "Tensor host, Device device", _reload, _ticket),
    ("wait", "Tensor ticket, Tensor source, Device device", _wait, lambda _, source, device: _like(source, device)),
):
    _library.define(f"{_name}({_arguments}) -> Tensor", tags=(torch.Tag.needs_exact_strides,))
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"policylang::{_name}", _fake, lib=_library)

OFFLOAD_OP = torch.ops.policylang.offload.default
RELOAD_OP = torch.ops.policylang.reload.default
WAIT_OP = torch.ops.policylang.wait.default


_NOT_CARRIED = ("recompute", "ac_graph_id", "tensor_meta", "should_offload", "saved_for_offloading")
"""Tags, those of PyTorch's offloading among them, and repeated facts about a value."""
_NOT_OF_A_COPY = (marks.SAVED, marks.RANDOM_STATE)
_PHASES = ("phase", marks.PHASE)
_STARTS = {OFFLOAD_OP: StepKind.COPY_TO_HOST, RELOAD_OP: StepKind.COPY_FROM_HOST}


Nodes = Sequence[fx.Node | None]
"""By step of a schedule: the node that runs then, None where the graph has none."""


def copy_out(graph: fx.Graph, schedule: Schedule, nodes: Nodes, values: Mapping[int, fx.Node]) -> dict[int, fx.Node]:
    """Copy values, given by node, to the host; returns by node the node that returns the copy."""
    following = _following(graph, nodes)
    last = max((step for step, kind in enumerate(schedule.kinds) if kind == StepKind.COPY_TO_HOST), default=-1)
    tickets: dict[int, fx.Node] = {}
    hosts: dict[int, fx.Node] = {}
    behind: fx.Node | None = None
    for step, (kind, row, _) in enumerate(schedule):
        if kind == StepKind.COPY_TO_HOST:
            value = values[row]
            behind = value if behind is None or behind < value else behind
            with graph.inserting_after(behind):
                behind = tickets[row] = _call(graph, value, "offload", OFFLOAD_OP, (value,), value)
        elif kind == StepKind.WAIT_TO_HOST:
            value, args = values[row], (tickets[row], values[row], HOST)
            assert behind is not None  # the copy is there
            with graph.inserting_after(behind) if step < last else graph.inserting_before(following[step]):
                behind = hosts[row] = _call(graph, value, "host", WAIT_OP, args, value)
        elif (node := nodes[step]) is not None:
            behind = node
    return hosts


def copy_in(
    graph: fx.Graph,
    schedule: Schedule,
    nodes: Nodes,
    values: Mapping[int, fx.Node],
    hosts: Mapping[int, fx.Node],
    region_of: Callable[[fx.Node], int],
) -> None:
    """Fetch values, given by node, before their readers of each region, which from then on read what came back."""
    following = _following(graph, nodes)
    readers: dict[tuple[int, int], list[fx.Node]] = {}
    for row, value in values.items():
        for reader in value.users:
            readers.setdefault((row, region_of(reader)), []).append(reader)
    tickets: dict[int, fx.Node] = {}
    for step, (kind, row, region) in enumerate(schedule):
        if kind not in (StepKind.COPY_FROM_HOST, StepKind.WAIT_FROM_HOST) or (row, region) not in readers:
            continue
        value, host, reading = values[row], hosts[row], readers[row, region]
        fake, anchor = value.meta.get("val"), min(following[step], *reading)
        device = fake.device if isinstance(fake, Tensor) else HOST
        with graph.inserting_before(anchor):
            if kind == StepKind.COPY_FROM_HOST:
                tickets[row] = _call(graph, value, "reload", RELOAD_OP, (host, device), anchor)
                continue
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
    if mode is None or any(each is None for each in values):
        return None
    with mode:
        found: torch.Tensor = target(*values)
    return found
