"""Floating-point operations of a call, from torch's own formulas (``torch.utils.flop_counter``) and a few it lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry, shape_wrapper

from policylang.torch_compat.graphs import hint, hinted_shape, value_of

Formula = Callable[..., Any]


@cache
def formula_for(target: Any) -> Formula | None:
    """What counts the operations of an operator; None where there is no formula, and the count is 0."""
    operator = getattr(target, "overloadpacket", target)
    formula: Formula | None = flop_registry.get(operator)
    if formula is None:
        name = getattr(operator, "__name__", "")
        formula = _OWN.get(name) or flop_registry.get(getattr(torch.ops.aten, _LIKE.get(name, ""), None))
    return formula


def _grouped_product(left: Sequence[int], right: Sequence[int], *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Groups are cut from rows, columns or the inner dimension, or are matrices of their own in both."""
    if len(left) > len(right):  # each column of `right` meets one matrix of `left`
        left = left[1:]
    return 2 * prod(left) * right[-1]


def _einsum(equation: str, operands: Sequence[Sequence[int]], *_: Any, **__: Any) -> int:
    """Two operations for each choice of all indices: a product of matrices in one step, as autograd writes them."""
    indices = equation.replace(" ", "").partition("->")[0].split(",")
    sizes = {
        letter: size
        for letters, shape in zip(indices, operands, strict=True)
        for letter, size in zip(letters, shape, strict=True)
    }
    return 2 * prod(sizes.values()) if len(operands) == 2 else 0


_GROUPED = dict.fromkeys(
    ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), shape_wrapper(_grouped_product)
)
_OWN = {**_GROUPED, "einsum": shape_wrapper(_einsum)}
_SDPA = "_scaled_dot_product_flash_attention"
_LIKE = {
    f"{_SDPA}_for_cpu": _SDPA,  # torch counts it from 2.15
    f"{_SDPA}_for_cpu_backward": f"{_SDPA}_backward",
    "_scaled_dot_product_fused_attention_overrideable": _SDPA,
    "_scaled_dot_product_fused_attention_overrideable_backward": f"{_SDPA}_backward",
    "flex_attention": _SDPA,  # torch counts it from 2.12
}
"""Attention that does the work of another operator, with query, key and value in the same places."""


def count(formula: Formula, node: fx.Node) -> int:
    """The operations of one call; symbolic sizes count with their hint.

    Most formulas work on shapes, behind a wrapper that looks through every argument for tensors; handed the shapes, the
    wrapped function itself is many times faster and cannot add guards on symbolic sizes. The others take tensors.
    """
    on_shapes = getattr(formula, "__wrapped__", None)
    value = value_of(node.meta)
    try:
        read = _fake if on_shapes is None else _shape
        args, out, kwargs = (_mapped(each, read) for each in (node.args, value, node.kwargs))
        if on_shapes is None:
            return hint(formula(*args, out_val=out, **kwargs))
        return hint(on_shapes(*args, out_shape=out, **kwargs))
    except Exception:  # a formula that cannot deal with a call, such as one whose work depends on the data
        return 0


def _mapped(argument: Any, tensor: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(argument, fx.Node):
        return _mapped(value_of(argument.meta), tensor)
    if isinstance(argument, torch.Tensor):
        return tensor(argument)
    if isinstance(argument, (tuple, list)):
        return [_mapped(part, tensor) for part in argument]
    if isinstance(argument, dict):
        return {name: _mapped(part, tensor) for name, part in argument.items()}
    return hint(argument) if isinstance(argument, torch.SymInt) else argument


def _shape(tensor: torch.Tensor) -> torch.Size:
    return hinted_shape(tensor.shape)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(hinted_shape(tensor.shape), dtype=tensor.dtype, device="meta")
