"""The trials by family: products, streams of bytes, attention and convolutions, operators, fused chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from policylang.profiling.trials import Operands, Run, Trial

_aten = torch.ops.aten
_DTYPE = torch.float32
DTYPES = (_DTYPE, torch.bfloat16, torch.float16, torch.float64)
EDGES = {"cpu": (32, 64, 128, 256, 512, 1024, 2048), "cuda": (128, 256, 512, 1024, 2048, 4096, 8192, 16384)}
"""Edges of a square product: each does eight times the work of the one before it."""

Shapes = Callable[[int], tuple[Sequence[int], Sequence[int]]]
FAMILIES: dict[str, tuple[Shapes, Callable[[Tensor, Tensor], Tensor]]] = {
    "square": (lambda n: ((n, n), (n, n)), torch.mm),
    "linear": (lambda n: ((4 * n, n // 2), (n // 2, n // 2)), lambda tokens, weight: torch.mm(tokens, weight.t())),
    "gradient": (lambda n: ((4 * n, n // 2), (4 * n, n // 2)), lambda grown, tokens: torch.mm(grown.t(), tokens)),
    "batched": (lambda n: ((8, n // 2, n // 2), (8, n // 2, n // 2)), torch.bmm),
}
"""Shapes by the edge n, and the product. Each does 2 n³ operations."""


def products(operands: Operands) -> Iterator[Trial]:
    """Trials whose work is in FLOPs, under the name of their dtype."""
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for family, (shapes, product) in FAMILIES.items():
            for n in EDGES[operands.device.type]:
                prepare = operands.prepared(product, dtype, *shapes(n))
                yield Trial(f"{name} product, {family}", name, 2.0 * n**3, prepare, f"{name} {family}")


STREAM, OVERHEAD, TO_HOST, FROM_HOST = "stream", "overhead", "to host", "from host"
STREAM_SIZES = {"cpu": [4.0**i for i in range(7, 15)], "cuda": [4.0**i for i in range(8, 17)]}
"""Bytes that one operator reads and writes: 16 KiB to 256 MiB, 64 KiB to 4 GiB."""
AFAR = 2**28
"""Bytes over which operands, and the kept results, are spread: more than caches hold."""
MOST_PLACES = 2048
"""More tensors at once would be a matter for Python's garbage collector."""
HOST_BYTES = 2**27


def streams(operands: Operands) -> Iterator[Trial]:
    """Trials whose work is in bytes read and written; of the overhead, in kernels. They call aten's operators, as a
    graph does: what Python adds to each call is part of it."""
    add, prepared = _aten.add.Tensor, operands.prepared
    sizes = STREAM_SIZES[operands.device.type]
    for size in sizes:
        yield Trial("copy", STREAM, size, prepared(_aten.clone.default, _DTYPE, (int(size / 8),)), "copy")
    for size in sizes:
        yield Trial("add", STREAM, size, prepared(add, _DTYPE, (int(size / 12),), (int(size / 12),)), "add")
    for size in sizes:
        yield Trial("add, from afar", STREAM, size, partial(_from_afar, operands, size), "add, from afar")
    yield Trial("smallest kernel", OVERHEAD, 1, prepared(add, _DTYPE, (16,), (16,)))


def host_copies(operands: Operands) -> Iterator[Trial]:
    """Trials whose work is in bytes copied; pinned memory on a GPU's host, and on a CPU a plain copy."""
    size = HOST_BYTES if operands.device.type == "cuda" else HOST_BYTES // 4
    yield Trial("copy to the host", TO_HOST, size, partial(_host_copy, operands, size, back=False))
    yield Trial("copy from the host", FROM_HOST, size, partial(_host_copy, operands, size, back=True))


def _from_afar(operands: Operands, size: float) -> Run:
    """Operands that no cache holds any more and results that are kept, as in a training step."""
    length = int(size / 12)
    places = min(MOST_PLACES, max(2, int(AFAR / 4 / length)))
    (buffer,) = operands.of(torch.float32, (places * length,))
    parts = buffer.split(length)
    kept: list[object] = []
    at = 0

    def run() -> None:
        nonlocal at
        kept.append(torch.ops.aten.add.Tensor(parts[at], parts[at - 1]))
        at = (at + 2) % places
        if len(kept) >= places:
            kept.clear()

    return run


def _host_copy(operands: Operands, size: int, *, back: bool) -> Run:
    (value,) = operands.of(_DTYPE, (size // 4,))
    if operands.device.type == "cpu":
        return lambda: value.to("cpu", copy=True)
    host = torch.empty(size // 4, pin_memory=True)
    source, target = (host, value) if back else (value, host)
    return lambda: target.copy_(source, non_blocking=True)


ATTENTION, CONVOLUTION = "attention", "convolution"
HEADS = {"cpu": ((2, 8, 256, 64), (2, 8, 512, 64)), "cuda": ((4, 16, 2048, 128), (2, 16, 4096, 128))}
"""Batch, heads, tokens and the width of a head: queries, keys and values."""
IMAGES = {"cpu": (4, 28), "cuda": (64, 56)}
"""Batch and edge of the images."""
KERNELS = ((128, 128, 3), (256, 64, 1), (64, 256, 1))
"""Channels in and out, and the edge of the kernel: those of a residual network's blocks."""


def shares(operands: Operands, dtype: torch.dtype) -> Iterator[Trial]:
    """Trials whose work is in FLOPs as :mod:`policylang.operators.work` counts them, named after what they do."""
    kind = operands.device.type
    # a decoder's: the count knows no mask, so what a kernel saves by one is part of what it reaches
    causal = partial(functional.scaled_dot_product_attention, is_causal=True)
    for shape in HEADS[kind]:
        yield from _both_ways(operands, dtype, ATTENTION, causal, 4.0 * prod(shape) * shape[2], 2.5, (shape,) * 3)
    batch, edge = IMAGES[kind]
    for channels, out, kernel in KERNELS:
        flops = 2.0 * batch * out * edge**2 * channels * kernel**2
        convolve = partial(functional.conv2d, padding=kernel // 2)
        shapes = ((batch, channels, edge, edge), (out, channels, kernel, kernel))
        yield from _both_ways(operands, dtype, CONVOLUTION, convolve, flops, 2.0, shapes)


def _both_ways(
    operands: Operands,
    dtype: torch.dtype,
    name: str,
    call: Callable[..., Tensor],
    flops: float,
    backward: float,
    shapes: Sequence[Sequence[int]],
) -> Iterator[Trial]:
    """``backward``: FLOPs of the backward, as a multiple of the forward's ``flops``."""

    def prepare_backward() -> Run:
        inputs = [each.detach().requires_grad_() for each in operands.of(dtype, *shapes)]
        with torch.enable_grad():
            result = call(*inputs)
        gradient = result.detach().clone()
        return lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True)

    yield Trial(name, name, flops, operands.prepared(call, dtype, *shapes))
    yield Trial(f"{name}, backward", name, flops * backward, prepare_backward)


FUNCTION_ROWS = {"cpu": 1024, "cuda": 2**16}
COLUMNS = 1024
CHANNELS, EDGE = 64, 32
"""The shape of the same values as images."""
BEFORE = "function: "

Call = Callable[[Tensor, Tensor, Tensor, Tensor], object]
"""A call on two matrices, a row and a column."""


def _batch_norm_backward(x: Tensor, y: Tensor, row: Tensor, mean: Tensor) -> object:
    scale, moments = row[:CHANNELS], mean.view(-1)[:CHANNELS]
    flags = [True, True, True]
    return _aten.native_batch_norm_backward.default(
        _images(x), _images(y), scale, scale, scale, moments, moments, True, 1e-5, flags
    )


def _group_norm(x: Tensor, y: Tensor, row: Tensor, mean: Tensor) -> object:
    scale, (count, *_) = row[:CHANNELS], _images(x).shape
    return _aten.native_group_norm.default(_images(x), scale, scale, count, CHANNELS, EDGE**2, 8, 1e-5)


def _images(x: Tensor) -> Tensor:
    return x.view(-1, CHANNELS, EDGE, EDGE)


def _of_first(count: int, name: str) -> tuple[float, Call]:
    call = getattr(_aten, name).default
    return count + 1.0, lambda *operands: call(*operands[:count])


_ONE = ("tanh", "exp", "sigmoid", "silu", "gelu", "erf", "sin", "cos", "log1p", "rsqrt", "relu")
_TWO = ("gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward")
FUNCTIONS: dict[str, tuple[float, Call]] = {
    **{name: _of_first(1, name) for name in _ONE},
    **{name: _of_first(2, name) for name in _TWO},
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
    "native_layer_norm_backward": (
        3.0,
        lambda x, y, row, mean: _aten.native_layer_norm_backward.default(
            x, y, [COLUMNS], mean, mean, row, row, [True, True, True]
        ),
    ),
    "_native_batch_norm_legit_functional": (
        2.0,
        lambda x, y, row, mean: _aten._native_batch_norm_legit_functional.default(
            _images(x), *[row[:CHANNELS]] * 4, True, 0.1, 1e-5
        ),
    ),
    "native_batch_norm_backward": (3.0, _batch_norm_backward),
    "native_group_norm": (2.0, _group_norm),
    "max_pool2d_with_indices": (  # a quarter of the values, with a position of eight bytes each
        1.75,
        lambda x, y, row, mean: _aten.max_pool2d_with_indices.default(_images(x), [3, 3], [2, 2], [1, 1]),
    ),
    "native_dropout": (2.25, lambda x, y, row, mean: _aten.native_dropout.default(x, 0.1, True)),
}
"""Name without overload to the multiple of its first argument's bytes that it reads and writes, and the call."""


def functions(operands: Operands) -> Iterator[Trial]:
    """Trials whose work is in bytes read and written, each under :data:`BEFORE` and the name of its operator; the
    stream that they are compared with is ``mul``, measured beside them."""
    rows = FUNCTION_ROWS[operands.device.type]
    stream: tuple[float, Call] = (2.0, lambda x, y, row, mean: _aten.mul.Tensor(x, 2.0))
    for name, (times, call) in {"mul": stream, **FUNCTIONS}.items():
        prepare = operands.prepared(call, _DTYPE, (rows, COLUMNS), (rows, COLUMNS), (COLUMNS,), (rows, 1))
        yield Trial(f"operator {name}", f"{BEFORE}{name}", times * rows * COLUMNS * 4, prepare, name)


FUSED, UNFUSED = "fused", "unfused"
CHAIN_ROWS = {"cpu": 2048, "cuda": 2**15}


def _norm(x: Tensor, y: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """A residual sum and a root-mean-square norm: a decoder block has two."""
    added = x + y
    return added, added * torch.rsqrt(added.square().mean(-1, keepdim=True) + 1e-6) * row


def _rotated(x: Tensor, y: Tensor, row: Tensor) -> Tensor:
    """Rotary embeddings: swaps the two parts of the last dimension, two products and a sum."""
    left, right = x.chunk(2, -1)
    return x * row + torch.cat((-right, left), -1) * y


def _gated(x: Tensor, y: Tensor, row: Tensor) -> Tensor:
    """A gate with its product, a bias and a scale."""
    return torch.relu(x + row) * y * 0.5


CHAINS = (_norm, _rotated, _gated)


def fused(operands: Operands) -> Iterator[Trial]:
    """Trials of the chains, compiled and in eager."""
    rows = CHAIN_ROWS[operands.device.type]
    for chain in CHAINS:
        name = chain.__name__.removeprefix("_")
        for how, key, call in (("in eager", UNFUSED, chain), ("compiled", FUSED, _compiled(chain))):
            prepare = operands.prepared(call, _DTYPE, (rows, COLUMNS), (rows, COLUMNS), (COLUMNS,))
            yield Trial(f"{name} {how}", key, 1, prepare)


@cache
def _compiled(chain: Any) -> Any:
    return torch.compile(chain, fullgraph=True)
