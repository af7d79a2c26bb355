"""The private names of torch that rebuilding a recorded graph stands on, one function each, and why."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch


def fake_tensors() -> AbstractContextManager[Any]:
    """Within it, tensors have sizes and no memory: an 8B model's are measured on any machine. Seen in 2.11 to 2.15."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: AbstractContextManager[Any] = FakeTensorMode()
    return mode


def descriptor_classes() -> dict[str, type]:
    """AOTAutograd's descriptors of graph inputs and outputs by name; a recording has them as they print."""
    from torch._functorch._aot_autograd import descriptors

    return {
        name: found
        for name in dir(descriptors)
        if name.endswith(("Input", "Output")) and isinstance(found := getattr(descriptors, name), type)
    }


def load_distributed_operators() -> None:
    """Registers the operators of collectives, functional and DTensor's; torch imports them only where they are used."""
    if torch.distributed.is_available():
        import_module("torch.distributed._functional_collectives")
        import_module("torch.distributed.tensor")
