"""The ones from which autograd starts: where a backward begins, in a graph that does not say."""

from __future__ import annotations

import math

import torch
from torch import fx


def is_seed(node: fx.Node) -> bool:
    """Whether a node is the gradient of a scalar with respect to itself, as ``torch.autograd`` makes it.

    It asks for a memory format by name, which nobody who writes ``ones_like(loss)`` does.
    """
    if node.target is not torch.ops.aten.ones_like.default:
        return False
    if node.kwargs.get("memory_format") is not torch.preserve_format:
        return False
    shape = getattr(node.meta.get("val"), "shape", ())
    return all(isinstance(size, int) for size in shape) and math.prod(shape) == 1
