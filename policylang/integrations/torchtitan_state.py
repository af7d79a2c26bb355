"""Which inputs of a step that TorchTitan's graph trainer traced are parameters. Its graphs do not say.

What is known is how the trainer calls its tracer: the inputs begin with the model's parameters, in the order of
``named_parameters``, then come buffers, then the batch. The outputs are the loss and the gradients of what is trained,
in that order too. A parameter that is a DTensor, as SimpleFSDP makes every one, is its local tensor and then its mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh


def parameters_of(gm: fx.GraphModule) -> list[int]:
    """The positions, among the inputs of ``gm``, of those that hold a parameter. Never one that holds anything else.

    All are found but frozen ones behind the last that is trained, which are found where they are DTensors.
    """
    inputs = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    end = _behind_the_trained(inputs, list(_gradients(gm)))
    while end + 1 < len(inputs) and isinstance(inputs[end], torch.Tensor) and isinstance(inputs[end + 1], DeviceMesh):
        end += 2
    return [position for position in range(end) if isinstance(inputs[position], torch.Tensor)]


def _behind_the_trained(inputs: Sequence[Any], gradients: Sequence[torch.Tensor]) -> int:
    """Where the inputs that the gradients belong to end, at the earliest; 0 where they do not belong together.

    Each gradient is paired with the first input that it fits, behind the pair before it. Where parameters are frozen
    that may be another input than its own, and never one behind its own.
    """
    position = 0
    for gradient in gradients:
        while position < len(inputs) and not _fits(inputs[position], gradient):
            position += 1
        if position == len(inputs):
            return 0
        position += 1
    beyond_mesh = position < len(inputs) and isinstance(inputs[position], DeviceMesh)
    return position + beyond_mesh


def _fits(value: Any, gradient: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == gradient.shape and value.dtype == gradient.dtype


def _gradients(gm: fx.GraphModule) -> Iterator[torch.Tensor]:
    """What the step returns behind the loss, without the meshes of DTensors."""
    output = next(iter(reversed(gm.graph.nodes)))
    for returned in output.args[0][1:]:
        value = returned.meta.get("val") if isinstance(returned, fx.Node) else None
        if isinstance(value, torch.Tensor):
            yield value
