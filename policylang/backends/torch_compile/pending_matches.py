"""Wraps a compiled graph so that rules that match in none of a model's graphs are an error at its first backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from policylang.backends.compiled_graphs import CompiledGraph


def watched(
    compiled: Callable[..., Any], graph: CompiledGraph, is_answered: Callable[[], bool], check: Callable[[], None]
) -> Callable[..., Any]:
    """``compiled``, with ``check`` called when the first backward through it starts, unless it ``is_answered`` by then.

    By then every graph of the forward has been compiled: that is the earliest moment at which "matches nothing" is
    known, and the last at which the user has lost nothing but one forward. Where no output leads to a backward,
    ``check`` is called at the second call instead.
    """
    unhooked = False

    def call(*arguments: Any) -> Any:
        nonlocal unhooked
        graph.note_call(arguments)
        if is_answered():
            return compiled(*arguments)
        if unhooked:
            check()
        outputs = compiled(*arguments)
        if not is_answered():
            unhooked = not _before_backward(outputs, check)
        return outputs

    return call


def _before_backward(outputs: Iterable[Any], check: Callable[[], None]) -> bool:
    """Call ``check`` when a gradient reaches one of the outputs; False where none can."""
    functions = dict.fromkeys(
        output.grad_fn for output in outputs if isinstance(output, torch.Tensor) and output.grad_fn is not None
    )
    for function in functions:
        function.register_prehook(lambda gradients: check())
    return bool(functions)
