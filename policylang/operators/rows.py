"""The effect of an operator along each dimension: which dimensions of its result are those of its inputs, which it sums
over, and along which an element depends on others.

A dimension has a label. Two dimensions with one label are walked together: ``mm`` is ``(0, 2), (2, 1) -> (0, 1)``, with
2 summed over. A softmax has one label for each dimension, and mixes along one of them. From that follows whether a call
on a slice of its inputs gives a slice of its result, or a part of a sum. The tests compare every operator here with
torch, whole against slices. An operator that is missing is refused by name, never guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

from attrs import evolve, frozen

from policylang.operators.layouts import Cut, Gather, Join, Scatter, Split, move_of
from policylang.operators.names import ALL_REDUCE, GATHER, GETITEM, SCATTER, WAIT

Shape = tuple[int, ...]
Labels = tuple[int, ...]
NONE = -1
"""The label of a dimension of length 1 that is repeated."""


@frozen
class Dims:
    """The labels of one call."""

    reads: tuple[Labels, ...]
    """The labels of each tensor among the arguments, in their order."""
    makes: tuple[Labels, ...]
    """The labels of each tensor that it returns."""
    summed: frozenset[int] = frozenset()
    """Labels that it adds up over."""
    mixed: frozenset[int] = frozenset()
    """Labels along which an element of the result depends on more than the element at its place."""
    sizes: int = -1
    """The argument that is the shape of the result, if one is."""
    is_mean: bool = False
    """True if a sum is divided by the number of its summands."""


@frozen
class RowDim:
    """A part of one dimension, whose length is ``outer * size * inner``: rows of a batch that was flattened."""

    dim: int
    outer: int
    size: int
    inner: int
    first: int = 0
    """The number of its first row: shifted, a value has fewer rows than others."""

    def of(self, rows: range) -> range:
        """Which of its own rows are some of all."""
        return range(max(rows.start - self.first, 0), min(rows.stop - self.first, self.size))

    def length(self, rows: range) -> int:
        """The length of the dimension in a slice."""
        return self.outer * len(self.of(rows)) * self.inner


def viewed(digit: RowDim, shape: Shape, other: Shape) -> RowDim | None:
    """A digit after a view of a contiguous ``shape`` as ``other``; None where the view cuts it."""
    low = prod(shape[digit.dim + 1 :]) * digit.inner
    high, below = low * digit.size, prod(other)
    for dim, length in enumerate(other):
        below, above = below // max(length, 1), below
        if low % below == 0 and above % high == 0 and above >= high:
            return RowDim(dim, above // high, digit.size, low // below, digit.first)
    return None


_POINTWISE_NAMES = (
    "abs", "acos", "add", "addcdiv", "addcmul", "alias", "asin", "atan", "atan2", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "ceil", "celu", "clamp", "clamp_max", "clamp_min", "clone", "copy", "copysign", "cos",
    "cosh", "detach", "div", "elu", "empty_like", "eq", "erf", "erfc", "exp", "exp2", "expm1", "floor", "floor_divide",
    "fmod", "frac", "full_like", "ge", "gelu", "gelu_backward", "gt", "hardsigmoid", "hardswish", "hardtanh", "isinf",
    "isnan", "le", "leaky_relu", "leaky_relu_backward", "lerp", "lift_fresh", "lift_fresh_copy", "log", "log10",
    "log1p", "log2", "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "lt",
    "masked_fill", "maximum", "minimum", "mish", "mul", "ne", "neg", "ones_like", "pow", "reciprocal", "relu",
    "remainder", "round", "rsqrt", "rsub", "sigmoid", "sigmoid_backward", "sign", "silu", "silu_backward", "sin",
    "sinh", "softplus", "softplus_backward", "sqrt", "square", "sub", "tan", "tanh", "tanh_backward",
    "threshold_backward", "trunc", "where", "xlogy", "zeros_like", "_to_copy", "elu_backward", "hardswish_backward",
    "hardsigmoid_backward", "mish_backward", "nan_to_num", "hardtanh_backward",
)  # fmt: skip
_ON_RANKS = frozenset(name.rpartition(".")[0] for name in (ALL_REDUCE, WAIT))
"""Collectives that treat each element apart."""
_MOVED_BY_RANKS = frozenset(name.rpartition(".")[0] for name in (GATHER, SCATTER))
_POINTWISE = {f"aten.{name}" for name in _POINTWISE_NAMES} | {"prims.convert_element_type", "prims.fma"} | _ON_RANKS
SHIFTS = {"aten.slice.Tensor": 1, "aten.slice_backward.default": 2, "aten.slice_scatter.default": 2}
"""Operators that take a range of a dimension out, or put it in its place; the place of the dimension."""


def shifted(target: str, arguments: tuple[Any, ...], rows: RowDim, shape: Shape) -> RowDim | None:
    """The rows of a ``shape`` that is a range of others, or that others are a range of; None where they are mixed."""
    at = SHIFTS.get(target)
    if at is None or rows.outer * rows.inner != 1 or arguments[at] % len(shape) != rows.dim or arguments[at + 3] != 1:
        return None
    start, is_slice = arguments[at + 1] or 0, at == 1
    start = max(start + (rows.size if is_slice else shape[rows.dim]), 0) if start < 0 else start
    return RowDim(rows.dim, 1, shape[rows.dim], 1, rows.first + (start if is_slice else -start))


def repeated(target: str, arguments: tuple[Any, ...], rows: RowDim, shapes: Sequence[Shape | None]) -> RowDim | None:
    """The rows of a result that has those of several values one behind the other (of ranks, of pieces), or of one of
    several equal parts; None for others. ``shapes``: of what it reads."""
    shape = shapes[0] if len({*shapes}) == 1 else None
    if not shape:
        return None
    match move := move_of(target, arguments, None):
        case Gather():
            at, times, parts = 0, move.ranks, 1
        case Scatter():
            at, times, parts = 0, 1, move.ranks
        case Join(dim=at, stacked=False):
            times, parts = len(arguments[0]), 1
        case Split(drops=False):
            sizes = move.sizes(shape[move.dim])
            at, times, parts = move.dim, 1, len(sizes) if len(set(sizes)) == 1 else 0
        case Cut(drops=False):
            piece = move.piece(shape[move.dim])
            at, times, parts = move.dim, 1, 0 if piece is None else piece[1]
        case _:
            return None
    if at % len(shape) != rows.dim or not parts or rows.outer % parts:
        return None
    return evolve(rows, outer=rows.outer * times // parts)


def parted(target: str, arguments: tuple[Any, ...], length: int, part: int) -> tuple[Any, ...]:
    """The arguments of a call that takes parts of a dimension of a ``length``, where each part is ``part`` long."""
    match move := move_of(target, arguments, None):
        case Split():
            sizes = arguments[1]
            return (arguments[0], (part,) * len(sizes) if isinstance(sizes, tuple) else part, *arguments[2:])
        case Cut():
            place, _ = move.piece(length) or (0, 1)
            return (*arguments[:2], part * place, part * (place + 1), 1)
    return arguments


RESIZING = _MOVED_BY_RANKS | {
    *("aten.cat", "aten.constant_pad_nd", "aten.slice", "aten.slice_backward", "aten.slice_scatter"),
    *("aten.split", "aten.split_with_sizes"),
}
"""Operators whose results have some elements of a dimension, or more, at its place."""


def lengths(target: str, arguments: tuple[Any, ...], shape: Shape | None, read: Shape, dim: int) -> Sequence[int]:
    """The lengths of a dimension in what such an operator makes. ``read``: the shape of what it reads."""
    if shape is not None:
        return (shape[dim],)
    move = move_of(target, arguments, None)
    sizes = move.sizes(read[move.dim]) if isinstance(move, Split) else ()
    return sizes if isinstance(move, Split) and move.dim % len(read) == dim else [read[dim]] * len(sizes)


INDEXED = ("aten.index", "aten.index_put")
COUNTING = "counting"
"""In the place of the dtype of a tensor: it holds 0, 1, 2, …, one for each of its places."""


def counts(target: str, arguments: tuple[Any, ...]) -> bool:
    """True for 0, 1, 2, …, as many as there are places."""
    match target:
        case "aten.arange.default":
            return True
        case "aten.arange.start":
            return arguments[:1] == (0,)
        case "aten.arange.start_step":
            return arguments[:3:2] == (0, 1)
        case "prims.iota.default":
            return arguments[1:3] == (0, 1)
    return False


LIKE = frozenset(f"aten.{name}_like.default" for name in ("ones", "zeros", "full"))
"""Operators that read the shape of their input, and none of its elements."""
_CREATING = frozenset(("aten.full", "aten.zeros", "aten.ones"))
_CREATING_LIKE = frozenset(("aten.new_zeros", "aten.new_ones", "aten.new_full"))
_REDUCING = {
    "aten.sum.dim_IntList": (1, 2), "aten.mean.dim": (1, 2), "aten.amax.default": (1, 2), "aten.amin.default": (1, 2),
    "aten.logsumexp.default": (1, 2), "aten.any.dim": (1, 2), "aten.any.dims": (1, 2), "aten.all.dim": (1, 2),
    "aten.prod.dim_int": (1, 2), "aten.argmax.default": (1, 2), "aten.argmin.default": (1, 2),
    "aten.var.correction": (1, 3), "aten.std.correction": (1, 3), "aten.var_mean.correction": (1, 3),
    "aten.linalg_vector_norm.default": (2, 3), "aten.norm.ScalarOpt_dim": (2, 3),
    "aten.max.dim": (1, 2), "aten.min.dim": (1, 2),
    "aten.sum.default": (-1, -1), "aten.mean.default": (-1, -1),
}  # fmt: skip
"""Reductions, and the places of their dimensions and of ``keepdim``."""
_ADDING = ("aten.sum.", "aten.mean.")
_PAIRS = frozenset(("aten.var_mean.correction", "aten.max.dim", "aten.min.dim"))
_ALONG = {
    "aten._log_softmax": 1, "aten._softmax": 1, "aten._log_softmax_backward_data": 2, "aten._softmax_backward_data": 2,
    "aten.cumsum": 1, "aten.logcumsumexp": 1, "aten.flip": 1,
}  # fmt: skip
_RESHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten")
_VIEWS = frozenset(f"aten.{name}" for name in _RESHAPES)
RESIZED = {"aten.view.default", "aten._unsafe_view.default", "aten.reshape.default"}
"""Views that are given the shape of their result."""
_LOSSES = frozenset(
    ("aten.mse_loss", "aten.binary_cross_entropy_with_logits", "aten.smooth_l1_loss", "aten.huber_loss")
)
_LOSSES_BACK = frozenset(f"{name}_backward" for name in _LOSSES if "entropy" not in name)
NLL, NLL_BACKWARD = "aten.nll_loss_forward.default", "aten.nll_loss_backward.default"
_OTHERS = frozenset(
    f"aten.{name}" for name in (
        "mm", "bmm", "addmm", "baddbmm", "mv", "t", "permute", "transpose", "unsqueeze", "squeeze", "expand", "select",
        "slice", "slice_backward", "slice_scatter", "select_backward", "constant_pad_nd", "cat", "gather", "scatter",
        "scatter_add", "index", "index_put", "index_select", "embedding", "nll_loss_forward", "nll_loss_backward",
        "split", "split_with_sizes", "native_layer_norm", "native_layer_norm_backward", "topk", "sort", "arange",
        "scalar_tensor",
    )
) | {"prims.iota"} | _MOVED_BY_RANKS  # fmt: skip
_KNOWN = (
    _POINTWISE | _CREATING | _CREATING_LIKE | {name.rpartition(".")[0] for name in _REDUCING} | _ALONG.keys() | _VIEWS
    | _LOSSES | _LOSSES_BACK | _OTHERS
)  # fmt: skip


_ADDITIVE = frozenset(
    f"aten.{name}" for name in (
        "alias", "cat", "clone", "cumsum", "detach", "expand", "flip", "mean", "neg", "permute", "select", "_to_copy",
        "select_backward", "slice", "slice_backward", "slice_scatter", "split", "split_with_sizes", "squeeze", "sum",
        "t", "transpose", "unsqueeze",
    )
) | {"prims.convert_element_type"} | _VIEWS  # fmt: skip
_FIRST = frozenset(
    f"aten.{name}" for name in (
        *(each for each in _POINTWISE_NAMES if each.endswith("_backward")),
        "div", "gather", "index", "index_select", "nll_loss_backward", "_softmax_backward_data",
        "_log_softmax_backward_data",
    )
)  # fmt: skip
_EITHER = frozenset(("aten.mul", "aten.mm", "aten.bmm", "aten.mv"))


def is_linear(target: str, arguments: tuple[Any, ...], scaled: Sequence[bool], zero: Sequence[bool]) -> bool:
    """True if a call scales its result with those of its tensors that are ``scaled``, where ``zero`` ones hold nothing
    else. What is missing here counts as not linear."""
    name = target.rpartition(".")[0]
    homogeneous = [one or other for one, other in zip(scaled, zero, strict=True)]
    match name:
        case "aten.add" | "aten.sub":
            return len(scaled) == 2 and all(homogeneous)
        case "prims.fma":
            return sum(scaled[:2]) == 1 and homogeneous[2]
        case "aten.copy":
            return scaled[1]
        case "aten.where":
            return not scaled[0] and len(scaled) == 3 and all(homogeneous[1:])
        case "aten.index_put":
            return not any(scaled[1:-1]) and homogeneous[0] and homogeneous[-1]
        case "aten.scatter" | "aten.scatter_add":
            return not scaled[1] and len(scaled) == 3 and homogeneous[0] and homogeneous[2]
        case "aten.masked_fill" | "aten.constant_pad_nd":
            return scaled[0] and not any(scaled[1:]) and arguments[2] == 0
    if name in _EITHER:
        return sum(scaled) == 1
    if name in _FIRST or name in _LOSSES_BACK:
        return scaled[0] and not any(scaled[1:]) and not target.endswith("_mode")
    return target == GETITEM or (name in _ADDITIVE and all(homogeneous))


def is_view(target: str) -> bool:
    return target.rpartition(".")[0] in _VIEWS


@cache
def reads_dtype_alone(target: str) -> bool:
    """A tensor of a given shape, of the dtype and on the device of what it reads."""
    return target.rpartition(".")[0] in _CREATING_LIKE


def is_known(target: str) -> bool:
    """An operator whose dimensions are known, by its full name."""
    return target == GETITEM or target.rpartition(".")[0] in _KNOWN


def dims_of(
    target: str,
    arguments: tuple[Any, ...],
    shape: Shape | None,
    shapes: Sequence[Shape | None],
    dtypes: Sequence[str] = (),
) -> Dims | None:
    """The labels of a call; None where they are not known. ``shape``: of its result, None for a tuple; ``shapes`` and
    ``dtypes``: of the tensors among its arguments, in their order; :data:`COUNTING` for a tensor that counts."""
    if any(each is None for each in shapes) or not is_known(target):
        return None
    try:
        if target.rpartition(".")[0] in INDEXED:
            return _indexed(target, arguments, shape or (), [each or () for each in shapes], dtypes)
        return _dims(target, target.rpartition(".")[0], arguments, shape, [each or () for each in shapes])
    except (IndexError, TypeError, AttributeError, ValueError):  # an argument of another kind than here
        return None


def _dims(
    target: str, name: str, arguments: tuple[Any, ...], shape: Shape | None, shapes: Sequence[Shape]
) -> Dims | None:
    if name in _POINTWISE:
        assert shape is not None
        return Dims(tuple([_aligned(each, shape) for each in shapes]), (_all(shape),))
    if name in _CREATING:
        assert shape is not None
        return Dims((), (_all(shape),), sizes=0)
    if name in _CREATING_LIKE:
        assert shape is not None
        return Dims(((NONE,) * len(shapes[0]),), (_all(shape),), sizes=1)
    x = _all(shapes[0] if shapes else ())
    if target in _REDUCING:
        return _reduction(target, arguments, x)
    if name in _ALONG:
        given = arguments[_ALONG[name]]
        dims = given if isinstance(given, tuple) else (given,)
        return Dims((x,) * len(shapes), (x,), mixed=frozenset(x[dim] for dim in dims))
    if name in _LOSSES or name in _LOSSES_BACK:
        return _elementwise_loss(name, arguments, shapes, shape)
    match name.removeprefix("aten."):
        case "mm":
            return Dims(((0, 2), (2, 1)), ((0, 1),), summed=frozenset((2,)))
        case "prims.iota" | "arange":
            return Dims((), ((0,),), mixed=frozenset((0,)))
        case "scalar_tensor":
            return Dims((), ((),))
        case "mv":
            return Dims(((0, 2), (2,)), ((0,),), summed=frozenset((2,)))
        case "bmm":
            return Dims(((0, 1, 3), (0, 3, 2)), ((0, 1, 2),), summed=frozenset((3,)))
        case "addmm" | "baddbmm":
            assert shape is not None
            out, between = _all(shape), len(shape)
            left, right = (*out[:-1], between), (*out[:-2], between, out[-1])
            return Dims((_aligned(shapes[0], shape), left, right), (out,), summed=frozenset((between,)))
        case "t":
            return Dims((x,), (x[::-1],))
        case "permute":
            return Dims((x,), (tuple([x[dim] for dim in arguments[1]]),))
        case "transpose":
            order, one, two = list(x), arguments[1], arguments[2]
            order[one], order[two] = order[two], order[one]
            return Dims((x,), (tuple(order),))
        case "unsqueeze":
            at = arguments[1] % (len(x) + 1)
            return Dims((x,), ((*x[:at], len(x), *x[at:]),))
        case "squeeze":
            asked = x if len(arguments) < 2 else arguments[1]
            gone = [dim % max(len(x), 1) for dim in ((asked,) if isinstance(asked, int) else asked)]
            return Dims((x,), (tuple([dim for dim in x if dim not in gone or shapes[0][dim] != 1]),))
        case "expand":
            assert shape is not None
            return Dims((_aligned(shapes[0], shape),), (_all(shape),), sizes=1)
        case "select":
            at = arguments[1] % len(x)
            return Dims((x,), ((*x[:at], *x[at + 1 :]),), mixed=frozenset((at,)))
        case "_c10d_functional.all_gather_into_tensor" | "_c10d_functional.reduce_scatter_tensor":
            return _other_length(x, 0)
        case "slice":
            return _other_length(x, arguments[1] % len(x))
        case "slice_backward":
            assert shape is not None
            found = _other_length(x, arguments[2] % len(x))
            return Dims(found.reads, found.makes, mixed=found.mixed, sizes=1)
        case "slice_scatter":
            narrow = _other_length(_all(shapes[1]), arguments[2] % len(shapes[1]))
            return Dims((*narrow.makes, *narrow.reads), narrow.makes, mixed=narrow.mixed)
        case "select_backward":
            assert shape is not None
            out, at = _all(shape), arguments[2] % len(shape)
            return Dims(((*out[:at], *out[at + 1 :]),), (out,), mixed=frozenset((at,)), sizes=1)
        case "constant_pad_nd":
            padded = {len(x) - 1 - at // 2 for at, pad in enumerate(arguments[1]) if pad}
            return Dims((x,), (x,), mixed=frozenset(padded))
        case "cat":
            at = arguments[1] % len(x)
            others = [(*x[:at], len(x) + 1 + each, *x[at + 1 :]) for each in range(len(shapes))]
            whole = (*x[:at], at, *x[at + 1 :])
            return Dims(tuple(others), (whole,), mixed=frozenset((at, *(each[at] for each in others))))
        case "split" | "split_with_sizes":
            at = arguments[2] % len(x)
            sizes = arguments[1]
            count = len(sizes) if isinstance(sizes, tuple) else -(-shapes[0][at] // sizes)
            return Dims((x,), ((*x[:at], len(x), *x[at + 1 :]),) * count, mixed=frozenset((at, len(x))))
        case "gather" | "index_select":
            at = arguments[1] % len(x)
            index = (*x[:at], len(x), *x[at + 1 :])
            if name.endswith("index_select"):
                return Dims((x, (len(x),)), (index,), mixed=frozenset((at,)))
            fits = _same(shapes[0], shapes[1], at)
            return Dims((x, index), (index,), mixed=frozenset((at,))) if fits else None
        case "scatter" | "scatter_add":
            at = arguments[1] % len(x)
            index = (*x[:at], len(x), *x[at + 1 :])
            fits = all(_same(shapes[0], each, at) for each in shapes[1:])
            reads = (x, *(index for _ in shapes[1:]))
            return Dims(reads, (x,), mixed=frozenset((at, len(x)))) if fits else None
        case "embedding":
            out = tuple(range(len(shapes[1])))
            return Dims(((98, 99), out), ((*out, 99),), mixed=frozenset((98,)))
        case "nll_loss_forward":
            out = () if arguments[3] else (0,)
            weight = ((1,),) if len(shapes) > 2 else ()
            summed = frozenset((0,)) if arguments[3] else frozenset[int]()
            return None if len(x) != 2 else Dims((x, (0,), *weight), (out, ()), summed, frozenset((1,)))
        case "nll_loss_backward":
            weight = ((1,),) if len(shapes) > 4 else ()
            gradient = (0,) if shapes[0] else ()
            if len(shapes[1]) != 2:
                return None
            return Dims((gradient, (0, 1), (0,), *weight, ()), ((0, 1),), mixed=frozenset((1,)))
        case "topk" | "sort":
            at = arguments[2 if name.endswith("topk") else 1] % len(x)
            out = (*x[:at], len(x), *x[at + 1 :])
            return Dims((x,), (out, out), mixed=frozenset((at, len(x))))
        case "native_layer_norm":
            lead = len(x) - len(arguments[1])
            stats = (*x[:lead], *([NONE] * len(arguments[1])))
            return Dims((x, *(x[lead:] for _ in shapes[1:])), (x, stats, stats), mixed=frozenset(x[lead:]))
        case "native_layer_norm_backward":
            lead = len(x) - len(arguments[2])
            stats = (*x[:lead], *([NONE] * len(arguments[2])))
            rest = tuple([x[lead:] for _ in shapes[4:]])
            reads, mixed = (x, x, stats, stats, *rest), frozenset(x[lead:])
            return Dims(reads, (x, x[lead:], x[lead:]), frozenset(x[:lead]), mixed)
    return None


def _all(shape: Shape) -> Labels:
    return tuple(range(len(shape)))


def _aligned(shape: Shape, result: Shape) -> Labels:
    """The labels of an input that is repeated where it has a length of 1, or no such dimension."""
    shift = len(result) - len(shape)
    return tuple([dim + shift if length == result[dim + shift] else NONE for dim, length in enumerate(shape)])


def _same(one: Shape, other: Shape, but: int) -> bool:
    return len(one) == len(other) and all(a == b for at, (a, b) in enumerate(zip(one, other, strict=True)) if at != but)


def _other_length(x: Labels, at: int) -> Dims:
    return Dims((x,), ((*x[:at], len(x), *x[at + 1 :]),), mixed=frozenset((at, len(x))))


def _indexed(
    target: str, arguments: tuple[Any, ...], shape: Shape, shapes: Sequence[Shape], dtypes: Sequence[str]
) -> Dims | None:
    """One element of each row, which the first index counts; or, where a mask says so, one number in its place."""
    (own, *indices), x, is_put = shapes, _all(shapes[0]), target.startswith("aten.index_put")
    new = indices.pop() if is_put else shape
    if len(arguments[1]) != len(indices) or not indices:
        return None
    if is_put and dtypes[1] == "bool":
        masks = len(indices) == 1 and own[: len(indices[0])] == indices[0] and not new
        return Dims((x, x[: len(indices[0])], ()), (x,)) if masks else None
    length, picked = own[:1], x[:1] + x[len(indices) :]
    if dtypes[1] != COUNTING or "bool" in dtypes[2:] or any(each != length for each in indices):
        return None
    if new != tuple([own[dim] for dim in picked]) and (not is_put or new):
        return None
    read, mixed = (x, (NONE,), *(x[:1] for _ in indices[1:])), frozenset(x[1 : len(indices)])
    return Dims((*read, picked if new else ()), (x,), mixed=mixed) if is_put else Dims(read, (picked,), mixed=mixed)


def _reduction(target: str, arguments: tuple[Any, ...], x: Labels) -> Dims:
    at, keep = _REDUCING[target]
    given = arguments[at] if at >= 0 else None
    dims = x if given is None or given == () else given if isinstance(given, tuple) else (given,)
    gone = frozenset(x[dim] for dim in dims)
    kept = bool(arguments[keep]) if keep >= 0 else False
    out = tuple([NONE if dim in gone else dim for dim in x if kept or dim not in gone])
    makes = (out, out) if target in _PAIRS else (out,)
    if target.startswith(_ADDING):
        return Dims((x,), makes, summed=gone, is_mean="mean" in target)
    return Dims((x,), makes, mixed=gone)


def _elementwise_loss(
    name: str, arguments: tuple[Any, ...], shapes: Sequence[Shape], shape: Shape | None
) -> Dims | None:
    """A loss of two tensors of one shape: element by element, or summed. A mean's backward divides by the number of
    elements, which a slice has fewer of."""
    backward = name in _LOSSES_BACK
    how = next(each for each in arguments[2:] if type(each) is int)
    whole = max(shapes, key=len)
    out = _all(whole)
    reads = tuple([_aligned(each, whole) if each else () for each in shapes])
    if backward:
        return Dims(reads, (out,)) if how != 1 else None
    return Dims(reads, (out,)) if how == 0 else Dims(reads, ((),), frozenset(out), is_mean=how == 1)
