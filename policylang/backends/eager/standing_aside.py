"""Calls of a block that no checkpoint can follow: those that are traced, or transformed, by something else."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from policylang.backends.eager import problems
from policylang.torch_compat.eager import differentiated_by_transform, transformed


def written_down() -> bool:
    """Whether the model is being traced for others: what they write down has no backward of its own."""
    return bool(torch.jit.is_tracing() or torch.compiler.is_exporting())


def stands_aside(module: nn.Module, root: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the block is to run as it is. Warns where a backward could follow.

    Raises ``PolicyGraphError`` under a transformation that differentiates by itself: nothing it keeps can be saved or
    recomputed from here.
    """
    if written_down() or any(isinstance(each, fx.Proxy) for each in (*args, *kwargs.values())):
        return True
    if not transformed():
        return False
    name = problems.block(module, root)
    if differentiated_by_transform():
        raise problems.differentiated(name)
    if torch.is_grad_enabled() and any(each.requires_grad for each in module.parameters()):
        problems.warn(problems.runs_transformed(name))
    return True
