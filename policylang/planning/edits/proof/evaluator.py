"""What layout operators and collectives do, element by element, in pure Python, for every rank of a world at once.

A proof runs two chains through it. It is written from what torch's operators do and knows nothing of how rewrites are
found; a tensor is a list of elements with shape, strides and offset, so that a view that torch would refuse is refused
here too. Ranks whose inputs are the same objects get the same result, computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from attrs import frozen

from policylang.planning.edits.graph_edit import FusedGroup, Node
from policylang.planning.edits.proof.calls import Call, Part, group_of


class EvaluationError(Exception):
    """A call that torch would refuse, or that is not known here."""


@frozen(eq=False)
class Tensor:
    memory: Sequence[Any]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @staticmethod
    def fresh(elements: Sequence[Any], shape: Sequence[int]) -> Tensor:
        """Row-major."""
        return Tensor(elements, tuple(shape), _row_major(shape))

    def elements(self) -> list[Any]:
        """In row-major order of the indices."""
        places = [self.offset]
        for length, step in zip(self.shape, self.stride, strict=True):
            places = [place + step * index for place in places for index in range(length)]
        memory = self.memory
        return [memory[place] for place in places]

    @property
    def contiguous(self) -> bool:
        wanted = _row_major(self.shape)
        return all(n == 1 or s == w for n, s, w in zip(self.shape, self.stride, wanted, strict=True))


Value = Tensor | tuple[Tensor, ...]
Groups = Callable[[str | FusedGroup, int], tuple[int, ...]]
"""The ranks of the group in which a rank takes part, in group order."""


def run(
    calls: Iterable[Call], inputs: Mapping[str, Mapping[int, Value]], groups: Groups
) -> dict[str, dict[int, Value]]:
    """What every call gives on every rank.

    Args:
        calls: in order.
        inputs: node name to rank to value.
        groups: who takes part in a collective.

    Raises:
        EvaluationError: where torch would raise.
    """
    values: dict[str, dict[int, Value]] = {name: dict(of_ranks) for name, of_ranks in inputs.items()}
    for call in calls:
        values[call.name] = _run_call(call, values, groups)
    return values


def laid_out(call: Call, tensor: Tensor) -> Tensor:
    """One layout operator on one tensor."""
    result = _operator(call.target)(call, tensor, *call.arguments[1:])
    assert isinstance(result, Tensor)
    return result


def _run_call(call: Call, values: Mapping[str, Mapping[int, Value]], groups: Groups) -> dict[int, Value]:
    collective = _COLLECTIVES.get(call.target)
    first = call.arguments[0]
    ranks = values[(first if isinstance(first, Node) else first[0]).name]
    known: dict[Any, Value] = {}
    met: dict[Any, Sequence[Tensor]] = {}
    found: dict[int, Value] = {}
    for rank in ranks:
        if collective is not None:
            members = groups(group_of(call), rank)
            shards = [values[first.name][member] for member in members]
            key: Any = tuple(map(id, shards))
            if key not in met:
                met[key] = collective(call, shards)
            found[rank] = met[key][members.index(rank)]
        else:
            arguments = [_bind(value, values, rank) for value in call.arguments]
            key = _key(arguments)
            if key not in known:
                known[key] = _operator(call.target)(call, *arguments)
            found[rank] = known[key]
    return found


def _bind(value: Any, values: Mapping[str, Mapping[int, Value]], rank: int) -> Any:
    if isinstance(value, Node):
        return values[value.name][rank]
    if isinstance(value, tuple):
        return tuple(_bind(part, values, rank) for part in value)
    if isinstance(value, Part):
        return value.count, dict(value.index)[rank]
    return value


def _key(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_key(part) for part in value)
    return id(value) if isinstance(value, Tensor) else value


# --- collectives ---


_Collective = Callable[[Call, Sequence[Any]], Sequence[Tensor]]
"""From the shards of a group, in its order, to what each of its members gets."""


def _all_gather(call: Call, shards: Sequence[Tensor]) -> Sequence[Tensor]:
    _check_shards(call, shards)
    first = shards[0]
    whole = Tensor.fresh(
        [element for shard in shards for element in shard.elements()],
        (first.shape[0] * len(shards), *first.shape[1:]),
    )
    return [whole] * len(shards)


def _reduce_scatter(call: Call, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    _check_shards(call, parts)
    if call.arguments[1] not in ("sum", "avg"):
        raise EvaluationError(f"`{call.name}` reduces with `{call.arguments[1]}`")
    length, rest = divmod(parts[0].shape[0], len(parts))
    if rest:
        raise EvaluationError(f"`{call.name}` scatters unevenly")
    totals = list(map(sum, zip(*(part.elements() for part in parts), strict=True)))
    if call.arguments[1] == "avg":
        totals = [_mean(total, len(parts)) for total in totals]
    shape = (length, *parts[0].shape[1:])
    count = prod(shape)
    return [Tensor.fresh(totals[place * count : (place + 1) * count], shape) for place in range(len(parts))]


def _mean(total: Any, count: int) -> Any:
    """Exact, so that one mean of all and a mean of means compare equal."""
    from fractions import Fraction

    return Fraction(total) / count


def _check_shards(call: Call, shards: Sequence[Tensor]) -> None:
    if call.arguments[-2] != len(shards):
        raise EvaluationError(f"`{call.name}` is told of {call.arguments[-2]} ranks and has {len(shards)}")
    if any(not shard.contiguous for shard in shards):
        raise EvaluationError(f"`{call.name}` reads a tensor that is not contiguous")
    if any(shard.shape != shards[0].shape or not shard.shape for shard in shards):
        raise EvaluationError(f"`{call.name}` reads tensors of different shapes")


_COLLECTIVES: dict[str, _Collective] = {
    "_c10d_functional.all_gather_into_tensor.default": _all_gather,
    "_c10d_functional.reduce_scatter_tensor.default": _reduce_scatter,
}


# --- layout operators ---


def _same(_call: Call, tensor: Tensor, *_: Any) -> Tensor:
    return tensor


def _copy(_call: Call, tensor: Tensor, *options: Any) -> Tensor:
    """Preserves strides where it may, which nothing that follows can tell from values: a contiguous copy is the
    stricter one only if it was asked for."""
    if "contiguous_format" in options or tensor.contiguous:
        return Tensor.fresh(tensor.elements(), tensor.shape)
    order = sorted(range(len(tensor.shape)), key=lambda dim: -tensor.stride[dim])
    back = [order.index(dim) for dim in range(len(order))]
    moved = _permute(_call, tensor, order)
    return _permute(_call, Tensor.fresh(moved.elements(), moved.shape), back)


def _expand(call: Call, tensor: Tensor, *_: Any) -> Tensor:
    if call.shape != tensor.shape:
        raise EvaluationError(f"`{call.name}` repeats elements")
    return tensor


def _contiguous(call: Call, tensor: Tensor, *_: Any) -> Tensor:
    return tensor if tensor.contiguous else _copy(call, tensor, "contiguous_format")


def _view(call: Call, tensor: Tensor, *_: Any) -> Tensor:
    """By its result's shape, which the call knows."""
    assert call.shape is not None
    if prod(call.shape) != prod(tensor.shape):
        raise EvaluationError(f"`{call.name}` views {list(tensor.shape)} as {list(call.shape)}")
    stride = _view_strides(tensor, call.shape)
    if stride is None:
        raise EvaluationError(f"`{call.name}` views a tensor whose elements do not lie side by side")
    return Tensor(tensor.memory, call.shape, stride, tensor.offset)


def _reshape(call: Call, tensor: Tensor, *_: Any) -> Tensor:
    assert call.shape is not None
    if prod(call.shape) == prod(tensor.shape) and _view_strides(tensor, call.shape) is None:
        tensor = Tensor.fresh(tensor.elements(), tensor.shape)
    return _view(call, tensor)


def _view_strides(tensor: Tensor, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Found by trying: where each new dimension's second element lies, then whether all others follow."""
    places = _places(tensor.shape, tensor.stride)
    steps = _row_major(shape)
    stride = tuple(places[step] if length > 1 else 1 for length, step in zip(shape, steps, strict=True))
    return stride if _places(shape, stride) == places else None


def _places(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    return [sum(i * s for i, s in zip(at, stride, strict=True)) for at in product(*map(range, shape))]


def _permute(_call: Call, tensor: Tensor, dims: Sequence[int]) -> Tensor:
    shape = tuple(tensor.shape[dim] for dim in dims)
    return Tensor(tensor.memory, shape, tuple(tensor.stride[dim] for dim in dims), tensor.offset)


def _transpose(call: Call, tensor: Tensor, one: int, other: int) -> Tensor:
    dims = list(range(len(tensor.shape)))
    dims[one], dims[other] = dims[other], dims[one]
    return _permute(call, tensor, dims)


def _t(call: Call, tensor: Tensor) -> Tensor:
    return _permute(call, tensor, range(len(tensor.shape))[::-1])


def _movedim(call: Call, tensor: Tensor, sources: Any, destinations: Any) -> Tensor:
    rank = len(tensor.shape)
    froms = [dim % rank for dim in (sources if isinstance(sources, tuple) else (sources,))]
    tos = [dim % rank for dim in (destinations if isinstance(destinations, tuple) else (destinations,))]
    free = iter([dim for dim in range(rank) if dim not in froms])
    moved = dict(zip(tos, froms, strict=True))
    return _permute(call, tensor, [moved[dim] if dim in moved else next(free) for dim in range(rank)])


def _slice(call: Call, tensor: Tensor, dim: int, start: Any, end: Any, step: int = 1) -> Tensor:
    length = tensor.shape[dim]
    first, last = (_bound(bound, length, default) for bound, default in ((start, 0), (end, length)))
    kept = max(0, -(-(last - first) // step))
    shape, stride = list(tensor.shape), list(tensor.stride)
    shape[dim], stride[dim] = kept, stride[dim] * step
    return Tensor(tensor.memory, tuple(shape), tuple(stride), tensor.offset + first * tensor.stride[dim])


def _bound(bound: Any, length: int, default: int) -> int:
    if bound is None:
        return default
    if isinstance(bound, tuple):
        count, index = bound
        if length % count:
            raise EvaluationError(f"{length} has no {count} equal parts")
        whole: int = length // count * index
        return whole
    at: int = bound + length if bound < 0 else bound
    return max(0, min(length, at))


def _narrow(call: Call, tensor: Tensor, dim: int, start: int, length: int) -> Tensor:
    return _slice(call, tensor, dim, start, start + length)


def _select(call: Call, tensor: Tensor, dim: int, index: int) -> Tensor:
    dim %= len(tensor.shape)
    part = _slice(call, tensor, dim, index % tensor.shape[dim], index % tensor.shape[dim] + 1)
    without = [each for each in range(len(tensor.shape)) if each != dim]
    return Tensor(
        part.memory,
        tuple(part.shape[each] for each in without),
        tuple(part.stride[each] for each in without),
        part.offset,
    )


def _split(call: Call, tensor: Tensor, size: Any, dim: int = 0) -> tuple[Tensor, ...]:
    length = tensor.shape[dim]
    sizes = size if isinstance(size, tuple) else [min(size, length - at) for at in range(0, length, size)]
    if sum(sizes) != length:
        raise EvaluationError(f"`{call.name}` splits {length} as {list(sizes)}")
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return tuple(_slice(call, tensor, dim, end - part, end) for part, end in zip(sizes, ends, strict=True))


def _chunk(call: Call, tensor: Tensor, count: int, dim: int = 0) -> tuple[Tensor, ...]:
    return _split(call, tensor, max(1, -(-tensor.shape[dim] // count)), dim)


def _unbind(call: Call, tensor: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(_select(call, tensor, dim, index) for index in range(tensor.shape[dim]))


def _getitem(_call: Call, parts: Sequence[Tensor], index: int) -> Tensor:
    return parts[index]


def _cat(call: Call, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim %= len(parts[0].shape)
    rows = [_rows(part, dim) for part in parts]
    if len({len(each) for each in rows}) != 1:
        raise EvaluationError(f"`{call.name}` joins tensors of different shapes")
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return Tensor.fresh([element for each in zip(*rows, strict=True) for row in each for element in row], shape)


def _stack(call: Call, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    dim %= len(parts[0].shape) + 1
    raised = [
        Tensor(
            part.memory,
            (*part.shape[:dim], 1, *part.shape[dim:]),
            (*part.stride[:dim], 1, *part.stride[dim:]),
            part.offset,
        )
        for part in parts
    ]
    return _cat(call, raised, dim)


def _rows(tensor: Tensor, dim: int) -> list[list[Any]]:
    """The elements from ``dim`` on, for each index of the dimensions before it."""
    elements = tensor.elements()
    size = prod(tensor.shape[dim:])
    return [elements[at * size : (at + 1) * size] for at in range(prod(tensor.shape[:dim]))]


def _row_major(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _operator(target: str) -> Callable[..., Any]:
    found = _OPERATORS.get(target)
    if found is None:
        raise EvaluationError(f"`{target}` is not known to move elements only")
    return found


_OPERATORS: dict[str, Callable[..., Any]] = {
    "_c10d_functional.wait_tensor.default": _same,
    "aten._to_copy.default": _copy,
    "aten._unsafe_view.default": _view,
    "aten.alias.default": _same,
    "aten.cat.default": _cat,
    "aten.chunk.default": _chunk,
    "aten.clone.default": _copy,
    "aten.contiguous.default": _contiguous,
    "aten.detach.default": _same,
    "aten.expand.default": _expand,
    "aten.flatten.using_ints": _reshape,
    "aten.lift_fresh.default": _same,
    "aten.movedim.int": _movedim,
    "aten.movedim.intlist": _movedim,
    "aten.narrow.default": _narrow,
    "aten.permute.default": _permute,
    "aten.reshape.default": _reshape,
    "aten.select.int": _select,
    "aten.slice.Tensor": _slice,
    "aten.split.Tensor": _split,
    "aten.split.sizes": _split,
    "aten.split_with_sizes.default": _split,
    "aten.squeeze.default": _view,
    "aten.squeeze.dim": _view,
    "aten.squeeze.dims": _view,
    "aten.stack.default": _stack,
    "aten.t.default": _t,
    "aten.transpose.int": _transpose,
    "aten.unbind.int": _unbind,
    "aten.unflatten.int": _view,
    "aten.unsqueeze.default": _view,
    "aten.view.default": _view,
    "builtin.getitem": _getitem,
    "prims.convert_element_type.default": _copy,
}
