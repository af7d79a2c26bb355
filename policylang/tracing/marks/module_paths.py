"""Module paths on the nodes of a trace that has no Dynamo to write them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.fx import traceback

STACK = "nn_module_stack"
"""The key Dynamo uses on forward nodes: path to ``(path, class)``, outermost first."""

FORWARD_STACK = "fwd_nn_module_stack"
"""The same on backward nodes: the modules of the forward operator they are the derivative of."""


@contextmanager
def module_paths(model: nn.Module) -> Iterator[None]:
    """Under it, every node traced inside a submodule's call carries the modules it lies in.

    ``nn.Module.__call__`` is replaced rather than hooks registered: what a module's own hooks compute (FSDP's gathers)
    belongs to the module too, and a module whose forward raises is left all the same.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    original = nn.Module.__call__

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        outer = traceback.get_current_meta().get(STACK)
        _set({**(outer or {}), path: (path, type(module))})
        try:
            return original(module, *args, **kwargs)
        finally:
            _set(outer)

    nn.Module.__call__ = call
    try:
        yield
    finally:
        nn.Module.__call__ = original


def _set(stack: dict[str, Any] | None) -> None:
    """Looks the dictionary up anew each time: torch replaces it by a copy now and then."""
    meta = traceback.get_current_meta()
    if stack:
        meta[STACK] = stack
    else:
        meta.pop(STACK, None)
