"""Trials, the tensors that they run on, the clock that times them, and their rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Protocol

import torch
from attrs import define, field, frozen
from torch import Tensor

Run = Callable[[], object]
MOST_ROUNDS = 7


@frozen(eq=False)
class Trial:
    """One operation of one size."""

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
    """Times a trial."""

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
    """The timings of the trials."""

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

    A single run may take a four hundredth of the budget: the sizes of a ladder end there.
    """
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
    """Times trials on a device, each after a run that is not counted.

    On a CPU with one thread it is the thread's own processor time, which others that use the machine leave alone; with
    several it is time at the wall. On a GPU two events on the stream, around runs that follow each other.
    """

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
