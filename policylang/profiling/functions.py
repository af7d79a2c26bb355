"""Operators that compute more than they move: what they reach in bytes a second, where a stream reaches more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from policylang.profiling.operands import Operands
from policylang.profiling.trials import Run, Trial

ROWS = {"cpu": 1024, "cuda": 2**16}
COLUMNS = 1024
CHANNELS, EDGE = 64, 32
"""Of the same values as images."""
BEFORE = "function: "

Call = Callable[[Tensor, Tensor, Tensor, Tensor], object]
"""Of two matrices, a row and a column."""
_aten = torch.ops.aten
_DTYPE = torch.float32


def _batch_norm(x: Tensor, y: Tensor, row: Tensor, mean: Tensor) -> object:
    return _aten._native_batch_norm_legit_functional.default(_images(x), *[row[:CHANNELS]] * 4, True, 0.1, 1e-5)


def _batch_norm_backward(x: Tensor, y: Tensor, row: Tensor, mean: Tensor) -> object:
    scale, moments = row[:CHANNELS], mean.view(-1)[:CHANNELS]
    flags = [True, True, True]
    return _aten.native_batch_norm_backward.default(
        _images(x), _images(y), scale, scale, scale, moments, moments, True, 1e-5, flags
    )


def _group_norm(x: Tensor, y: Tensor, row: Tensor, mean: Tensor) -> object:
    scale, (count, *_) = row[:CHANNELS], _images(x).shape
    return _aten.native_group_norm.default(_images(x), scale, scale, count, CHANNELS, EDGE**2, 8, 1e-5)


def _pool(x: Tensor, y: Tensor, row: Tensor, mean: Tensor) -> object:
    return _aten.max_pool2d_with_indices.default(_images(x), [3, 3], [2, 2], [1, 1])


def _images(x: Tensor) -> Tensor:
    return x.view(-1, CHANNELS, EDGE, EDGE)


def _norm_backward(x: Tensor, y: Tensor, row: Tensor, mean: Tensor) -> object:
    return _aten.native_layer_norm_backward.default(x, y, [COLUMNS], mean, mean, row, row, [True, True, True])


def _of_one(name: str) -> tuple[float, Call]:
    call = getattr(_aten, name).default
    return 2.0, lambda x, y, row, mean: call(x)


def _of_two(name: str) -> tuple[float, Call]:
    call = getattr(_aten, name).default
    return 3.0, lambda x, y, row, mean: call(x, y)


_ONE = ("tanh", "exp", "sigmoid", "silu", "gelu", "erf", "sin", "cos", "log1p", "rsqrt", "relu")
_TWO = ("gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward")
FUNCTIONS: dict[str, tuple[float, Call]] = {
    **{name: _of_one(name) for name in _ONE},
    **{name: _of_two(name) for name in _TWO},
    "pow": (2.0, lambda x, y, row, mean: _aten.pow.Tensor_Scalar(x, 3.0)),
    "sum": (1.0, lambda x, y, row, mean: _aten.sum.dim_IntList(x, [0])),
    "mean": (1.0, lambda x, y, row, mean: _aten.mean.dim(x, [-1])),
    "_softmax": (2.0, lambda x, y, row, mean: _aten._softmax.default(x, -1, False)),
    "_log_softmax": (2.0, lambda x, y, row, mean: _aten._log_softmax.default(x, -1, False)),
    "_softmax_backward_data": (3.0, lambda x, y, row, mean: _aten._softmax_backward_data.default(x, y, -1, _DTYPE)),
    "_log_softmax_backward_data": (
        3.0,
        lambda x, y, row, mean: _aten._log_softmax_backward_data.default(x, y, -1, _DTYPE),
    ),
    "native_layer_norm": (2.0, lambda x, y, row, mean: _aten.native_layer_norm.default(x, [COLUMNS], row, row, 1e-5)),
    "native_layer_norm_backward": (3.0, _norm_backward),
    "_native_batch_norm_legit_functional": (2.0, _batch_norm),
    "native_batch_norm_backward": (3.0, _batch_norm_backward),
    "native_group_norm": (2.0, _group_norm),
    "max_pool2d_with_indices": (1.75, _pool),  # a quarter of the values, with a position of eight bytes each
    "native_dropout": (2.25, lambda x, y, row, mean: _aten.native_dropout.default(x, 0.1, True)),
}
"""By name without overload: how many times the bytes of its first argument it reads and writes, and the call."""


def functions(operands: Operands) -> Iterator[Trial]:
    """Trials whose work is in bytes read and written, each under :data:`BEFORE` and the name of its operator; the
    stream that they are held against is ``mul``, measured beside them."""
    rows = ROWS[operands.device.type]
    stream: tuple[float, Call] = (2.0, lambda x, y, row, mean: _aten.mul.Tensor(x, 2.0))
    calls = {"mul": stream, **FUNCTIONS}
    for name, (times, call) in calls.items():
        work = times * rows * COLUMNS * 4
        yield Trial(f"operator {name}", f"{BEFORE}{name}", work, partial(_prepare, operands, rows, call), name)


def _prepare(operands: Operands, rows: int, call: Call) -> Run:
    x, y, row, mean = operands.of(torch.float32, (rows, COLUMNS), (rows, COLUMNS), (COLUMNS,), (rows, 1))
    return lambda: call(x, y, row, mean)
