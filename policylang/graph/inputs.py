"""Which graph input is a parameter, a buffer, the user's, a tangent, and what it is called.

Three sources, in this order. Descriptors say it outright where AOTAutograd was given a module. Under Dynamo they say
only the position, and parameters are inputs like any other: then the expression that Dynamo reads an input from,
``L['self']._modules['linear']._parameters['weight']``, says both. Without either, an input whose memory is the same
in every step is a parameter if it gets a gradient, and a buffer if not.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import fx

from policylang._torch_graph import (
    described_input,
    differentiated_input,
    dynamo_input_names,
    dynamo_input_shapes,
    placeholder_sources,
)
from policylang.graph.facts import InputKind
from policylang.graph.modules import ModulePaths

_KINDS = {
    "parameter": InputKind.PARAMETER,
    "buffer": InputKind.BUFFER,
    "user": InputKind.USER,
    "tangent": InputKind.TANGENT,
    "other": InputKind.OTHER,
}
_OTHER_NAMES = re.compile(r"(fwd|bwd)_(seed|base_offset|rng_state)|.*token")
_FIELD = re.compile(r"(?:\._(parameters|buffers)\b|\['_(parameters|buffers)'\])")


@frozen
class Input:
    kind: InputKind
    name: str = ""
    """As torch has it, not normalised."""


@frozen
class Source:
    """Where Dynamo reads an input from. ``expression`` is empty for an input that is not a tensor."""

    expression: str
    is_parameter: bool = False


def input_columns(
    module: fx.GraphModule | None,
    nodes: Sequence[fx.Node],
    sources: Sequence[Source] | None,
    static: Collection[int] | None,
    output_descs: Sequence[Any],
    paths: ModulePaths,
) -> tuple[bytearray, list[str]]:
    """``Facts.input_kinds``, and for ``Facts.input_names`` the keys into ``paths``: of placeholders, and of parameters
    read by ``get_attr``."""
    kinds = bytearray(len(nodes))
    names = [""] * len(nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    if sources is None:
        sources = dynamo_sources(placeholders)
    differentiated = {differentiated_input(desc) for desc in output_descs if desc is not None}
    position = 0
    for row, node in enumerate(nodes):
        if node.op == "placeholder":
            found = classify(node, position, sources, static, differentiated)
            position += 1
        elif node.op == "get_attr":
            found = _attribute(module, node)
        else:
            continue
        kinds[row], names[row] = found.kind, paths.add(found.name)
    return kinds, names


def classify(
    placeholder: fx.Node,
    position: int,
    sources: Sequence[Source],
    static: Collection[int] | None,
    differentiated: Collection[Any],
) -> Input:
    """The kind and name of a graph input.

    Args:
        position: its place among the graph's inputs.
        sources: by position among the traced function's inputs; empty where Dynamo was not there.
        static: positions of inputs whose memory is the same in every step; None where nobody knows.
        differentiated: descriptors of the inputs that the graph returns gradients of.
    """
    desc = placeholder.meta.get("desc")
    if desc is None:
        return _by_name(placeholder.name, position, static)
    kind, name, index = described_input(desc)
    if not isinstance(placeholder.meta.get("val"), torch.Tensor | torch.SymInt | int | None):
        return Input(InputKind.OTHER)  # the device mesh of a DTensor
    if kind != "user":
        return Input(_KINDS[kind], name)
    if index is not None and index < len(sources) and sources[index].expression:
        return _by_source(sources[index])
    if static is not None and position in static:
        return Input(InputKind.PARAMETER if desc in differentiated else InputKind.BUFFER)
    return Input(InputKind.USER)


def dynamo_sources(placeholders: Sequence[fx.Node]) -> list[Source]:
    """The sources of a joint graph's inputs, by position; empty unless the running compilation's fit the graph.

    They fit if there is one for each tensor that the descriptors number, with the same number of dimensions: a graph
    that was kept from another compilation must not be given this one's names.
    """
    described = [(placeholder, described_input(desc)) for placeholder in placeholders if (desc := _desc(placeholder))]
    values = [(index, node.meta.get("val")) for node, (_, _, index) in described if index is not None]
    tensors = {index: value for index, value in values if isinstance(value, torch.Tensor)}
    names = dynamo_input_names()
    if not names or len(names) != len(tensors):
        return []
    order = sorted(tensors)
    if any(len(tensors[index].shape) != len(shape) for index, shape in zip(order, dynamo_input_shapes(), strict=True)):
        return []
    sources = [Source("")] * (order[-1] + 1)
    for index, (expression, is_parameter) in zip(order, names, strict=True):
        sources[index] = Source(expression, is_parameter)
    return sources


def sources_of(dynamo: fx.GraphModule) -> list[Source]:
    """The sources of a graph as Dynamo hands it to a backend: for ``collect``, which sees it much changed."""
    return [Source(*found) for found in placeholder_sources(dynamo)]


def _attribute(module: fx.GraphModule | None, node: fx.Node) -> Input:
    """What a ``get_attr`` reads: a subgraph, a constant, or a parameter that was not lifted to an input.

    Without a module, as in a recorded graph, the node's own value has to tell.
    """
    path = str(node.target)
    value: Any = module
    if module is None:
        value = node.meta.get("val")
    else:
        for part in path.split("."):
            value = getattr(value, part, None)
    if isinstance(value, torch.nn.Parameter):
        return Input(InputKind.PARAMETER, path)
    return Input(InputKind.BUFFER, path) if isinstance(value, torch.Tensor) else Input(InputKind.OTHER)


def _desc(placeholder: fx.Node) -> Any:
    return placeholder.meta.get("desc")


def _by_source(source: Source) -> Input:
    fields = _FIELD.findall(source.expression)
    field = next((name for pair in reversed(fields) for name in pair if name), "")
    if field == "parameters" or source.is_parameter:
        return Input(InputKind.PARAMETER, source.expression)
    if field == "buffers":
        return Input(InputKind.BUFFER, source.expression)
    return Input(InputKind.USER)


def _by_name(name: str, position: int, static: Collection[int] | None) -> Input:
    if name.startswith("tangents"):
        return Input(InputKind.TANGENT)
    if _OTHER_NAMES.match(name):
        return Input(InputKind.OTHER)
    if static is not None and position in static:
        return Input(InputKind.PARAMETER)
    return Input(InputKind.USER)
