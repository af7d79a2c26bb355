"""The same chain on small tensors: each length that no operator looks into becomes 2, 3 or 5.

Layout operators and collectives act alike on tensors of any size: only what is cut or counted matters, the sizes of
groups and the lengths that views deal out. So a length of a shard is split into factors just where some operator of
the chains cuts it, and each factor is then made small. Group sizes stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from attrs import evolve, field, mutable

from policylang.planning.edits.graph_edit import Node
from policylang.planning.edits.proof.calls import Call, Part
from policylang.planning.edits.proof.evaluator import Tensor, laid_out

SMALL = (2, 3, 5)

_MOVES = frozenset(
    {"aten.permute.default", "aten.transpose.int", "aten.t.default", "aten.movedim.int", "aten.movedim.intlist"}
)
_SPLITS = frozenset(
    {
        "aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default", "aten.chunk.default",
        "aten.unbind.int",
    }
)  # fmt: skip
_SLICES = frozenset({"aten.slice.Tensor", "aten.narrow.default"})


class ShrinkingError(Exception):
    """A chain that this does not know how to make small."""


@mutable(eq=False)
class Factor:
    """A factor of a length. Once an operator cuts it, its parts stand for it wherever it occurs."""

    size: int
    fixed: bool
    """Whether its size counts: the number of ranks of a group, or of pieces."""
    parts: tuple[Factor, Factor] | None = None
    small: int = 0

    def cut(self, first: int) -> None:
        self.parts = Factor(first, self.fixed), Factor(self.size // first, self.fixed)


Dim = list[Factor]


@mutable
class Sizes:
    """Chains on their way through: every value as the factors of its lengths."""

    values: dict[str, Any] = field(factory=dict)
    """A list of dimensions, or of a split the pair of its dimension and the factors that count pieces."""

    def start(self, name: str, shape: Sequence[int]) -> None:
        self.values[name] = [[Factor(length, fixed=False)] for length in shape]

    def run(self, calls: Iterable[Call]) -> None:
        """Raises :class:`ShrinkingError` for what cannot be followed."""
        for call in calls:
            self.values[call.name] = self._after(call)

    def shrink(self) -> None:
        """Give each factor its small size."""
        count = 0
        for dims in self.values.values():
            for dim in dims if isinstance(dims, list) else ():
                for factor in leaves(dim):
                    if not factor.small:
                        small = factor.size if factor.fixed else min(factor.size, SMALL[count % len(SMALL)])
                        count += small != factor.size
                        factor.small = small

    def small_shape(self, name: str) -> tuple[int, ...]:
        return tuple(small_size(dim) for dim in self.values[name])

    def small_call(self, call: Call) -> Call:
        """The call with the sizes among its arguments made small."""
        source, *rest = call.arguments
        if call.target.startswith("aten.split"):
            dims, count, dim = self.values[call.name]
            size = small_size(dims[dim]) // small_size(count)
            sizes = (size,) * small_size(count) if isinstance(rest[0], tuple) else size
            return evolve(call, arguments=(source, sizes, dim))
        if call.target in _SLICES and not any(isinstance(bound, Part) for bound in rest):
            dim, first, last = _bounds(call, self.values[source.name])
            length = sized(self.values[source.name][dim])
            small = small_size(self.values[source.name][dim])
            first, last = first * small // length, last * small // length
            bounds = (first, last) if call.target == "aten.slice.Tensor" else (first, last - first)
            return evolve(call, arguments=(source, dim, *bounds), shape=self.small_shape(call.name))
        return call if call.shape is None else evolve(call, shape=self.small_shape(call.name))

    def _after(self, call: Call) -> Any:
        target, arguments = call.target, call.arguments
        first = arguments[0]
        value: Any = self.values[first.name] if isinstance(first, Node) else None
        if target.endswith("all_gather_into_tensor.default"):
            return [[Factor(arguments[1], fixed=True), *value[0]], *value[1:]]
        if target.endswith("reduce_scatter_tensor.default"):
            mine, rest = _parts(value[0], arguments[2])
            _fix(mine)
            return [rest, *value[1:]]
        if target in _MOVES:
            return _moved(value, call)
        if target in _SPLITS:
            return self._split(value, call)
        if target == "builtin.getitem":
            dims, count, dim = value
            if call.shape is not None and len(call.shape) < len(dims):  # of an `unbind`
                return dims[:dim] + dims[dim + 1 :]
            return [_parts(each, sized(count))[1] if at == dim else each for at, each in enumerate(dims)]
        if target in ("aten.cat.default", "aten.stack.default"):
            return self._joined(call)
        if target == "aten.slice.Tensor" and any(isinstance(bound, Part) for bound in arguments):
            dim, part = arguments[1], next(bound for bound in arguments if isinstance(bound, Part))
            return [_parts(each, part.count)[1] if at == dim else each for at, each in enumerate(value)]
        if target in _SLICES:
            return _sliced(value, call)
        if target == "aten.select.int":
            raise ShrinkingError(f"`{call.name}` keeps a part")
        if call.shape is None:
            raise ShrinkingError(f"`{call.name}` returns no single tensor")
        shape = call.shape
        if tuple(map(sized, value)) == shape:
            return value
        return _dealt([factor for dim in value for factor in dim], shape, call)

    def _split(self, value: list[Dim], call: Call) -> tuple[list[Dim], Dim, int]:
        dim = call.arguments[-1] % len(value)
        length = sized(value[dim])
        count = _pieces(call, length)
        if length % count:
            raise ShrinkingError(f"`{call.name}` cuts unevenly")
        pieces, _ = _parts(value[dim], count)
        _fix(pieces)
        return value, pieces, dim

    def _joined(self, call: Call) -> list[Dim]:
        parts, *rest = call.arguments
        pieces = [self.values[part.name] for part in parts]
        dims = list(pieces[0])
        stacked = call.target == "aten.stack.default"
        dim = (rest[0] if rest else 0) % (len(dims) + stacked)
        count = [Factor(len(pieces), fixed=True)]
        if stacked:
            dims.insert(dim, count)
        else:
            dims[dim] = count + dims[dim]
        return dims


def _pieces(call: Call, length: int) -> int:
    """How many equal pieces a split makes."""
    size = call.arguments[1]
    if call.target == "aten.unbind.int":
        return length
    if call.target == "aten.chunk.default":
        return int(size)
    sizes = size if isinstance(size, tuple) else (size,) * (length // size)
    if len(set(sizes)) != 1 or sum(sizes) != length:
        raise ShrinkingError(f"`{call.name}` cuts unevenly")
    return len(sizes)


def _bounds(call: Call, value: list[Dim]) -> tuple[int, int, int]:
    """The dimension of a slice, its beginning and its end."""
    _, dim, first, last, *step = call.arguments
    length = sized(value[dim])
    if step not in ([], [1]):
        raise ShrinkingError(f"`{call.name}` keeps a part")
    first = first or 0
    if call.target == "aten.narrow.default":
        last = first + last
    last = length if last is None else min(last, length)
    return dim % len(value), first, last


def _sliced(value: list[Dim], call: Call) -> list[Dim]:
    dim, first, last = _bounds(call, value)
    length = sized(value[dim])
    if not 0 <= first < last or first % (last - first) or length % (last - first):
        raise ShrinkingError(f"`{call.name}` keeps a part")
    pieces, rest = _parts(value[dim], length // (last - first))
    _fix(pieces)
    return [rest if at == dim else each for at, each in enumerate(value)]


def leaves(dim: Iterable[Factor]) -> list[Factor]:
    found: list[Factor] = []
    for factor in dim:
        found.extend([factor] if factor.parts is None else leaves(factor.parts))
    return found


def sized(dim: Iterable[Factor]) -> int:
    return prod(factor.size for factor in dim)


def small_size(dim: Iterable[Factor]) -> int:
    return prod(factor.small for factor in leaves(dim))


def _fix(dim: Iterable[Factor]) -> None:
    for factor in leaves(dim):
        factor.fixed = True


def _parts(dim: Dim, count: int) -> tuple[Dim, Dim]:
    """The slowest factors of a length that make up ``count``, and the others. Cuts one where it has to."""
    taken, left = [], leaves(dim)
    while count > 1:
        if not left:
            raise ShrinkingError("lengths do not fit")
        factor = left.pop(0)
        if count % factor.size == 0:
            taken.append(factor)
            count //= factor.size
        elif factor.size % count == 0:
            factor.cut(count)
            assert factor.parts is not None
            taken.append(factor.parts[0])
            left.insert(0, factor.parts[1])
            count = 1
        else:
            raise ShrinkingError(f"{factor.size} is cut into {count} parts")
    return taken, left


def _dealt(factors: Dim, shape: Sequence[int], call: Call) -> list[Dim]:
    dims = []
    for length in shape:
        taken, factors = _parts(factors, length)
        dims.append(taken)
    if sized(factors) != 1:
        raise ShrinkingError(f"`{call.name}` changes the number of elements")
    return dims


def _moved(value: list[Dim], call: Call) -> list[Dim]:
    """Which dimension goes where is read off distinct strides of a tensor that is never filled."""
    marked = Tensor((), tuple(range(len(value))), tuple(range(len(value))))
    return [value[dim] for dim in laid_out(call, marked).stride]
