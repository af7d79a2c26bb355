"""Calls of a block that no checkpoint is put around: those that are traced, or transformed, by something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from policylang._torch_eager import differentiated_by_transform, forward_derivatives, transformed
from policylang.backends.eager import problems
from policylang.backends.eager.origins import tensors_in


def stands_aside(module: nn.Module, root: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the block is to run as it is: what it runs in writes it down, or keeps nothing for a backward.

    Raises ``PolicyGraphError`` under a transformation that differentiates by itself: nothing it keeps can be saved or
    recomputed from here.
    """
    if torch.jit.is_tracing() or any(isinstance(each, fx.Proxy) for each in (*args, *kwargs.values())):
        return True
    if not transformed():
        return forward_derivatives(tensors_in((args, kwargs)))
    if differentiated_by_transform():
        raise problems.transformed(problems.block(module, root))
    return True
