"""Reads the arguments of layout operators and collectives, which rewriting chains of them needs.

Other operators' arguments are not kept: planning does not ask for them, and a million nodes would pay for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from policylang.graph.facts import Flag, Ref
from policylang.operators.categories import OperatorInfo, parameters
from policylang.operators.names import WAITS
from policylang.operators.table import MOVERS
from policylang.torch_compat.graphs import name_of_group

_COLLECTIVE = int(Flag.COLLECTIVE)
_KEPT = WAITS | MOVERS.keys()
_NOTHING: tuple[Any, ...] = ()


def argument_column(
    nodes: Sequence[fx.Node], operators: Sequence[OperatorInfo], row_of: Mapping[fx.Node, int]
) -> list[tuple[Any, ...]]:
    """``Facts.arguments``."""
    column = [_NOTHING] * len(nodes)
    for row, node in enumerate(nodes):
        if node.op == "call_function" and _is_kept(operators[row]) and (schema := parameters(node.target)) is not None:
            column[row] = _plain_tuple(_in_order(node, schema), row_of)
    return column


def _is_kept(operator: OperatorInfo) -> bool:
    return operator.name in _KEPT or bool(operator.flags & _COLLECTIVE)


def _in_order(node: fx.Node, schema: Sequence[tuple[str, Any]]) -> Sequence[Any]:
    args, kwargs = node.args, node.kwargs
    if len(args) == len(schema):
        return tuple(args)
    return [*args, *[kwargs.get(name, default) for name, default in schema[len(args) :]]]


def _plain_tuple(values: Sequence[Any], row_of: Mapping[fx.Node, int]) -> tuple[Any, ...]:
    return tuple([value if type(value) is int else _plain(value, row_of) for value in values])


def _plain(value: Any, row_of: Mapping[fx.Node, int]) -> Any:
    """A value that needs no torch to read; what has no plain form becomes its text."""
    if isinstance(value, fx.Node):
        return Ref(row_of[value])
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return _plain_tuple(value, row_of)
    return name_of_group(value) or str(value).removeprefix("torch.")
