"""The last pass over a traced step: drops dead code, marks each node forward or backward, and names the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import fx

from policylang.graph.facts import InputKind
from policylang.graph.marks import BACKWARD, EPILOGUE, FORWARD, PHASE, custom
from policylang.graph.reading.flat_phases import is_seed
from policylang.torch_compat.tracing import input_descriptor, rename_node
from policylang.tracing.backward_marks import REGION, UNKNOWN
from policylang.tracing.forward_marks import FORWARD_STACK, STACK, TAGS

_LEAKS = (*TAGS, STACK, FORWARD_STACK)
"""What a backward node may have of the surroundings of the call that made it, and is not about it."""
_WORDS: dict[InputKind, Literal["parameter", "buffer"]] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
}


GraphInput = tuple[InputKind, str]
"""The kind and the name of what a graph input is, or is part of."""


def finish(gm: fx.GraphModule, inputs: Sequence[GraphInput]) -> None:
    """Drops what nobody reads, says forward or backward of every node, and names the inputs."""
    gm.graph.eliminate_dead_code()
    _name_inputs(gm.graph, inputs)
    stacks: dict[int, Any] = {}
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        annotations = custom(node.meta)
        if REGION in annotations or _begins_region(node):
            _finish_backward(node, annotations, stacks)
        elif annotations.get(PHASE) == EPILOGUE:
            _forget(node)
        else:
            node.meta.pop("autograd_backward", None)
            node.meta["custom"] = {**annotations, PHASE: FORWARD}
            number = node.meta.get("seq_nr", UNKNOWN)
            # What a thread runs before its first backward function has no number either: it is nobody's forward.
            if number != UNKNOWN:  # the first with a number is the operator that autograd numbered
                stacks.setdefault(number, node.meta.get(STACK))
    gm.recompile()


def _begins_region(node: fx.Node) -> bool:
    """The gradient of the loss with respect to itself is made just before the engine is called."""
    return is_seed(node) and any(REGION in custom(user.meta) for user in node.users)


def _finish_backward(node: fx.Node, annotations: dict[str, Any], stacks: dict[int, Any]) -> None:
    _forget(node)
    kept = {key: value for key, value in annotations.items() if key != REGION}
    node.meta["custom"] = {**kept, PHASE: BACKWARD}
    node.meta["autograd_backward"] = True
    stack = stacks.get(node.meta.get("seq_nr", UNKNOWN))
    if stack:
        node.meta[FORWARD_STACK] = stack


def _forget(node: fx.Node) -> None:
    for key in _LEAKS:
        node.meta.pop(key, None)


def _name_inputs(graph: fx.Graph, inputs: Sequence[GraphInput]) -> None:
    for position, (node, (kind, name)) in enumerate(zip(graph.find_nodes(op="placeholder"), inputs, strict=True)):
        name_input(node, kind, name, position)


def name_input(node: fx.Node, kind: InputKind, name: str, position: int) -> None:
    """Name a placeholder, and describe it as torch's own tracer does."""
    word = _WORDS.get(kind)
    rename_node(node, f"{word}_{name}" if word else name)
    node.meta["desc"] = input_descriptor(word or "user", name, position)
