"""What a step writes to has to be its own, and the graph's only way to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, fx

from policylang.torch_compat.reading import OpOverload, schema_of
from policylang.tracing.problems import ALIASED_MUTATION, OUTSIDE_WRITE, UNTRACEABLE, problem


def check_writes(
    graph: fx.Graph,
    plain: Sequence[Tensor],
    mutated: Sequence[int],
    outgrown: Sequence[tuple[int, str]],
    buffers: Collection[str],
) -> None:
    """Raises PolicyGraphError where a second run of the graph would not see what a second eager step sees.

    Args:
        mutated: positions of the inputs that the graph writes.
        outgrown: positions and names of the inputs that the forward replaces by something of another kind.
    """
    _refuse_outside_writes(graph)
    _refuse_outgrown(graph, outgrown, buffers)
    _refuse_aliased(plain, mutated)


def _refuse_outside_writes(graph: fx.Graph) -> None:
    """A functional trace writes to its inputs, at its end; any other write is to a tensor that the trace ran into."""
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, OpOverload) or not schema_of(target).is_mutable:
            continue
        if target is torch.ops.aten.copy_.default and node.args[0].op == "placeholder":
            continue
        raise problem(
            OUTSIDE_WRITE,
            f"the step writes (`{target}`) to a tensor that is no parameter, buffer, attribute or input",
            help="register it as a buffer of the model, or pass it as an input; tracing may have changed it once",
        )


def _refuse_outgrown(graph: fx.Graph, outgrown: Sequence[tuple[int, str]], buffers: Collection[str]) -> None:
    """A plain attribute that the forward replaces and the loss does not depend on is a note to the reader, of any
    shape."""
    inputs = graph.find_nodes(op="placeholder")
    for position, name in outgrown:
        if name in buffers or inputs[position].users:
            raise problem(
                UNTRACEABLE,
                f"the forward replaces `{name}` by a tensor of another shape or type",
                help="write to it in place (`self.buffer.copy_(...)`), or keep it outside the traced step",
            )


def _refuse_aliased(plain: Sequence[Tensor], mutated: Sequence[int]) -> None:
    """A write to one of two inputs that share memory is not seen by a read of the other in the graph."""
    if not mutated:
        return
    owners = Counter(_memory(value) for value in plain)
    if any(owners[_memory(plain[position])] > 1 and _memory(plain[position]) for position in mutated):
        raise problem(
            ALIASED_MUTATION,
            "the step writes to a buffer or input that shares its memory with another one",
            help="give each its own memory (`.clone()`), or share one buffer under two names",
        )


def _memory(value: Tensor) -> int:
    try:
        return int(value.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # fake and meta tensors have none
        return 0
