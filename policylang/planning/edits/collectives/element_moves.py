"""What the rows of a chain do to a layout, read from facts: the bridge between a graph and the layout algebra."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from policylang.graph.facts import Facts, Ref
from policylang.planning.edits.proof import layouts
from policylang.planning.edits.proof.layouts import Layout, NoDigitsError
from policylang.planning.edits.proof.strides import is_contiguous, viewed

GATHER = "_c10d_functional.all_gather_into_tensor.default"
WAIT = "_c10d_functional.wait_tensor.default"
CASTS = frozenset({"aten._to_copy.default", "prims.convert_element_type.default", "aten.view.dtype"})
_SAME = frozenset(
    {
        WAIT, "aten.clone.default", "aten.contiguous.default", "aten.alias.default", "aten.detach.default",
        "aten.lift_fresh.default",
    }
)  # fmt: skip
_RESHAPES = frozenset(
    {
        "aten.view.default", "aten.reshape.default", "aten._unsafe_view.default", "aten.squeeze.default",
        "aten.squeeze.dim", "aten.squeeze.dims", "aten.unsqueeze.default", "aten.flatten.using_ints",
        "aten.unflatten.int",
    }
)  # fmt: skip
_PERMUTES = frozenset(
    {"aten.permute.default", "aten.transpose.int", "aten.t.default", "aten.movedim.int", "aten.movedim.intlist"}
)
_PARTS = frozenset(
    {
        "aten.slice.Tensor", "aten.narrow.default", "aten.select.int", "aten.expand.default",
        "aten.constant_pad_nd.default",
    }
)  # fmt: skip
_SPLITS = frozenset(
    {
        "aten.split.Tensor", "aten.split.sizes", "aten.split_with_sizes.default", "aten.chunk.default",
        "aten.unbind.int",
    }
)  # fmt: skip
JOINS = frozenset({"aten.cat.default", "aten.stack.default"})
GETITEM = "builtin.getitem"
PASSING = _SAME | _RESHAPES | _PERMUTES | _PARTS | _SPLITS | CASTS | {GETITEM}
"""Operators of one tensor through which a chain is followed, whether or not it can then be fused."""


@frozen
class Fan:
    """``split → getitem* → cat``, or slices of one value in place of ``split`` and ``getitem``."""

    base: int
    """The row that is split."""
    rows: tuple[int, ...]
    """Split, pieces and join, in graph order."""
    cut: int
    count: int
    joined: int
    stacked: bool
    drops: bool
    """Whether the pieces have lost the dimension they were cut along (``unbind``)."""


@frozen
class Piece:
    """One of several equal parts of a value."""

    base: int
    split: int | None
    """The row that makes all parts; None of a slice."""
    cut: int
    """The dimension that is cut."""
    drops: bool
    """Whether the part has lost that dimension (``unbind``)."""
    place: int
    """Which part, from 0."""
    count: int


def permutation(facts: Facts, row: int) -> list[int] | None:
    """The dimensions that a row brings into a new order; None where it does something else."""
    target, arguments = facts.targets[row], facts.arguments[row]
    shape = facts.shapes[row]
    if target not in _PERMUTES or shape is None:
        return None
    dims = list(range(len(shape)))
    if target == "aten.t.default":
        return dims[::-1]
    if target == "aten.permute.default":
        return [dim % len(dims) for dim in arguments[1]]
    if target == "aten.transpose.int":
        one, other = arguments[1], arguments[2]
        dims[one], dims[other] = dims[other], dims[one]
        return dims
    froms, tos = (value if isinstance(value, tuple) else (value,) for value in arguments[1:3])
    order: list[int | None] = [None] * len(dims)
    for source, to in zip(froms, tos, strict=True):
        order[to] = source % len(dims)
    free = iter([dim for dim in dims if dim not in order])
    return [next(free) if dim is None else dim for dim in order]


def moved(facts: Facts, row: int, value: Layout) -> Layout:
    """A layout after the operator of a row. Raises :class:`NoDigitsError` with a phrase where it is none."""
    target, shape = facts.targets[row], facts.shapes[row]
    name = facts.names[row]
    if shape is None or facts.strides[row] is None:
        raise NoDigitsError(f"sizes not fixed: {name}")
    if len(facts.inputs[row]) != 1:
        raise NoDigitsError(f"sizes not fixed: {name}")
    (source,) = facts.inputs[row]
    if facts.dtypes[row] != facts.dtypes[source]:
        raise NoDigitsError(f"dtype changes: {name}")
    found = _moved(facts, row, value, shape)
    if found is None or found.shape != shape:
        what = "keeps a part" if target in _PARTS or target in _SPLITS or target == GETITEM else "is no layout operator"
        raise NoDigitsError(f"{name} {what}")
    return found


def _moved(facts: Facts, row: int, value: Layout, shape: tuple[int, ...]) -> Layout | None:
    target = facts.targets[row]
    if target in _SAME or target in CASTS:
        return None if target == "aten.view.dtype" else value
    if target in _RESHAPES:
        try:
            return layouts.viewed(value, shape)
        except NoDigitsError:
            raise NoDigitsError(f"{facts.names[row]} cuts across shards") from None
    order = permutation(facts, row)
    if order is not None:
        return layouts.permuted(value, order)
    return value if target in _PARTS and shape == value.shape else None


def fan_of(facts: Facts, join: int) -> Fan | str:
    """The fan that ends in a ``cat`` or ``stack``, or a phrase that says why it is none."""
    parts, *rest = facts.arguments[join]
    name = facts.names[join]
    pieces = [part.row for part in parts if isinstance(part, Ref)] if isinstance(parts, tuple) else []
    shape = facts.shapes[join]
    if not pieces or len(pieces) != len(parts) or shape is None or len(set(pieces)) != len(pieces):
        return f"{name} joins other values"
    cuts = [_piece(facts, piece) for piece in pieces]
    base, split, cut, drops, _, count = cuts[0] if cuts[0] is not None else (-1, None, 0, False, 0, 0)
    for place, found in enumerate(cuts):
        if found is None or found[:4] != (base, split, cut, drops):
            return f"{name} joins other values"
        if found[4] != place:
            return f"{name} joins pieces in another order"
    if count != len(pieces):
        return f"{name} joins a part of the pieces"
    stacked = facts.targets[join] == "aten.stack.default"
    rows = tuple(sorted({*pieces, *(() if split is None else (split,)), join}))
    return Fan(base, rows, cut, count, (rest[0] if rest else 0) % len(shape), stacked, drops)


def fanned(facts: Facts, fan: Fan, value: Layout) -> Layout:
    """A layout after a fan."""
    join = fan.rows[-1]
    shape = facts.shapes[join]
    if shape is None or facts.strides[join] is None:
        raise NoDigitsError(f"sizes not fixed: {facts.names[join]}")
    try:
        if fan.drops:
            found = layouts.unbound(value, fan.cut, fan.joined, fan.stacked)
        else:
            found = layouts.rejoined(value, fan.cut, fan.count, fan.joined, fan.stacked)
    except NoDigitsError:
        raise NoDigitsError(f"{facts.names[join]} cuts across shards") from None
    if found.shape != shape:
        raise NoDigitsError(f"{facts.names[join]} joins uneven pieces")
    return found


def copies(facts: Facts, rows: Sequence[int]) -> int:
    """How many of the rows write their value anew."""
    count = 0
    for row in rows:
        target = facts.targets[row]
        if target in JOINS or target == "aten.clone.default":
            count += 1
        elif target in ("aten.reshape.default", "aten._unsafe_view.default", "aten.contiguous.default"):
            (source,) = facts.inputs[row]
            shape, stride = facts.shapes[source], facts.strides[source]
            wanted = facts.shapes[row]
            if shape is None or stride is None or wanted is None:
                continue
            if target == "aten.contiguous.default":
                count += not is_contiguous(shape, stride)
            else:
                count += viewed(shape, stride, wanted) is None
    return count


def piece_of(facts: Facts, row: int) -> Piece | None:
    """Of a slice, or of a ``getitem`` of a split, which part it is; None where parts are not equal, and of others."""
    found = _piece(facts, row)
    return None if found is None else Piece(*found)


def _piece(facts: Facts, row: int) -> tuple[int, int | None, int, bool, int, int] | None:
    """Base, split, dimension, whether the dimension is dropped, which piece, of how many equal ones."""
    target, arguments = facts.targets[row], facts.arguments[row]
    shape = facts.shapes[row]
    if shape is None or not arguments or not isinstance(arguments[0], Ref):
        return None
    source = arguments[0].row
    if target == GETITEM:
        if facts.targets[source] not in _SPLITS or not isinstance(facts.arguments[source][0], Ref):
            return None
        base: int = facts.arguments[source][0].row
        whole = facts.shapes[base]
        drops = facts.targets[source] == "aten.unbind.int"
        if whole is None or not isinstance(arguments[1], int):
            return None
        cut = facts.arguments[source][-1] % len(whole)
        length = 1 if drops else shape[cut]
        count, rest = divmod(whole[cut], length) if length else (0, 1)
        return None if rest else (base, source, cut, drops, arguments[1] % count, count)
    if target not in ("aten.slice.Tensor", "aten.narrow.default"):
        return None
    whole = facts.shapes[source]
    if whole is None or not all(value is None or isinstance(value, int) for value in arguments[1:]):
        return None
    cut = arguments[1] % len(whole)
    start = arguments[2] or 0
    if (target == "aten.slice.Tensor" and arguments[4] != 1) or start < 0 or not shape[cut] or start % shape[cut]:
        return None
    count, rest = divmod(whole[cut], shape[cut])
    return None if rest else (source, None, cut, False, start // shape[cut], count)
