"""Finds the nodes that read memory which is written later: a second run would not see what the first one saw.

A functional graph writes nothing itself. What the traced program did to a buffer comes out of the graph as a new value,
which is copied into the buffer when the forward is over, by a ``copy_`` at the end of the graph or by the runtime.
Every read of that buffer, through views or not, sees the old value in the forward and the new one in the backward.
In a graph that is not functional a read is safe to repeat only if nothing writes to its memory after it, and what
makes memory only if nothing writes there: the writing is not repeated with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from policylang.operators.categories import OperatorInfo, argument, nodes_in
from policylang.operators.effects import unread
from policylang.torch_compat.graphs import mutated_input, underlying_input


def mutated_reads(
    nodes: Sequence[fx.Node],
    operators: Sequence[OperatorInfo],
    roots: Sequence[int],
    row_of: Mapping[fx.Node, int],
    output_descs: Sequence[Any],
) -> list[int]:
    """The rows that read memory which is written after them, and those that make it.

    Args:
        roots: row to the row whose memory its value lies in, itself where it makes its own.
        output_descs: descriptor of each value that the graph returns.
    """
    last_write = _last_writes(nodes, operators, roots, row_of)
    end = len(nodes)
    for row in _written_by_runtime(nodes, output_descs):
        last_write[roots[row]] = end
    if not last_write:
        return []
    found = []
    for row, node in enumerate(nodes):
        if node.op != "call_function":
            continue
        if roots[row] == row and last_write.get(row, -1) > row:  # a second run would give it as it was before
            found.append(row)
            continue
        for read in node.all_input_nodes:
            if last_write.get(roots[row_of[read]], -1) > row and read not in unread(node, operators[row]):
                found.append(row)
                break
    return found


def _last_writes(
    nodes: Sequence[fx.Node], operators: Sequence[OperatorInfo], roots: Sequence[int], row_of: Mapping[fx.Node, int]
) -> dict[int, int]:
    """Of each memory that an operator of the graph writes, the last row that does."""
    last: dict[int, int] = {}
    for row, operator in enumerate(operators):
        if operator.written:
            for target in nodes_in(argument(nodes[row], operator.written)):
                last[roots[row_of[target]]] = row
    return last


def _written_by_runtime(nodes: Sequence[fx.Node], output_descs: Sequence[Any]) -> list[int]:
    """The rows of the graph inputs that a returned value is copied into when the graph has run."""
    targets = [target for desc in output_descs if desc is not None and (target := mutated_input(desc)) is not None]
    if not targets:
        return []
    placeholders: dict[Any, list[int]] = {}
    for row, node in enumerate(nodes):
        if node.op == "placeholder" and (desc := node.meta.get("desc")) is not None:
            placeholders.setdefault(underlying_input(desc), []).append(row)
    return [row for target in targets for row in placeholders.get(underlying_input(target), ())]
