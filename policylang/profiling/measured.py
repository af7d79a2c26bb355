"""Turns timings into the figures of a device profile, and describes the machine."""

from __future__ import annotations

import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from attrs import field, frozen

from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.profiling.families import (
    ATTENTION,
    BEFORE,
    CONVOLUTION,
    DTYPES,
    FROM_HOST,
    FUNCTIONS,
    FUSED,
    OVERHEAD,
    STREAM,
    TO_HOST,
    UNFUSED,
)
from policylang.profiling.trials import Timing, Timings, Trial

_CGROUP = Path("/sys/fs/cgroup/memory.max")


def machine_description(device: torch.device) -> str:
    """One line: the processor or the GPU, the threads, and the version of torch. Nothing that names the host."""
    if device.type == "cuda":
        fast = torch.backends.cuda.matmul.allow_tf32
        parts = (torch.cuda.get_device_name(device), f"float32 products {'' if fast else 'not '}in TF32")
    else:
        threads = torch.get_num_threads()
        parts = (_processor(), f"{threads} thread{'s' * (threads != 1)}")
    return ", ".join((*parts, f"torch {torch.__version__}"))


def capacity(device: torch.device) -> int | None:
    """Bytes of memory: of the GPU, or of what this process may have of the machine's; down to a tenth of a GiB."""
    if device.type == "cuda":
        return _in_tenths(int(torch.cuda.get_device_properties(device).total_memory))
    limits: list[int] = []
    with suppress(AttributeError, OSError, ValueError):  # no such question on this system
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(OSError, ValueError):  # `max` where there is none
        limits.append(int(_CGROUP.read_text(encoding="ascii")))
    least = min((each for each in limits if each > 0), default=None)
    return None if least is None else _in_tenths(least)


def _in_tenths(size: int) -> int:
    tenths = size * 10 // 2**30
    return round(tenths / 10 * 2**30) if tenths >= 10 else size


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "processor"


SLOW = 0.8
"""An operator gets a separate rate if it reaches less than this share of a stream's."""
MOST_SHARE = {ATTENTION: 1.0, CONVOLUTION: 10.0}
"""The greatest shares that a profile may have."""


@frozen
class Spread:
    """The spread of the rounds of timings, as shares of their medians."""

    middle: float
    worst: float
    rounds: int


@frozen(eq=False)
class MeasuredDevice:
    """A profile and how it was measured."""

    profile: DeviceProfile
    spread: Spread
    refused: dict[str, str] = field(factory=dict)
    """Trials that the machine cannot do, with its error."""


def measured(timings: Timings, name: str, dtype: str, capacity: int | None = None) -> MeasuredDevice | None:
    """The figures, to three digits; None where no products or no stream of bytes could be timed.

    ``dtype`` is that in which attention and convolutions were measured.
    """
    overhead = _median(timing.seconds for _, timing in timings.of_key(OVERHEAD))
    dtypes = [str(each).removeprefix("torch.") for each in DTYPES]
    compute = {each: rate for each in dtypes if (rate := _rate(timings.of_key(each), overhead)) is not None}
    bandwidth = _rate(timings.of_key(STREAM), overhead)
    if bandwidth is None or not compute:
        return None
    fused, unfused = (sum(timing.seconds for _, timing in timings.of_key(key)) for key in (FUSED, UNFUSED))
    rates = [trial.work / timing.seconds for key in (TO_HOST, FROM_HOST) for trial, timing in timings.of_key(key)]
    spreads = [timing.spread for timing in timings.of.values() if len(timing.rounds) > 1]
    profile = DeviceProfile(
        name=name,
        compute=compute,
        bandwidth=bandwidth,
        pointwise=rounded(min(1.0, fused / unfused)) if fused and unfused else 1.0,
        attention=_share(timings, ATTENTION, compute.get(dtype), overhead),
        convolution=_share(timings, CONVOLUTION, compute.get(dtype), overhead),
        operators=_operators(timings, overhead),
        overhead=rounded(overhead),
        capacity=capacity,
        host_bandwidth=rounded(min(rates)) if rates else None,  # of the slower direction
    )
    spread = Spread(_median(spreads), max(spreads, default=0.0), timings.rounds)
    return MeasuredDevice(profile, spread, dict(timings.refused))


def rounded(figure: float) -> float:
    """To the three digits that a measurement is good for: a profile holds exactly what its text shows."""
    return float(f"{figure:.3g}")


def _rate(timed: Sequence[tuple[Trial, Timing]], overhead: float) -> Rate | None:
    """The rate beyond the overhead by size, all trials of one size together. A size that is mostly overhead is left
    out; the largest is always there."""
    sizes: dict[float, list[float]] = defaultdict(list)
    for trial, timing in timed:
        sizes[trial.work].append(timing.seconds)
    points = []
    for size, seconds in sorted(sizes.items()):
        mean = statistics.fmean(seconds)
        if mean > 2 * overhead or size == max(sizes):
            points.append((size, rounded(size / max(mean - overhead, mean / 2))))
    return Rate(tuple(points)) if points else None


def _share(timings: Timings, kind: str, products: Rate | None, overhead: float) -> float:
    """The share of the rate of products with as many FLOPs, the mean over sizes, forward and backward."""
    if products is None:
        return 1.0
    reached = [
        trial.work / products.at(trial.work) / (timing.seconds - overhead)
        for trial, timing in timings.of_key(kind)
        if timing.seconds > overhead
    ]
    return min(MOST_SHARE[kind], rounded(statistics.geometric_mean(reached))) if reached else 1.0


def _operators(timings: Timings, overhead: float) -> dict[str, float]:
    def reached(name: str) -> float:
        timed = timings.of_key(BEFORE + name)
        return max(
            (trial.work / max(timing.seconds - overhead, timing.seconds / 2) for trial, timing in timed), default=0
        )

    stream = reached("mul")
    return {f"aten.{name}": rounded(rate) for name in sorted(FUNCTIONS) if 0 < (rate := reached(name)) < SLOW * stream}


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0
