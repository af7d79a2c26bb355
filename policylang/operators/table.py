"""The operators that move elements, one entry each: how its arguments are read, and which move of them it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from attrs import frozen

from policylang.operators.group_moves import AllReduce, Gather, GroupMove, Scatter
from policylang.operators.moves import (
    Alias,
    Clone,
    Cut,
    Expand,
    Flatten,
    Join,
    Move,
    Pad,
    Permute,
    Pick,
    Split,
    Squeeze,
    Unsqueeze,
    View,
)
from policylang.operators.names import ALL_REDUCE, GATHER, GETITEM, SCATTER, WAIT, Category
from policylang.operators.strides import Lengths

_ROW_MAJOR = "contiguous_format"
A_VIEW, VIEWS = Category.VIEW, Category.VIEW | Category.MULTI_OUTPUT


@frozen
class Mover:
    """An operator that moves elements."""

    kind: type[Move]
    read: Callable[..., Move]
    """From the shape of the result and the arguments after the first."""
    categories: int = 0
    """As its schema says it."""
    defaults: tuple[Any, ...] = ()
    """Of the arguments after the first, those without a default None; plain, as in ``Facts.arguments``."""

    def completed(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a call that leaves out defaults at the end."""
        return arguments + self.defaults[len(arguments) - 1 :]


def move_of(target: str, arguments: tuple[Any, ...], shape: Lengths | None) -> Move:
    """What a call does with elements: its arguments, the tensors among them, and the shape of what it returns."""
    return _read(target, arguments[1:], shape)


@lru_cache(maxsize=4096)
def _read(target: str, arguments: tuple[Any, ...], shape: Lengths | None) -> Move:
    mover = MOVERS.get(target)
    if mover is None or (shape is None and issubclass(mover.kind, View | Permute)):
        return Move()
    return mover.read(shape, *arguments)


def _view(shape: Lengths, *_: Any) -> Move:
    return View(shape)


def _reshape(shape: Lengths, *_: Any) -> Move:
    return View(shape, copy=True)


def _movedim(shape: Lengths, sources: Any, destinations: Any) -> Move:
    rank = len(shape)
    froms, tos = (
        [dim % rank for dim in (dims if isinstance(dims, tuple) else (dims,))] for dims in (sources, destinations)
    )
    moved = dict(zip(tos, froms, strict=True))
    free = iter([dim for dim in range(rank) if dim not in froms])
    return Permute(tuple([moved[dim] if dim in moved else next(free) for dim in range(rank)]))


def _transpose(shape: Lengths, one: int, other: int) -> Move:
    dims = list(range(len(shape)))
    dims[one], dims[other] = dims[other], dims[one]
    return Permute(tuple(dims))


def _split(_: Any, size: Any, dim: int = 0) -> Move:
    return Split(dim, size)


def _alias(*_: Any) -> Move:
    return Alias()


_ALIAS = Mover(Alias, _alias, A_VIEW)
_MOVEDIM = Mover(Permute, _movedim, A_VIEW)
_SPLIT = Mover(Split, _split, VIEWS, (None, 0))
_SQUEEZE = Mover(Squeeze, lambda shape, *_: Squeeze(shape), A_VIEW)
_UNKNOWN = Mover(Move, lambda *_: Move(), A_VIEW)

MOVERS: dict[str, Mover] = {
    GATHER: Mover(Gather, lambda _, ranks, group: Gather(ranks), Category.COLLECTIVE),
    SCATTER: Mover(Scatter, lambda _, how, ranks, group: Scatter(ranks, how), Category.COLLECTIVE),
    ALL_REDUCE: Mover(AllReduce, lambda _, how, group: AllReduce(0, how), Category.COLLECTIVE),
    WAIT: Mover(Alias, _alias),
    "aten._reshape_alias.default": _UNKNOWN,
    "aten._to_copy.default": Mover(
        Clone, lambda _, *options: Clone(options[-1], cast=True), defaults=(None, None, None, None, False, None)
    ),
    "aten._unsafe_view.default": Mover(View, _view),
    "aten.alias.default": _ALIAS,
    "aten.cat.default": Mover(Join, lambda _, dim=0: Join(dim), defaults=(0,)),
    "aten.chunk.default": Mover(Split, lambda _, count, dim=0: Split(dim, count=count), VIEWS, (None, 0)),
    "aten.clone.default": Mover(Clone, lambda _, memory_format=None: Clone(memory_format), defaults=(None,)),
    "aten.constant_pad_nd.default": Mover(Pad, lambda _, pads, *__: Pad(changes=any(pads)), defaults=(None, 0)),
    "aten.contiguous.default": Mover(
        Clone,
        lambda _, memory_format=0: Clone(_ROW_MAJOR, where_needed=True) if memory_format in (0, _ROW_MAJOR) else Move(),
        A_VIEW,
        (0,),
    ),
    "aten.detach.default": _ALIAS,
    "aten.expand.default": Mover(Expand, lambda shape, *_: Expand(shape), A_VIEW, (None, False)),
    "aten.flatten.using_ints": Mover(Flatten, lambda shape, *_: Flatten(shape, copy=True), A_VIEW, (0, -1)),
    "aten.lift_fresh.default": _ALIAS,
    "aten.movedim.int": _MOVEDIM,
    "aten.movedim.intlist": _MOVEDIM,
    "aten.narrow.default": Mover(Cut, lambda _, dim, start, length: Cut(dim, start, length=length), A_VIEW),
    "aten.permute.default": Mover(
        Permute, lambda shape, dims: Permute(tuple([dim % len(shape) for dim in dims])), A_VIEW
    ),
    "aten.reshape.default": Mover(View, _reshape, A_VIEW),
    "aten.select.int": Mover(Cut, lambda _, dim, at: Cut(dim, at, length=1, drops=True), A_VIEW),
    "aten.slice.Tensor": Mover(
        Cut, lambda _, dim=0, start=None, stop=None, step=1: Cut(dim, start, stop, step), A_VIEW, (0, None, None, 1)
    ),
    "aten.split.Tensor": _SPLIT,
    "aten.split.sizes": _SPLIT,
    "aten.split_with_sizes.default": _SPLIT,
    "aten.squeeze.default": _SQUEEZE,
    "aten.squeeze.dim": _SQUEEZE,
    "aten.squeeze.dims": _SQUEEZE,
    "aten.stack.default": Mover(Join, lambda _, dim=0: Join(dim, stacked=True), defaults=(0,)),
    "aten.t.default": Mover(Permute, lambda shape: Permute(tuple(range(len(shape)))[::-1]), A_VIEW),
    "aten.transpose.int": Mover(Permute, _transpose, A_VIEW),
    "aten.unbind.int": Mover(Split, lambda _, dim=0: Split(dim, 1, drops=True), VIEWS, (0,)),
    "aten.unflatten.int": Mover(View, _view, A_VIEW),
    "aten.unsqueeze.default": Mover(Unsqueeze, lambda shape, dim: Unsqueeze(shape, dim=dim), A_VIEW),
    "aten.view.default": Mover(View, _view, A_VIEW),
    "aten.view.dtype": _UNKNOWN,
    GETITEM: Mover(Pick, lambda _, index: Pick(index)),
    "prims.convert_element_type.default": Mover(Clone, lambda *_: Clone(cast=True)),
}


@cache
def movers_of(*kinds: type[Move]) -> frozenset[str]:
    """The operators that are moves of one of these kinds."""
    return frozenset(name for name, mover in MOVERS.items() if issubclass(mover.kind, kinds))


SPLITS = movers_of(Split)
JOINS = movers_of(Join)
PASSING = frozenset(MOVERS) - JOINS - movers_of(GroupMove)
"""Operators of one tensor through which a chain is followed, whether or not it can then be rewritten."""
