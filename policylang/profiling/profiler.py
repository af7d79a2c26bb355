"""One measurement of a machine, from its trials to the text of a profile.

Collectives are timed by bytes and size of the group, by all ranks of a job together: every rank calls the same, in the
same order, and all take the slowest rank's time of each, which decides how long it goes on. Started by torchrun, ranks
of one machine are also measured among themselves.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import floor, log10
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from torch import Tensor

from policylang.language.devices.profile import CollectiveTimes, DeviceProfile, Network, Rate
from policylang.profiling import trials

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
MOST_SHARE = {trials.ATTENTION: 1.0, trials.CONVOLUTION: 10.0}
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


def measured(timings: trials.Timings, name: str, dtype: str, capacity: int | None = None) -> MeasuredDevice | None:
    """The figures, to three digits; None where no products or no stream of bytes could be timed. ``dtype`` is that in
    which attention and convolutions were measured."""
    overhead = _median(timing.seconds for _, timing in timings.of_key(trials.OVERHEAD))
    dtypes = [str(each).removeprefix("torch.") for each in trials.DTYPES]
    compute = {each: rate for each in dtypes if (rate := _rate(timings.of_key(each), overhead)) is not None}
    bandwidth = _rate(timings.of_key(trials.STREAM), overhead)
    if bandwidth is None or not compute:
        return None
    of_key, kinds = timings.of_key, (trials.FUSED, trials.UNFUSED)
    fused_seconds, unfused = (sum(timing.seconds for _, timing in of_key(key)) for key in kinds)
    copies = (trials.TO_HOST, trials.FROM_HOST)
    rates = [trial.work / timing.seconds for key in copies for trial, timing in of_key(key)]
    spreads = [timing.spread for timing in timings.of.values() if len(timing.rounds) > 1]
    profile = DeviceProfile(
        name=name,
        compute=compute,
        bandwidth=bandwidth,
        pointwise=rounded(min(1.0, fused_seconds / unfused)) if fused_seconds and unfused else 1.0,
        attention=_share(timings, trials.ATTENTION, compute.get(dtype), overhead),
        convolution=_share(timings, trials.CONVOLUTION, compute.get(dtype), overhead),
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


def _rate(timed: Sequence[tuple[trials.Trial, trials.Timing]], overhead: float) -> Rate | None:
    """The rate beyond the overhead by size, without sizes that are mostly overhead; the largest is always there."""
    sizes: dict[float, list[float]] = defaultdict(list)
    for trial, timing in timed:
        sizes[trial.work].append(timing.seconds)
    points = []
    for size, seconds in sorted(sizes.items()):
        mean = statistics.fmean(seconds)
        if mean > 2 * overhead or size == max(sizes):
            points.append((size, rounded(size / max(mean - overhead, mean / 2))))
    return Rate(tuple(points)) if points else None


def _share(timings: trials.Timings, kind: str, rate: Rate | None, overhead: float) -> float:
    """The share of the rate of products with as many FLOPs, the mean over sizes, forward and backward."""
    if rate is None:
        return 1.0
    longer = ((trial, timing.seconds - overhead) for trial, timing in timings.of_key(kind) if timing.seconds > overhead)
    reached = [trial.work / rate.at(trial.work) / seconds for trial, seconds in longer]
    return min(MOST_SHARE[kind], rounded(statistics.geometric_mean(reached))) if reached else 1.0


def _operators(timings: trials.Timings, overhead: float) -> dict[str, float]:
    def reached(name: str) -> float:
        timed = timings.of_key(trials.BEFORE + name)
        rates = (trial.work / max(timing.seconds - overhead, timing.seconds / 2) for trial, timing in timed)
        return max(rates, default=0)

    stream = reached("mul")
    rates = {name: reached(name) for name in sorted(trials.FUNCTIONS)}
    return {f"aten.{name}": rounded(rate) for name, rate in rates.items() if 0 < rate < SLOW * stream}


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0


MIB = 2**20
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""MiB of input on each rank."""
RUNS = 5
MOST_MEMORY = {"cpu": 2**30, "cuda": 2**33}
"""Bytes that a rank's inputs and outputs may take."""

COLLECTIVES: dict[str, tuple[Callable[[int, int], int], Callable[[Tensor, Tensor, Any], object]]] = {
    "all_gather_into_tensor": (
        lambda values, size: values * size,
        lambda given, taken, group: dist.all_gather_into_tensor(taken, given, group),
    ),
    "reduce_scatter_tensor": (
        lambda values, size: values // size,
        lambda given, taken, group: dist.reduce_scatter_tensor(taken, given, group=group),
    ),
    "all_reduce": (lambda values, size: 0, lambda given, _, group: dist.all_reduce(given, group=group)),
    "all_to_all_single": (
        lambda values, size: values,
        lambda given, taken, group: dist.all_to_all_single(taken, given, group=group),
    ),
}
"""Output elements per input element on a rank, by the size of the group, and the call."""


@frozen
class MeasuredGroup:
    """The collectives of groups of one size."""

    name: str
    """``1`` inside a machine, ``0`` across machines, as tables have it."""
    network: Network


def measured_groups(device: torch.device, budget: float, progress: Callable[[str], object]) -> list[MeasuredGroup]:
    """Measure the ranks of this machine, where there are others, and all ranks; narrow groups first. Empty in a job of
    one rank. To be called on every rank of the default process group. ``budget``: seconds, about."""
    ranks = dist.get_world_size()
    if ranks < 2:
        return []
    inside = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    groups: list[tuple[str, int, Any]] = []
    if 1 < inside < ranks and ranks % inside == 0:
        groups.append(("1", inside, dist.new_subgroups(inside)[0]))
    groups.append(("0", ranks, dist.group.WORLD))
    each = budget / len(groups) / len(COLLECTIVES)
    found = []
    for name, size, group in groups:
        points = {}
        for collective in COLLECTIVES:
            progress(f"{collective} of {size} ranks")
            with warnings.catch_warnings():  # newer torch has other names for some, and says so
                warnings.simplefilter("ignore", FutureWarning)
                points[collective] = list(_timed_sizes(device, group, size, collective, each))
        if times := in_a_table(points, size):
            bandwidth, latency = ring(times)
            network = Network(size if size < ranks else None, bandwidth, latency, times)
            found.append(MeasuredGroup(name, network))
    return found


def in_a_table(points: Mapping[str, Sequence[tuple[float, float]]], ranks: int) -> tuple[CollectiveTimes, ...]:
    """The rows of a table: to a tenth of a microsecond, and as many sizes for each as for the shortest."""
    measured = {collective: each for collective, each in points.items() if each}
    sizes = min(map(len, measured.values()), default=0)
    rows = {
        collective: tuple((size, float(milliseconds(seconds)) * 1e-3) for size, seconds in each[:sizes])
        for collective, each in measured.items()
    }
    return tuple(CollectiveTimes(collective, ranks, row) for collective, row in rows.items())


def milliseconds(seconds: float) -> str:
    return f"{max(seconds * 1e3, 1e-4):.4f}"


def _timed_sizes(
    device: torch.device, group: Any, size: int, collective: str, budget: float
) -> Iterator[tuple[float, float]]:
    start, last = time.monotonic(), 0.0
    gets, call = COLLECTIVES[collective]
    for mib in SIZES:
        values = mib * MIB // 4 // size * size
        spent = _slowest(time.monotonic() - start, device)
        if values * 4 * (size + 1) > MOST_MEMORY[device.type] or spent + 2 * (RUNS + 1) * last > budget:
            return
        try:
            given, taken = (torch.ones(count, device=device) for count in (values, gets(values, size)))
            run = partial(call, given, taken, group)
            run()
        except (RuntimeError, NotImplementedError):  # the backend has none, on any rank
            return
        last = _slowest(min(_timed(run, device, group) for _ in range(RUNS)), device)
        yield float(mib * MIB), last


def _timed(run: Callable[[], object], device: torch.device, group: Any) -> float:
    dist.barrier(group)
    _synchronize(device)
    start = time.perf_counter()
    run()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float, device: torch.device) -> float:
    """The greatest of all ranks' seconds, the same on each."""
    told = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told.item())


def ring(times: Sequence[CollectiveTimes]) -> tuple[float | None, float]:
    """Bytes/s and seconds of latency by least squares over what a ring sends: for groups that were not measured."""
    sent: list[float] = []
    seconds: list[float] = []
    for each in times:
        share = (each.ranks - 1) / each.ranks
        for size, time_ in each.points:
            whole = size * each.ranks if "gather" in each.collective else size
            sent.append(whole * share * (2 if each.collective == "all_reduce" else 1))
            seconds.append(time_)
    if len(set(sent)) < 2:
        return (rounded(sent[0] / seconds[0]) if sent else None), 0.0
    slope, latency = statistics.linear_regression(sent, seconds)
    if slope <= 0:  # the noise of small sizes
        return rounded(sum(sent) / sum(seconds)), 0.0
    return rounded(1 / slope), rounded(max(latency, 0.0))


FIRST_LINE = "# Measured by `policylang profile`"
FIRST_COLUMNS = ("Group", "Group Size", "Collective")


def profile_lines(
    measured: MeasuredDevice, machine: str, compiled: bool, groups: Sequence[MeasuredGroup], table: str
) -> Iterator[str]:
    """The text of the file. ``machine`` describes the machine in a line; ``table`` is the file of the collectives."""
    profile, spread = measured.profile, measured.spread
    yield f"{FIRST_LINE}, for steps that run {'under torch.compile' if compiled else 'in eager'}."
    yield f"# {_one_line(machine)}"
    if spread.rounds > 1:
        yield f"# Medians of {spread.rounds} rounds: half of the timings are within ±{spread.middle:.1%}, all within"
        yield f"# ±{spread.worst:.0%}."
    else:
        yield "# One round: with more `--seconds`, medians of several, and how far they lie apart."
    yield f"name = {json.dumps(profile.name, ensure_ascii=False)}"
    yield ""
    yield "[compute]"
    yield "# Products of matrices: [FLOPs of one, FLOP/s]."
    for dtype, rate in profile.compute.items():
        yield f"{dtype} = {_points(rate)}"
    for what, why in measured.refused.items():
        yield f"# {what.removeprefix(trials.BEFORE)} was left out: {_one_line(why)}"
    yield "# The share of that rate that these reach."
    yield f"attention = {number(profile.attention)}"
    yield f"convolution = {number(profile.convolution)}"
    yield "# Seconds that each kernel takes whatever it does."
    yield f"overhead = {number(profile.overhead)}"
    yield ""
    yield "[memory]"
    yield "# Copies and sums: [bytes that one reads and writes, bytes/s]."
    yield f"bandwidth = {_points(profile.bandwidth)}"
    yield "# The share of the time of pointwise operators that is left where a compiler fuses them."
    yield f"pointwise = {number(profile.pointwise)}"
    if profile.capacity is not None:
        unit, scale = ("GiB", 2**30) if profile.capacity >= 2**30 else ("B", 1)
        yield f'capacity = "{profile.capacity / scale:.{1 if scale > 1 else 0}f} {unit}"'
    if profile.operators:
        yield ""
        yield "[operators]"
        yield "# Bytes/s, of those that compute more than they move."
        for name, reached in profile.operators.items():
            yield f"{name.removeprefix('aten.')} = {number(reached)}"
    if profile.host_bandwidth is not None:
        yield ""
        yield "[host]"
        yield f"bandwidth = {number(profile.host_bandwidth)}"
    for at, (network, group) in enumerate(zip(profile.networks, groups, strict=True)):
        yield ""
        if at == len(groups) - 1:
            yield f"# Groups of {network.times[0].ranks} ranks as measured; other sizes by what those reach."
        yield "[[network]]"
        if network.ranks is not None:
            yield f"ranks = {network.ranks}"
        if network.bandwidth is not None:
            yield f"bandwidth = {number(network.bandwidth)}"
            yield f"latency = {number(network.latency)}"
        yield f"times = {json.dumps(table, ensure_ascii=False)}"
        yield f'group = "{group.name}"'


def table_text(groups: Sequence[MeasuredGroup]) -> str:
    """The times of collectives, in the form that :mod:`policylang.language.devices.reading` reads."""
    rows = [(group.name, times) for group in groups for times in group.network.times]
    sizes = [size for size, _ in rows[0][1].points]
    head = (*FIRST_COLUMNS, *(f"{round(size / MIB)}MB (ms)" for size in sizes))
    body = [
        (name, str(times.ranks), times.collective, *(milliseconds(seconds) for _, seconds in times.points))
        for name, times in rows
    ]
    widths = [max(len(row[at]) for row in (head, *body)) for at in range(len(head))]
    lines = [head, tuple("-" * width for width in widths), *body]
    padded = (zip(line, widths, strict=True) for line in lines)
    return "".join("  ".join(word.rjust(width) for word, width in row) + "\n" for row in padded)


def number(figure: float) -> str:
    """Three digits in the unit of its thousands, as people write rates: ``102e9``, ``5.72e9``, ``2.05e-6``."""
    if 0.01 <= figure < 1000:
        return f"{figure:.3g}"
    power = 3 * floor(log10(figure) / 3) if figure > 0 else 0
    mantissa = float(f"{figure / 10.0**power:.3g}")
    return f"{mantissa:g}e{power}"


def _points(rate: Rate) -> str:
    return f"[{', '.join(f'[{size:.0f}, {number(figure)}]' for size, figure in rate.points)}]"


def _one_line(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)


Progress = Callable[[str], object]
ON_COLLECTIVES = 0.5
"""The share of the budget that collectives have in a job of several ranks."""


@frozen(eq=False)
class Profiled:
    """A measured profile with the texts of its files."""

    profile: DeviceProfile
    text: str
    """The text of the profile's file."""
    table: str
    """The text of the file of collectives beside it; empty in a job of one rank."""


def profiled(
    device: torch.device,
    name: str,
    table: str,
    *,
    compiled: bool = False,
    budget: float = 45.0,
    clock: trials.Clock | None = None,
    progress: Progress = lambda _: None,
) -> Profiled | None:
    """Measure this machine; None where neither a product nor a stream of bytes could be timed.

    With a default process group of several ranks, to be called on each of them: the first measures the device while the
    others wait, then all measure their collectives, and all have the same result.

    Args:
        table: the name of the file of collectives.
        compiled: for steps under torch.compile: what its fusion leaves of pointwise operators is measured as well.
        budget: seconds, about; the first round is whole in any case, and what a compiler takes for it comes on top.
    """
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    on_collectives = budget * ON_COLLECTIVES if together else 0.0
    found: list[MeasuredDevice | None] = [None]
    if not together or dist.get_rank() == 0:
        operands = trials.Operands(device)
        dtype = "bfloat16" if device.type == "cuda" else "float32"  # what most steps compute in there
        asked = [
            *trials.products(operands),
            *trials.streams(operands),
            *trials.host_copies(operands),
            *trials.shares(operands, getattr(torch, dtype)),
            *trials.functions(operands),
            *(trials.fused(operands) if compiled else ()),
        ]
        with torch.no_grad():
            timings = trials.measure(asked, clock or trials.DeviceClock(device), budget - on_collectives, progress)
        found = [measured(timings, name, dtype, capacity(device))]
    groups: Sequence[MeasuredGroup] = ()
    if together:
        dist.broadcast_object_list(found, 0)
        groups = measured_groups(device, on_collectives, progress)
    if found[0] is None:
        return None
    networks = tuple(group.network for group in groups)
    made = evolve(found[0], profile=evolve(found[0].profile, networks=networks))
    lines = profile_lines(made, machine_description(device), compiled, groups, table)
    return Profiled(made.profile, "\n".join(lines) + "\n", table_text(groups) if groups else "")
