"""Collectives by bytes and size of the group, timed by all ranks of a job together.

Every rank calls the same, in the same order, and what decides how long it goes on is agreed upon: the slowest rank's
time of each. Started by torchrun, ranks of one machine are also measured among themselves.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from policylang.language.devices.profile import CollectiveTimes, Network
from policylang.profiling.measured import rounded

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
    one rank. To be called on every rank of the default process group.

    ``budget``: the seconds that all of it may take, about.
    """
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
                points[collective] = list(_points(device, group, size, collective, each))
        if times := in_a_table(points, size):
            bandwidth, latency = ring(times)
            network = Network(size if size < ranks else None, bandwidth, latency, times)
            found.append(MeasuredGroup(name, network))
    return found


def in_a_table(points: Mapping[str, Sequence[tuple[float, float]]], ranks: int) -> tuple[CollectiveTimes, ...]:
    """The rows of a table: to a tenth of a microsecond, and as many sizes for each as for the shortest."""
    measured = {collective: each for collective, each in points.items() if each}
    sizes = min(map(len, measured.values()), default=0)
    return tuple(
        CollectiveTimes(
            collective, ranks, tuple((size, float(milliseconds(seconds)) * 1e-3) for size, seconds in each[:sizes])
        )
        for collective, each in measured.items()
    )


def milliseconds(seconds: float) -> str:
    return f"{max(seconds * 1e3, 1e-4):.4f}"


def _points(
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
