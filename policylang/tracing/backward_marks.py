"""Marks, while a step is traced, which nodes an autograd engine call makes: the backward regions of the flat graph."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.fx import traceback

from policylang.torch_compat.tracing import autograd_engine_replaced, sequence_number

REGION = "policylang_region"
"""``custom`` key while tracing: the number of the engine call, from 0, that a node was made in."""

UNKNOWN = -1
"""The ``seq_nr`` of a backward node that is no operator's derivative: the accumulation of two gradients. torch gives
it to forward nodes as well, those that a thread makes before its first backward function."""


class BackwardRegions:
    """Numbers the calls of the autograd engine."""

    def __init__(self) -> None:
        self.inside = False
        self.count = 0

    def marked(self) -> AbstractContextManager[None]:
        """Under it, each outermost call of the autograd engine is a region of its own.

        A call that keeps its own graph (``create_graph``) is none: its results are differentiated again, as a Jacobian
        in a forward is, and so they are part of the forward. Nor is a call inside a call.
        """
        return autograd_engine_replaced(self._wrap)

    @contextmanager
    def accumulation(self) -> Iterator[None]:
        """Under it, sums of what several calls made are part of the last one."""
        with traceback.annotate({REGION: self.count - 1}), _sequence_numbers(()):
            yield

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            # _engine_run_backward(outputs, grads, keep_graph, create_graph, inputs, ...)
            if self.inside or kwargs.get("create_graph", len(args) > 2 and args[2]):
                return original(outputs, *args, **kwargs)
            self.inside = True
            try:
                with traceback.annotate({REGION: self.count}), _sequence_numbers(outputs):
                    return original(outputs, *args, **kwargs)
            finally:
                self.inside = False
                self.count += 1

        return run


@contextmanager
def _sequence_numbers(outputs: Sequence[Any]) -> Iterator[None]:
    """Under it, a node carries the ``seq_nr`` of the backward function that made it, or :data:`UNKNOWN`."""
    handles = []
    for function in _backward_functions(outputs):
        number = sequence_number(function)
        handles.append(function.register_prehook(lambda _gradients, at=number: traceback.set_grad_fn_seq_nr(at)))
        handles.append(function.register_hook(lambda _inputs, _outputs: traceback.reset_grad_fn_seq_nr()))
    traceback.set_grad_fn_seq_nr(UNKNOWN)
    try:
        yield
    finally:
        traceback.reset_grad_fn_seq_nr()
        for handle in handles:
            handle.remove()


def _backward_functions(outputs: Sequence[Any]) -> list[Any]:
    """Every function of the autograd graph below the outputs, once."""
    roots = [value.grad_fn for value in outputs if isinstance(value, torch.Tensor) and value.grad_fn is not None]
    seen = dict.fromkeys(roots)
    queue = deque(seen)
    while queue:
        for function, _index in queue.popleft().next_functions:
            if function is not None and function not in seen:
                seen[function] = None
                queue.append(function)
    return list(seen)
