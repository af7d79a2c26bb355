"""The stream of operators of a block, below autograd, where torch's own selective checkpoint sees it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from attrs import define, field, frozen
from torch import fx

from policylang._torch_eager import DispatchMode, graph_being_traced, ignored_operators

IGNORED = ignored_operators()


@frozen(eq=False)
class Step:
    """One operator of a stream."""

    operator: Any
    nodes: tuple[fx.Node, ...]
    """What it became in the graph; empty where nobody reads what it gives."""


@define(eq=False)
class Stream:
    """What :class:`StreamMode` has seen so far."""

    steps: list[Step] = field(factory=list)
    reach: int = 0
    """How many operators had run when the last value was left for the backward: a checkpoint runs so many again."""

    def left_for_backward(self, value: Any) -> Any:
        """To be called for each value that autograd keeps."""
        self.reach = len(self.steps)
        return value


class StreamMode(DispatchMode):  # type: ignore[misc]  # torch does not say what it is
    """Notes every operator and the nodes that a trace makes of it."""

    supports_higher_order_operators = True

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in IGNORED:
            return func(*args, **kwargs)
        graph = graph_being_traced()
        before = 0 if graph is None else len(graph.nodes)
        out = func(*args, **kwargs)
        made = [] if graph is None else list(islice(reversed(graph.nodes), len(graph.nodes) - before))
        self._stream.steps.append(Step(func, tuple(reversed(made))))
        return out
