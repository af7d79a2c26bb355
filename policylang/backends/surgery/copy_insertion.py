"""Inserts the copies to the host and back that a schedule plans into a graph.

A copy to the host stands right behind the step before it, a copy back right before the step behind it; steps whose node
a graph does not have are passed over. What another pass made reads the copies too: a copy stands behind what it copies
and before whatever reads it, wherever that is. One pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from policylang.backends.runtime import copy_operators
from policylang.graph import marks
from policylang.graph.schedule import Schedule, StepKind

_NOT_CARRIED = ("recompute", "ac_graph_id", "tensor_meta", "should_offload", "saved_for_offloading")
"""Tags, those of PyTorch's own offloading among them, and what is said of a value a second time."""
_NOT_OF_A_COPY = (marks.SAVED, marks.RANDOM_STATE)
_STARTS = {copy_operators.OFFLOAD_OP: StepKind.COPY_TO_HOST, copy_operators.RELOAD_OP: StepKind.COPY_FROM_HOST}


Nodes = Sequence[fx.Node | None]
"""By step of a schedule: the node that runs then, None where the graph has none."""


def copy_out(graph: fx.Graph, schedule: Schedule, nodes: Nodes, values: Mapping[int, fx.Node]) -> dict[int, fx.Node]:
    """Copy values, given by row, to the host; returns by row the node that hands the copy out."""
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
                behind = tickets[row] = _call(graph, value, "offload", copy_operators.OFFLOAD_OP, (value,), value)
        elif kind == StepKind.WAIT_TO_HOST:
            value, args = values[row], (tickets[row], values[row], copy_operators.HOST)
            assert behind is not None  # the copy is there
            with graph.inserting_after(behind) if step < last else graph.inserting_before(following[step]):
                behind = hosts[row] = _call(graph, value, "host", copy_operators.WAIT_OP, args, value)
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
    """Fetch values, given by row, before their readers of each region, which from then on read what came back."""
    before = _following(graph, nodes)
    readers: dict[tuple[int, int], list[fx.Node]] = {}
    for row, value in values.items():
        for reader in value.users:
            readers.setdefault((row, region_of(reader)), []).append(reader)
    tickets: dict[int, fx.Node] = {}
    for step, (kind, row, region) in enumerate(schedule):
        if kind not in (StepKind.COPY_FROM_HOST, StepKind.WAIT_FROM_HOST) or (row, region) not in readers:
            continue
        value, host, reading = values[row], hosts[row], readers[row, region]
        device, anchor = _device(value), min(before[step], *reading)
        with graph.inserting_before(anchor):
            if kind == StepKind.COPY_FROM_HOST:
                tickets[row] = _call(graph, value, "reload", copy_operators.RELOAD_OP, (host, device), anchor)
                continue
            args = (tickets[row], host, device)
            back = _call(graph, value, "reloaded", copy_operators.WAIT_OP, args, anchor)
        for reader in reading:
            reader.replace_input_with(value, back)


def copies_in(nodes: Iterable[fx.Node]) -> dict[fx.Node, tuple[StepKind, str]]:
    """The copies among some nodes, in their order: which step each is, and the name of the value that it moves, as far
    back as the edges of the graph lead."""
    found: dict[fx.Node, tuple[StepKind, str]] = {}
    for node in nodes:
        kind = _kind_of(node)
        if kind is not None:
            found[node] = kind, _moved(node).name
    return found


def _kind_of(node: fx.Node) -> StepKind | None:
    if node.op != "call_function":
        return None
    if node.target is copy_operators.WAIT_OP and isinstance(node.args[0], fx.Node):
        is_out = node.args[0].target is copy_operators.OFFLOAD_OP
        return StepKind.WAIT_TO_HOST if is_out else StepKind.WAIT_FROM_HOST
    return _STARTS.get(node.target)


def _moved(node: fx.Node) -> fx.Node:
    while _kind_of(node) is not None:
        source = node.args[1] if node.target is copy_operators.WAIT_OP else node.args[0]
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
