"""Trials: tensors, clock and rounds; by family: products, streams of bytes, attention, operators, fused chains."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from math import prod
from typing import Any, Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor
from torch.nn import functional

Run = Callable[[], object]
MOST_ROUNDS = 7


@frozen(eq=False)
class Trial:
    name: str
    """``float32 product, linear``: its name in messages."""
    key: str
    """The figure that it measures: ``float32``, ``stream``."""
    work: float
    """The work of one run: FLOPs, bytes, or kernels."""
    prepare: Callable[[], Run] = field(repr=False)
    """Makes its operands, and returns what is timed. Raises what torch raises where the machine cannot do it."""
    ladder: str = ""
    """Trials of one ladder differ in size alone, and rise: what follows one that takes too long is left out."""


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some moment, on a clock at the wall: what a budget is spent by."""

    def seconds(self, trial: Trial) -> float:
        """Seconds of one run on the device. Raises what torch raises where the machine cannot do it."""


@frozen
class Timing:
    """The seconds of one run of a trial, over the rounds."""

    rounds: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """The spread of the rounds as a share of their median: (most - least) / 2."""
        return (max(self.rounds) - min(self.rounds)) / 2 / self.seconds if self.seconds else 0.0


@define(eq=False)
class Timings:
    of: dict[Trial, Timing] = field(factory=dict)
    refused: dict[str, str] = field(factory=dict)
    """Keys that the machine cannot do in any size, with the first line of its error."""
    rounds: int = 0

    def of_key(self, key: str) -> list[tuple[Trial, Timing]]:
        return [(trial, timing) for trial, timing in self.of.items() if trial.key == key]


def measure(
    trials: Sequence[Trial], clock: Clock, budget: float, progress: Callable[[str], object] = lambda _: None
) -> Timings:
    """Time every trial in rounds, until the budget in seconds is spent or there were enough; the first round is whole.
    A single run may take a four hundredth of the budget: the sizes of a ladder end there."""
    start = clock.now()
    found = Timings()
    seconds: dict[Trial, list[float]] = {}
    ended: set[str] = set()
    refused: dict[str, str] = {}
    left: Iterable[Trial] = trials
    slowest = 0.0
    while found.rounds < MOST_ROUNDS:
        began = clock.now()
        if found.rounds and began - start + slowest > budget:
            break
        for trial in left:
            if found.rounds and clock.now() - start > budget:
                break
            if not found.rounds and _ends_before(trial, seconds, ended, budget):
                continue
            progress(f"round {found.rounds + 1}: {trial.name}")
            try:
                seconds.setdefault(trial, []).append(clock.seconds(trial))
            except (RuntimeError, NotImplementedError, AssertionError) as error:
                seconds.pop(trial, None)
                ended.add(trial.ladder)
                said = str(error).strip() or type(error).__name__
                refused.setdefault(trial.key, said.splitlines()[0][:120])
        left = list(seconds)
        found.rounds += 1
        slowest = max(slowest, clock.now() - began) if found.rounds > 1 else 0.0
    found.of = {trial: Timing(tuple(each)) for trial, each in seconds.items()}
    able = {trial.key for trial in found.of}
    found.refused = {key: said for key, said in refused.items() if key not in able}
    return found


def _ends_before(trial: Trial, seconds: dict[Trial, list[float]], ended: set[str], budget: float) -> bool:
    """True if a smaller trial of its ladder failed, or shows that this one takes too long."""
    if not trial.ladder:
        return False
    if trial.ladder in ended:
        return True
    before = [each for each in seconds if each.ladder == trial.ladder]
    return bool(before) and seconds[before[-1]][0] * trial.work / before[-1].work > budget / 400


@define(eq=False)
class Operands:
    """Tensors on a device, for one trial at a time: those of one call do not share memory, those of two do."""

    device: torch.device
    _buffers: dict[torch.dtype, Tensor] = field(factory=dict, repr=False)

    def of(self, dtype: torch.dtype, *shapes: Sequence[int]) -> list[Tensor]:
        sizes = [prod(shape) for shape in shapes]
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < sum(sizes):
            self._buffers.pop(dtype, None)  # the memory of both may not be there
            generator = torch.Generator(self.device).manual_seed(0)
            drawn = torch.randn(sum(sizes), generator=generator, device=self.device)
            buffer = self._buffers[dtype] = drawn.to(dtype)
        parts = buffer[: sum(sizes)].split(sizes)
        return [part.view(*shape) for part, shape in zip(parts, shapes, strict=True)]

    def prepared(self, call: Callable[..., object], dtype: torch.dtype, *shapes: Sequence[int]) -> Callable[[], Run]:
        """The ``prepare`` of a trial of a call on tensors of these shapes."""

        def prepare() -> Run:
            operands = self.of(dtype, *shapes)
            return lambda: call(*operands)

        return prepare


SAMPLE, SAMPLES = 1.5e-3, 3
"""Seconds that the runs of one sample take together, long beside what a clock costs; and of how many the least counts,
since whatever else a machine does only adds."""
MOST_RUNS = 4000


@define
class DeviceClock:
    """Times trials on a device, each after a run that is not counted. On a CPU with one thread it is the thread's own
    processor time, which others that use the machine leave alone; with several it is time at the wall. On a GPU two
    events on the stream, around runs that follow each other."""

    device: torch.device
    _runs: dict[str, int] = field(factory=dict, repr=False)

    def now(self) -> float:
        return time.monotonic()

    def seconds(self, trial: Trial) -> float:
        run = trial.prepare()
        sample = self._on_stream if self.device.type == "cuda" else _of_processor
        name = f"{trial.name} {trial.work}"
        run()  # compiles, chooses kernels, fills caches
        if name not in self._runs:
            once = min(sample(run, 1) for _ in range(SAMPLES))
            self._runs[name] = max(1, min(MOST_RUNS, round(SAMPLE / max(once, 1e-7))))
            if self._runs[name] == 1:
                return once
        return min(sample(run, self._runs[name]) for _ in range(SAMPLES))

    def _on_stream(self, run: Run, runs: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        start.record()
        for _ in range(runs):
            run()
        end.record()
        torch.cuda.synchronize(self.device)
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1e3 / runs


def _of_processor(run: Run, runs: int) -> float:
    clock: Callable[[], float] = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(runs):
        run()
    return (clock() - start) / runs


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
    tensors = (_images(x), _images(y), scale, scale, scale, moments, moments)
    return _aten.native_batch_norm_backward.default(*tensors, True, 1e-5, flags)


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
