"""Tensors made of tensors (DTensor) taken apart into the plain ones a graph is made of, and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import frozen

from policylang.torch_compat.tracing import is_wrapper_subclass


@frozen(eq=False)
class SubclassLayout:
    """How a tensor is made of plain ones; ``parts`` is None for a plain one."""

    kind: type | None = None
    context: Any = None
    parts: tuple[tuple[str, SubclassLayout], ...] | None = None
    fixed: tuple[tuple[str, Any], ...] = ()
    """What it holds that is no tensor: a DTensor's device mesh. Such things are no inputs of a graph."""
    size: Any = None
    stride: Any = None

    @property
    def size_in_parts(self) -> int:
        return 1 if self.parts is None else sum(part.size_in_parts for _, part in self.parts)


PLAIN = SubclassLayout()


def take_apart(values: Sequence[Any]) -> tuple[list[Any], list[SubclassLayout]]:
    """The plain values, in order, and one layout a value."""
    plain: list[Any] = []
    return plain, [_take_apart(value, plain) for value in values]


def _take_apart(value: Any, plain: list[Any]) -> SubclassLayout:
    if type(value) in (torch.Tensor, torch.nn.Parameter) or not is_wrapper_subclass(value):
        plain.append(value)
        return PLAIN
    names, context = value.__tensor_flatten__()
    inner = [(name, getattr(value, name)) for name in names]
    parts = tuple((name, _take_apart(part, plain)) for name, part in inner if isinstance(part, torch.Tensor))
    fixed = tuple((name, part) for name, part in inner if not isinstance(part, torch.Tensor))
    return SubclassLayout(type(value), context, parts, fixed, value.size(), value.stride())


def put_together(plain: Sequence[Any], layouts: Sequence[SubclassLayout]) -> list[Any]:
    """The inverse of :func:`take_apart`."""
    left = iter(plain)
    return [_put_together(left, layout) for layout in layouts]


def _put_together(plain: Iterator[Any], layout: SubclassLayout) -> Any:
    if layout.parts is None:
        return next(plain)
    inner = dict(layout.fixed)
    inner.update((name, _put_together(plain, part)) for name, part in layout.parts)
    return layout.kind.__tensor_unflatten__(inner, layout.context, layout.size, layout.stride)  # type: ignore[union-attr]
