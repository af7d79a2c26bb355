"""Every operator of the table against torch: values, strides, layout, categories and defaults."""

from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # defines the operators
from hypothesis import strategies as st

from policylang.operators import layouts
from policylang.operators.calls import describe, parameters
from policylang.operators.names import ALL_REDUCE, FOLLOWERS, GATHER, GETITEM, SCATTER, WAIT
from tests.support.drawn import drawn

Draw = Callable[[st.DataObject, torch.Tensor], tuple[Any, ...]]
"""The arguments of a call after the tensor."""


def dim_of(data: st.DataObject, tensor: torch.Tensor, *, more: int = 0) -> int:
    count = tensor.ndim + more
    return data.draw(st.integers(-count, count - 1))


def a_view(data: st.DataObject, tensor: torch.Tensor) -> tuple[Any, ...]:
    count = tensor.numel()
    one = data.draw(st.sampled_from([each for each in range(1, count + 1) if count % each == 0]))
    return (data.draw(st.sampled_from([[count], [one, count // one], list(tensor.shape)])),)


def a_slice(data: st.DataObject, tensor: torch.Tensor) -> tuple[Any, ...]:
    dim = dim_of(data, tensor)
    bound = st.none() | st.integers(-7, 7) | st.just(2**63 - 1)
    return dim, data.draw(bound), data.draw(bound), data.draw(st.integers(1, 3))


def a_narrow(data: st.DataObject, tensor: torch.Tensor) -> tuple[Any, ...]:
    dim = dim_of(data, tensor)
    start = data.draw(st.integers(-tensor.shape[dim], tensor.shape[dim] - 1))
    return dim, start, data.draw(st.integers(0, tensor.shape[dim] - start % tensor.shape[dim]))


def a_select(data: st.DataObject, tensor: torch.Tensor) -> tuple[Any, ...]:
    dim = dim_of(data, tensor)
    return dim, data.draw(st.integers(-tensor.shape[dim], tensor.shape[dim] - 1))


def sizes(data: st.DataObject, tensor: torch.Tensor) -> tuple[Any, ...]:
    dim = dim_of(data, tensor)
    first = data.draw(st.integers(0, tensor.shape[dim]))
    return [first, tensor.shape[dim] - first], dim


def some_of(data: st.DataObject, tensor: torch.Tensor, count: int | None = None) -> list[int]:
    dims = data.draw(st.permutations(range(tensor.ndim)))[: count if count is not None else dim_of(data, tensor)]
    return [dim - tensor.ndim if data.draw(st.booleans()) else dim for dim in dims]


def two_lists(data: st.DataObject, tensor: torch.Tensor) -> tuple[Any, ...]:
    count = data.draw(st.integers(0, tensor.ndim))
    return some_of(data, tensor, count), some_of(data, tensor, count)


def a_format(data: st.DataObject, _: torch.Tensor) -> tuple[Any, ...]:
    return (data.draw(st.sampled_from([None, torch.contiguous_format, torch.preserve_format])),)


def factors_of(data: st.DataObject, tensor: torch.Tensor) -> tuple[Any, ...]:
    dim = dim_of(data, tensor)
    length = tensor.shape[dim]
    first = data.draw(st.sampled_from([each for each in range(1, length + 1) if length % each == 0]))
    return dim, [first, length // first]


def a_flattening(data: st.DataObject, tensor: torch.Tensor) -> tuple[Any, ...]:
    first, last = sorted((dim_of(data, tensor) % tensor.ndim, dim_of(data, tensor) % tensor.ndim))
    return first, last


def pads(data: st.DataObject, _: torch.Tensor) -> tuple[Any, ...]:
    return data.draw(st.sampled_from([[0, 0], [1, 0], [1, -1], [0, -1]])), 7


def expanded(data: st.DataObject, tensor: torch.Tensor) -> tuple[Any, ...]:
    more = [3 if length == 1 and data.draw(st.booleans()) else length for length in tensor.shape]
    return (data.draw(st.sampled_from([more, [1, *more]])), False)


nothing: Draw = lambda data, tensor: ()  # noqa: E731
a_dim: Draw = lambda data, tensor: (dim_of(data, tensor),)  # noqa: E731
ARGUMENTS: dict[str, Draw] = {
    WAIT: nothing, "aten._reshape_alias.default": lambda data, tensor: (list(tensor.shape), list(tensor.stride())),
    "aten._to_copy.default": lambda data, tensor: (None, None, None, None, False, *a_format(data, tensor)),
    "aten._unsafe_view.default": a_view, "aten.alias.default": nothing, "aten.cat.default": a_dim,
    "aten.chunk.default": lambda data, tensor: (data.draw(st.integers(1, 5)), dim_of(data, tensor)),
    "aten.clone.default": a_format, "aten.constant_pad_nd.default": pads, "aten.contiguous.default": nothing,
    "aten.detach.default": nothing, "aten.expand.default": expanded, "aten.flatten.using_ints": a_flattening,
    "aten.lift_fresh.default": nothing,
    "aten.movedim.int": lambda data, tensor: (dim_of(data, tensor), dim_of(data, tensor)),
    "aten.movedim.intlist": two_lists, "aten.narrow.default": a_narrow,
    "aten.permute.default": lambda data, tensor: (some_of(data, tensor, tensor.ndim),), "aten.reshape.default": a_view,
    "aten.select.int": a_select, "aten.slice.Tensor": a_slice,
    "aten.split.Tensor": lambda data, tensor: (data.draw(st.integers(1, 4)), dim_of(data, tensor)),
    "aten.split.sizes": sizes, "aten.split_with_sizes.default": sizes, "aten.squeeze.default": nothing,
    "aten.squeeze.dim": a_dim,
    "aten.squeeze.dims": lambda data, tensor: (some_of(data, tensor, data.draw(st.integers(0, tensor.ndim))),),
    "aten.stack.default": lambda data, tensor: (dim_of(data, tensor, more=1),), "aten.t.default": nothing,
    "aten.transpose.int": lambda data, tensor: (dim_of(data, tensor), dim_of(data, tensor)), "aten.unbind.int": a_dim,
    "aten.unflatten.int": factors_of, "aten.unsqueeze.default": lambda data, tensor: (dim_of(data, tensor, more=1),),
    "aten.view.default": a_view, "aten.view.dtype": lambda data, tensor: (torch.float64,),
    "prims.convert_element_type.default": lambda data, tensor: (torch.int64,),
}  # fmt: skip
CALLED = sorted(set(layouts.MOVERS) - {ALL_REDUCE, GATHER, SCATTER, GETITEM})


def operator_of(name: str) -> Any:
    found = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def plain(value: Any) -> Any:
    """As :attr:`Facts.arguments` has it."""
    if isinstance(value, (list, tuple)):
        return tuple(map(plain, value))
    return value if value is None or isinstance(value, (bool, int)) else str(value).removeprefix("torch.")


def ours(tensor: torch.Tensor) -> layouts.Tensor:
    storage = list(range(tensor.untyped_storage().nbytes() // 8))
    return layouts.Tensor(storage, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


@st.composite
def tensors(draw: st.DrawFn, most: int = 3) -> torch.Tensor:
    """Numbered by place in memory; dense or not, in any order of dimensions."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=most))
    tensor = torch.arange(prod(shape) * 2).reshape(*shape, 2)
    tensor = tensor[..., draw(st.integers(0, 1))] if draw(st.booleans()) else torch.arange(prod(shape)).reshape(shape)
    return tensor.permute(draw(st.permutations(range(len(shape)))))


def called(name: str, data: st.DataObject) -> tuple[torch.Tensor, list[torch.Tensor], Any, layouts.Move]:
    """What a call of the operator reads, what torch makes of it (None where it refuses), and what the table says."""
    tensor = data.draw(tensors(most=2 if name == "aten.t.default" else 3))
    arguments = ARGUMENTS[name](data, tensor)
    target = operator_of(name)
    joins = layouts.MOVERS[name].kind is layouts.Join
    read = [tensor, tensor.clone() + 100] if joins else [tensor]
    given = {"memory_format": arguments[-1]} if name in ("aten.clone.default", "aten._to_copy.default") else None
    try:
        args = () if given else arguments
        result = read[0] if name == WAIT else target(read if joins else tensor, *args, **(given or {}))
    except RuntimeError:
        result = None
    shape = tuple(result.shape) if isinstance(result, torch.Tensor) else None
    if result is None and name in ("aten.view.default", "aten._unsafe_view.default"):
        shape = tuple(arguments[0])
    return tensor, read, result, layouts.move_of(name, (None, *map(plain, arguments)), shape)


@pytest.mark.parametrize("name", CALLED)
@drawn(20, 500, data=st.data())
def test_values_and_strides_are_torchs(name: str, data: st.DataObject) -> None:
    tensor, read, result, move = called(name, data)
    shape, stride = tuple(tensor.shape), tensor.stride()
    if type(move) is layouts.Move:
        assert name in ("aten._reshape_alias.default", "aten.view.dtype") or result is None
        return
    try:
        if isinstance(move, layouts.Join):
            parts = [
                layouts.Tensor(each.flatten().tolist(), shape, layouts.Tensor.fresh((), shape).stride) for each in read
            ]
            found = move.values(parts)
        else:
            found = move.values(ours(tensor))
    except layouts.MoveError as why:
        found = str(why)
    if isinstance(found, str):  # what torch refuses, and what moves other things than elements
        assert result is None or found == {layouts.Pad: "pads", layouts.Expand: "repeats elements"}[type(move)]
        assert result is None or result.shape != tensor.shape or not torch.equal(result, tensor)
        return
    assert result is not None
    pairs = list(zip(found, result, strict=True)) if isinstance(found, tuple) else [(found, result)]
    for one, other in pairs:
        assert (one.shape, one.elements()) == (tuple(other.shape), other.flatten().tolist())
        if not isinstance(move, layouts.Clone) or not move.cast:
            assert layouts.is_contiguous(one.shape, one.stride) == other.is_contiguous()
    after = None if isinstance(found, tuple) else move.strides(shape, stride)
    assert after is None or after == result.stride()
    if (
        isinstance(result, torch.Tensor)
        and not isinstance(move, layouts.Pad | layouts.Join)
        and not getattr(move, "cast", False)
    ):
        shares = result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
        assert move.copies(shape, stride) != shares


def index_of(layout: layouts.DigitLayout, at: tuple[int, ...]) -> int:
    """The row-major index in the shard of an element of a value."""
    found = 0
    for place, digits in zip(at, layout.dims, strict=True):
        for digit in reversed(digits):
            place, here = divmod(place, digit.size)
            found += here * digit.weight if digit.origin == layouts.SHARD else 0
    return found


@pytest.mark.parametrize("name", CALLED)
@drawn(20, 500, data=st.data())
def test_layouts_say_where_elements_come_from(name: str, data: st.DataObject) -> None:
    tensor, _, result, move = called(name, data)
    try:
        found = move.layout(layouts.shard(tuple(tensor.shape)))
    except (layouts.NoDigitsError, layouts.MoveError):
        return
    if result is None or isinstance(move, layouts.Join):
        return
    values, shape = tensor.flatten().tolist(), found.shape
    for piece in [result] if isinstance(result, torch.Tensor) else result:
        if (
            move.keeps_part
            and tuple(piece.shape) != tuple(tensor.shape)
            and not isinstance(move, layouts.Cut | layouts.Split)
        ):
            continue
        assert tuple(piece.shape) == shape
        if not isinstance(move, layouts.Cut | layouts.Split):
            places = product(*map(range, shape))
            assert piece.flatten().tolist() == [values[index_of(found, at)] for at in places]


@pytest.mark.parametrize("name", sorted(layouts.MOVERS))
def test_categories_and_defaults_are_the_schemas(name: str) -> None:
    import operator

    mover = layouts.MOVERS[name]
    target = operator.getitem if name == GETITEM else operator_of(name)
    assert describe(target).name == name
    assert describe(target).flags == mover.categories
    schema = parameters(target)
    if mover.defaults:
        full = mover.completed((None,))
        assert [plain(default) for _, default in schema[1:]] == list(full[1:])
    else:
        assert all(default is None for _, default in schema[1:])


@pytest.mark.parametrize("reduction", ["sum", "avg"])
@drawn(20, 500, ranks=st.integers(1, 3), length=st.integers(1, 3), rest=st.lists(st.integers(1, 3), max_size=2))
def test_collectives_put_shards_together(reduction: str, ranks: int, length: int, rest: list[int]) -> None:
    shapes = (ranks * length, *rest)
    shards = [torch.arange(prod(shapes)).reshape(shapes) * 10**rank for rank in range(ranks)]
    read = [layouts.Tensor.fresh(each.flatten().tolist(), shapes) for each in shards]
    gathered = layouts.move_of(GATHER, (None, ranks, "group"), None).values(read)
    assert [each.elements() for each in gathered] == [torch.cat(shards).flatten().tolist()] * ranks
    total = torch.stack(shards).double()
    wanted = (total.sum(0) if reduction == "sum" else total.mean(0)).chunk(ranks)
    found = layouts.move_of(SCATTER, (None, reduction, ranks, "group"), None).values(read)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == tuple(other.shape)
        assert list(map(float, one.elements())) == pytest.approx(other.flatten().tolist())


def test_every_entry_is_called_and_followed_or_joined() -> None:
    assert set(CALLED) == set(ARGUMENTS)
    joins = {name for name, mover in layouts.MOVERS.items() if mover.kind is layouts.Join}
    assert set(layouts.MOVERS) - {ALL_REDUCE, GATHER, SCATTER} == layouts.PASSING | joins
    assert FOLLOWERS & set(layouts.MOVERS) == {WAIT, GETITEM}
    assert layouts.MOVERS[GETITEM].kind is layouts.Pick


def test_equal_parts_are_found_however_they_are_written() -> None:
    for bounds in ((2, 4), (-2, None), (2, 2**63 - 1)):
        cut = layouts.move_of("aten.slice.Tensor", (None, 0, *bounds, 1), (2,))
        assert isinstance(cut, layouts.Cut)
        assert cut.piece(4) == (1, 2)
    piece = layouts.move_of("aten.chunk.default", (None, 4, 0), None).layout(layouts.shard((6,)))
    assert piece.shape == (2,)  # three pieces, not four
