"""Values moved to the host and back: the copies and where they stand.

On a graph that holds forward and backward the whole of it is :func:`move`; where the two are apart, as in
:mod:`policylang.backends.joint.offload`, each takes its side.

Which values are moved is planned. Where a copy starts and where it is awaited is the rule of
:mod:`policylang.planning.decisions.offloading`, on the nodes as they stand once everything else is in its place. One
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from attrs import field, frozen

from policylang.backends.runtime import copy_operators
from policylang.graph import marks
from policylang.planning.storage import IN_FLIGHT

_NOT_CARRIED = ("recompute", "ac_graph_id", "tensor_meta", "should_offload", "saved_for_offloading")
"""Tags, those of PyTorch's own offloading among them, and what is said of a value a second time."""
_NOT_OF_A_COPY = (marks.SAVED, marks.RANDOM_STATE)


@frozen(eq=False)
class _Region:
    """A run of backward nodes: where it begins, and for each value that it reads the readers, in order."""

    begin: fx.Node
    readers: dict[fx.Node, list[fx.Node]] = field(factory=dict)


def move(graph: fx.Graph, held: Mapping[fx.Node, fx.Node], backward: Collection[fx.Node]) -> None:
    """Move values to the host in the forward, and back in each run of ``backward`` nodes that reads them.

    ``held``: every forward node that lives in the memory of a value to move, the value included, to that value.
    """
    last, regions = _read(graph, held, backward)
    wanted = {value for region in regions for value in region.readers}
    leaving = [(value, reader) for value, reader in last.items() if value in wanted]
    if not leaving:
        return
    hosts = copy_out(graph, leaving, regions[0].begin)
    for region in regions:
        copy_in(graph, hosts, region.readers, region.begin)


def last_readers(graph: fx.Graph, held: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Of a graph that is all forward: each value of ``held`` with the last reader of its memory, in their order."""
    return _read(graph, held, ())[0]


def _read(
    graph: fx.Graph, held: Mapping[fx.Node, fx.Node], backward: Collection[fx.Node]
) -> tuple[dict[fx.Node, fx.Node], list[_Region]]:
    """The last forward reader of each value, in the order of these readers, and the regions."""
    values = frozenset(held.values())
    last: dict[fx.Node, fx.Node] = {}
    regions: list[_Region] = []
    inside = False
    for node in graph.nodes:
        if node in backward:
            if not inside:
                regions.append(_Region(node))
            inside = True
            for read in node.all_input_nodes:
                if read in values:
                    regions[-1].readers.setdefault(read, []).append(node)
        elif node.op == "call_function":
            inside = False
            touched = [held[node]] if node in held else []
            for value in dict.fromkeys([*touched, *(held[read] for read in node.all_input_nodes if read in held)]):
                last.pop(value, None)
                last[value] = node
    return last, regions


def copy_out(graph: fx.Graph, leaving: Sequence[tuple[fx.Node, fx.Node]], end: fx.Node) -> dict[fx.Node, fx.Node]:
    """Copy each value to the host behind its last reader; returns by value the node that hands the copy out.

    ``leaving`` is in the order of the readers; every copy is awaited before ``end``.
    """
    tickets: list[fx.Node] = []
    hosts: dict[fx.Node, fx.Node] = {}
    behind: dict[fx.Node, fx.Node] = {}

    def awaited(number: int) -> None:
        value = leaving[number][0]
        hosts[value] = _call(
            graph, value, "host", copy_operators.WAIT, (tickets[number], value, copy_operators.HOST), value
        )

    for number, (value, reader) in enumerate(leaving):
        with graph.inserting_before(behind.setdefault(reader, reader.next)):
            if number >= IN_FLIGHT:
                awaited(number - IN_FLIGHT)
            tickets.append(_call(graph, value, "offload", copy_operators.OFFLOAD, (value,), value))
    with graph.inserting_before(end):
        for number in range(max(0, len(leaving) - IN_FLIGHT), len(leaving)):
            awaited(number)
    return hosts


def copy_in(
    graph: fx.Graph,
    hosts: Mapping[fx.Node, fx.Node],
    readers: Mapping[fx.Node, Sequence[fx.Node]],
    begin: fx.Node,
    device_of: Callable[[fx.Node], torch.device] | None = None,
) -> None:
    """Fetch each value before its readers, which from then on read what came back. ``readers``: by value, in order;
    the values in the order of their first reader. No copy starts before ``begin``."""
    values = [value for value in readers if value in hosts]
    firsts = [readers[value][0] for value in values]
    for number, value in enumerate(values):
        device = device_of(value) if device_of is not None else _device(value)
        host, start = hosts[value], begin if number < IN_FLIGHT else firsts[number - IN_FLIGHT]
        with graph.inserting_before(start):
            ticket = _call(graph, value, "reload", copy_operators.RELOAD, (host, device), start)
        with graph.inserting_before(firsts[number]):
            back = _call(graph, value, "reloaded", copy_operators.WAIT, (ticket, host, device), start)
        for reader in readers[value]:
            reader.replace_input_with(value, back)


def _device(value: fx.Node) -> torch.device:
    fake = value.meta.get("val")
    return fake.device if isinstance(fake, torch.Tensor) else copy_operators.HOST


def _call(graph: fx.Graph, value: fx.Node, word: str, target: Any, args: tuple[Any, ...], beside: fx.Node) -> fx.Node:
    node = graph.create_node("call_function", target, args, name=f"{value.name}_{word}")
    node.meta = _meta(value, beside)
    node.meta["val"] = _value(target, args)
    return node


def _meta(value: fx.Node, beside: fx.Node) -> dict[str, Any]:
    """The metadata of the value, in the phase of the node beside which a copy stands."""
    meta = without_marks(value.meta)
    annotations = marks.custom(meta)
    theirs = marks.custom(beside.meta)
    for key in ("phase", marks.PHASE):
        annotations.pop(key, None)
        if key in theirs:
            annotations[key] = theirs[key]
    meta.pop("autograd_backward", None)
    if beside.meta.get("autograd_backward"):
        meta["autograd_backward"] = True
    meta["custom"] = {**annotations, marks.MOVED: value.name}
    return meta


def without_marks(found: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a value as far as it holds of a copy of it, too."""
    meta = {key: value for key, value in found.items() if key not in _NOT_CARRIED}
    meta["custom"] = {key: value for key, value in marks.custom(found).items() if key not in _NOT_OF_A_COPY}
    return meta


def _value(target: Any, args: Iterable[Any]) -> torch.Tensor | None:
    """What a node returns, as a fake tensor; None where the graph carries none."""
    values = [each.meta.get("val") if isinstance(each, fx.Node) else each for each in args]
    mode = next((mode for each in values if (mode := getattr(each, "fake_mode", None)) is not None), None)
    if mode is None or any(each is None for each in values):
        return None
    with mode:
        found: torch.Tensor = target(*values)
    return found
