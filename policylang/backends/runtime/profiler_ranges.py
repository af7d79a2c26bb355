"""Ranges of a profile that say who asked: the line behind what runs again, what is copied and what is fused.

Ranges are opened where a graph runs, and only while a profiler does: a node for them would be in the keys of compile
caches, in the way of fusion, and in the graph of whoever never profiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from policylang.backends.runtime import copy_operators
from policylang.graph import marks
from policylang.torch_compat.compilers import is_profiling, named_range

PREFIX = "policylang: "
_COPIES = {
    copy_operators.OFFLOAD_OP: "copy to the host",
    copy_operators.RELOAD_OP: "copy from the host",
    copy_operators.WAIT_OP: "wait for a copy",
}


def recomputation(source: str) -> str:
    """The name of the range around an operator that runs again. ``source``: the line, or what else decided."""
    return f"{PREFIX}recompute, {source}" if source else f"{PREFIX}recompute"


def asked_for(node: fx.Node, *, is_backward: bool = False) -> str | None:
    """The name of the range around a node; None for what the model itself does.

    ``is_backward``: in the backward half of a partition a node that a decision was taken on runs again.
    """
    found = marks.custom(node.meta)
    source = found.get(marks.PROVENANCE, "")
    if node.op != "call_function":
        return None
    if marks.MOVED in found and node.target in _COPIES:
        what = _COPIES[node.target]
        return f"{PREFIX}{what}, {source}" if source else f"{PREFIX}{what}"
    if marks.REWRITTEN in found:
        return f"{PREFIX}fused collective, {found[marks.REWRITTEN]}"
    if marks.RECOMPUTED in found or (is_backward and marks.PROVENANCE in found):
        return recomputation(source)
    return None


class _Ranged(fx.Interpreter):  # type: ignore[misc]  # torch does not say what it is
    def __init__(self, gm: fx.GraphModule, is_backward: bool) -> None:
        super().__init__(gm)
        self._is_backward = is_backward

    def run_node(self, n: fx.Node) -> Any:
        name = asked_for(n, is_backward=self._is_backward)
        if name is None:
            return super().run_node(n)
        with named_range(name):
            return super().run_node(n)


def run(gm: fx.GraphModule, arguments: Sequence[Any]) -> Any:
    """Call a graph, node by node while a profiler runs: the same operators on the same values."""
    return _Ranged(gm, False).run(*arguments) if is_profiling() else gm(*arguments)


def boxed(gm: fx.GraphModule, compiled: Callable[[list[Any]], Any], is_backward: bool) -> Callable[[list[Any]], Any]:
    """The same of a graph that AOTAutograd calls with a list, which it empties."""

    def call(arguments: list[Any]) -> Any:
        return _Ranged(gm, is_backward).boxed_run(arguments) if is_profiling() else compiled(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]  # what AOTAutograd asks for
    return call
