"""The key of a block's plans: all of a call that changes which operators it runs, as far as that is visible."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from policylang.torch_compat.dynamo import compiled_in_place
from policylang.torch_compat.eager import forward_derivatives


def call_key(modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Shapes, strides, dtypes, devices and gradients of inputs, plain values, the modes of the modules, which
    parameters are trained, which modules are compiled, autocast, and whether derivatives are taken forwards."""
    devices: dict[str, None] = {"cpu": None}
    inputs = (_of(args, devices), _of(kwargs, devices))
    modes = tuple([each.training for each in modules])
    parameters = tuple([_parameter(value) for each in modules for value in each._parameters.values()])
    autocast = tuple([_autocast(device) for device in devices])
    return inputs, modes, parameters, compiled_in_place(modules), autocast, forward_derivatives()


def _parameter(value: Tensor | None) -> Hashable:
    if value is None:
        return None
    if is_lazy(value):  # its shape is known once it has been used
        return (type(value),)
    return value.requires_grad, value.dtype, value.shape


def _of(value: Any, devices: dict[str, None]) -> Hashable:
    if isinstance(value, Tensor):
        devices[value.device.type] = None
        layout = value.stride() if value.layout is torch.strided else value.layout
        return type(value), value.shape, layout, value.dtype, value.device, value.requires_grad
    if isinstance(value, tuple | list):
        return type(value), tuple([_of(part, devices) for part in value])
    if isinstance(value, Mapping):
        return type(value), tuple([(key, _of(part, devices)) for key, part in value.items()])
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    return (type(value),)


def _autocast(device: str) -> Hashable:
    if not torch.amp.is_autocast_available(device):  # there is none of tensors without data
        return device
    enabled = torch.is_autocast_enabled(device)
    return device, enabled, torch.get_autocast_dtype(device) if enabled else None
