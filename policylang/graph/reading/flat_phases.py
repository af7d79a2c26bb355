"""Tells forward from backward in a flat graph: from what its tracer said, else from the data flow.

Tracers say more or less of it. ``policylang.trace_step`` says of every node where it lies. An annotation
around ``torch.autograd.grad`` says it of what was made inside, which is all of the backward but the sums of gradients
afterwards. Torch's own mark (``autograd_backward``) is set by hooks and also stays on derivatives that are part of a
forward: a Jacobian, a gradient penalty. And plain ``make_fx`` says nothing.

What every flat graph has is where its backwards begin: the ones that autograd makes for the gradient of a scalar with
respect to itself. Whatever such a scalar is computed from is forward, a Jacobian included. Whatever is computed from
the ones, and is not needed for another such scalar, is backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from policylang.graph import marks
from policylang.graph.facts import Phase

_SAID = {marks.FORWARD: Phase.FORWARD, marks.BACKWARD: Phase.BACKWARD, marks.EPILOGUE: Phase.OUTPUT}


def said_phase(meta: dict[str, Any]) -> int:
    """The phase that a node's tracer, or the user, states; 0 where nobody does.

    ``phase`` is what PyTorch's own pass for flat graphs looks for, under ``remat_pass_tag`` in 2.11.
    """
    found = marks.custom(meta)
    if not found:
        return 0
    if marks.RECOMPUTED in found:
        return Phase.BACKWARD  # whatever it has from the forward node that it repeats
    said = _SAID.get(found.get(marks.PHASE, ""))
    if said is not None:
        return said
    return Phase.BACKWARD if found.get("phase") == "backward" or found.get("remat_pass_tag") == "is_backward" else 0


def is_seed(node: fx.Node) -> bool:
    """Whether a node is the gradient of a scalar with respect to itself, as ``torch.autograd`` makes it: a backward
    begins there.

    It asks for a memory format by name, which nobody who writes ``ones_like(loss)`` does.
    """
    if node.target is not torch.ops.aten.ones_like.default:
        return False
    if node.kwargs.get("memory_format") is not torch.preserve_format:
        return False
    shape = getattr(node.meta.get("val"), "shape", ())
    return all(isinstance(size, int) for size in shape) and math.prod(shape) == 1


def flat_phases(
    ops: Sequence[str],
    inputs: Sequence[tuple[int, ...]],
    said: Sequence[int],
    hooked: Sequence[int],
    seeds: Sequence[int],
) -> bytearray:
    """The phase of every row. O(nodes + edges).

    Args:
        said: :func:`said_phase` of each row, which is final.
        hooked: whether torch's hooks marked a row as backward.
        seeds: the rows where a backward begins, ascending.
    """
    needed = _needed_for_losses(inputs, seeds)
    late = bytearray(len(ops))  # backward, or depends on it
    for row in seeds:
        late[row] = not needed[row]
    phases = bytearray(len(ops))
    for row, op in enumerate(ops):
        if op == "placeholder" or op == "get_attr":
            phases[row] = Phase.INPUT
        elif op == "output":
            phases[row] = Phase.OUTPUT
        elif said[row]:
            phases[row] = said[row]
            late[row] = said[row] == Phase.BACKWARD
        elif needed[row]:
            phases[row] = Phase.FORWARD
        else:
            late[row] = late[row] or hooked[row] or any(late[read] for read in inputs[row])
            phases[row] = Phase.BACKWARD if late[row] else Phase.FORWARD
    if not any(said) and not any(hooked):
        _claim_for_backward(phases, inputs, needed, seeds)
    return phases


def _needed_for_losses(inputs: Sequence[tuple[int, ...]], seeds: Sequence[int]) -> bytearray:
    """What the scalars that are differentiated are computed from, themselves included."""
    needed = bytearray(len(inputs))
    if not seeds:
        return needed
    for row in seeds:
        for read in inputs[row]:
            needed[read] = 1
    for row in range(seeds[-1], -1, -1):
        if needed[row]:
            for read in inputs[row]:
                needed[read] = 1
    return needed


def _claim_for_backward(
    phases: bytearray, inputs: Sequence[tuple[int, ...]], needed: bytearray, seeds: Sequence[int]
) -> None:
    """Make backward what comes after the first seed and only the backward reads: a transposed weight, a derivative's
    factor. They depend on the forward alone, so the flow from the seed does not reach them."""
    first = next((row for row in seeds if phases[row] == Phase.BACKWARD), len(phases))
    by_forward = bytearray(len(phases))
    by_backward = bytearray(len(phases))
    for row in range(len(phases) - 1, -1, -1):
        only_backward = by_backward[row] and not by_forward[row] and not needed[row]
        if phases[row] == Phase.FORWARD and row > first and only_backward:
            phases[row] = Phase.BACKWARD
        readers = by_backward if phases[row] == Phase.BACKWARD else by_forward
        for read in inputs[row]:
            readers[read] = 1
