"""Makes a random operator that runs twice draw the same numbers: its second run starts from the state that is kept.

The state is read before the operator draws and put back after the copy has drawn, so that every other random operator
of the step draws what it would have drawn without the recomputation.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from attrs import frozen
from torch import fx

from policylang.graph import marks
from policylang.torch_compat import partition
from policylang.torch_compat.graphs import OpOverload, schema_of
from policylang.torch_compat.tracing import tree_leaves


@frozen
class Drawing:
    """A random operator of the forward whose state is kept."""

    state: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def keep_state(node: fx.Node, drawn: str, kept: str) -> tuple[Drawing, fx.Node]:
    """Make a random operator keep the state it starts from; also return the node that now holds its result.

    ``drawn`` and ``kept``: the names of the nodes that hand out the result and the state. The node stays where it is,
    under its name, and returns ``(state, result)``; two ``getitem`` follow it.
    """
    save, _ = partition.random_state_operators()
    graph = node.graph
    target, args, kwargs = node.target, node.args, _with_device(node)
    value = node.meta.get("val")
    users = list(node.users)
    with graph.inserting_after(node):
        result = graph.create_node("call_function", operator.getitem, (node, 1), name=drawn)
        state = graph.create_node("call_function", operator.getitem, (node, 0), name=kept)
    result.name, state.name = drawn, kept
    for user in users:
        user.replace_input_with(node, result)
    node.target = save
    node.args = (target, *args)
    node.kwargs = kwargs
    result.meta = dict(node.meta)
    state.meta = {key: node.meta[key] for key in ("nn_module_stack", "seq_nr", "custom") if key in node.meta}
    state_value = _state_value(value)
    for each, val in ((node, (state_value, value)), (result, value), (state, state_value)):
        each.meta["val"] = val
        each.meta.pop("tensor_meta", None)
        each.meta["custom"] = {**marks.custom(each.meta), marks.RANDOM_STATE: node.name}
    return Drawing(state, target, args, kwargs), result


def repeat(
    drawing: Drawing, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target, arguments and keywords of a call that draws again what ``drawing`` drew."""
    _, replay = partition.random_state_operators()
    return replay, (drawing.state, drawing.target, *args), kwargs


def _with_device(node: fx.Node) -> dict[str, Any]:
    """The keywords, with a device where neither they nor a tensor argument name one: the state operators go by it."""
    kwargs = dict(node.kwargs)
    if kwargs.get("device") is not None or any(isinstance(argument, fx.Node) for argument in node.args):
        return kwargs
    takes_device = isinstance(node.target, OpOverload) and any(
        argument.name == "device" for argument in schema_of(node.target).arguments
    )
    tensor = _first_tensor(node.meta.get("val"))
    if takes_device and tensor is not None:
        kwargs["device"] = tensor.device
    return kwargs


def _state_value(value: Any) -> torch.Tensor | None:
    """A generator's state as a fake tensor beside ``value``; None where the graph carries no fake values."""
    tensor = _first_tensor(value)
    mode = getattr(tensor, "fake_mode", None)
    if tensor is None or mode is None:
        return None
    size = 16 if tensor.device.type == "cuda" else torch.get_rng_state().numel()
    with mode:
        return torch.empty(size, dtype=torch.uint8, device="cpu")


def _first_tensor(value: Any) -> torch.Tensor | None:
    return next((leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)), None)
