"""The arguments of layout operators and collectives: what a plan that rewrites chains of them has to know.

Other operators' arguments are not kept: planning does not ask for them, and a million nodes would pay for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import fx

from policylang.graph.facts import Flag, Ref
from policylang.operators.categories import GETITEM, WAITS, describe
from policylang.torch_compat.reading import OpOverload, name_of_group, schema_of

_LAYOUT = frozenset(
    {
        "_reshape_alias.default", "_to_copy.default", "_unsafe_view.default", "alias.default", "cat.default",
        "chunk.default", "clone.default", "constant_pad_nd.default", "contiguous.default", "detach.default",
        "expand.default", "flatten.using_ints", "lift_fresh.default", "movedim.int", "movedim.intlist",
        "narrow.default", "permute.default", "reshape.default", "select.int", "slice.Tensor", "split.Tensor",
        "split.sizes", "split_with_sizes.default", "squeeze.default", "squeeze.dim", "squeeze.dims", "stack.default",
        "t.default", "transpose.int", "unbind.int", "unflatten.int", "unsqueeze.default", "view.default", "view.dtype",
    }
)  # fmt: skip
_NOTHING: tuple[Any, ...] = ()

Schema = tuple[tuple[str, Any], ...]
"""Every argument's name and default value."""


def argument_column(nodes: Sequence[fx.Node], row_of: Mapping[fx.Node, int]) -> list[tuple[Any, ...]]:
    """``Facts.arguments``."""
    column = [_NOTHING] * len(nodes)
    for row, node in enumerate(nodes):
        if node.op == "call_function" and (schema := _schema(node.target)) is not None:
            column[row] = _plain_tuple(_in_order(node, schema), row_of)
    return column


@cache
def _schema(target: Any) -> Schema | None:
    """The arguments of an operator whose calls' arguments are kept."""
    operator = describe(target)
    if operator.name == GETITEM:
        return (("a", None), ("b", None))
    if not isinstance(target, OpOverload):
        return None
    namespace, _, rest = operator.name.partition(".")
    wanted = operator.flags & Flag.COLLECTIVE or operator.name in WAITS or (namespace == "aten" and rest in _LAYOUT)
    if wanted or operator.name == "prims.convert_element_type.default":
        return tuple((given.name, given.default_value) for given in schema_of(target).arguments)
    return None


def _in_order(node: fx.Node, schema: Schema) -> Sequence[Any]:
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
