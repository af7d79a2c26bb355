"""Device profiles: what a device computes, moves and sends in a second, as plain data.

A time is worked out of these figures and of a graph's facts alone (:mod:`policylang.simulation.node_times`), so that
every rank, and every machine on which a policy is checked, has the same.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from enum import Enum
from functools import cache
from math import log

from attrs import evolve, field, frozen


@frozen
class Rate:
    """A rate that depends on the size of the work: ``(size, per second)``, sizes rising. Between two sizes the rate
    goes straight over the logarithm of the size; beyond the first and the last it stays."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def constant(cls, rate: float) -> Rate:
        return cls(((1.0, rate),))

    def at(self, size: float) -> float:
        """Per second, for one operation of this size."""
        after = bisect_right(self.points, size, key=lambda point: point[0])
        if after in (0, len(self.points)):
            return self.points[min(after, len(self.points) - 1)][1]
        (low, slow), (high, fast) = self.points[after - 1 : after + 1]
        return slow + (fast - slow) * log(size / low) / log(high / low)


@frozen
class CollectiveTimes:
    """Measured times of one collective in groups of one size: ``(bytes, seconds)``, bytes rising. The bytes are the
    input of one rank: of an all-gather its shard, of a reduce-scatter the whole."""

    collective: str
    """``all_gather_into_tensor``."""
    ranks: int
    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        """Seconds. Straight between two sizes. Beyond the last, along the line through the last two; below the first,
        along the line through the first two, but no less than the first time's share."""
        (first, least), (last, most) = self.points[0], self.points[-1]
        if len(self.points) == 1:
            return most * max(size, first) / last
        if size <= first:
            return max(least - self._slope(1) * (first - size), least * size / first)
        if size >= last:
            slope = self._slope(len(self.points) - 1)
            return most + (slope if slope > 0 else most / last) * (size - last)
        after = bisect_right(self.points, size, key=lambda point: point[0])
        low, quick = self.points[after - 1]
        return quick + self._slope(after) * (size - low)

    def _slope(self, after: int) -> float:
        (low, quick), (high, slow) = self.points[after - 1 : after + 1]
        return (slow - quick) / (high - low)


@frozen
class Network:
    """The speed of collectives in the groups that it fits: as measured, or of a ring by bandwidth and latency."""

    ranks: int | None = None
    """It fits groups inside so many neighbouring ranks; None for any."""
    bandwidth: float | None = None
    """Bytes per second that each rank sends."""
    latency: float = 0.0
    """Seconds that a collective takes whatever it sends, where it is not measured."""
    times: tuple[CollectiveTimes, ...] = ()


@frozen(eq=False)
class DeviceProfile:
    """A device profile: rates of compute, memory, host and networks."""

    name: str
    compute: Mapping[str, Rate]
    """FLOP/s that matrix products reach, by dtype (``bfloat16``) and by the FLOPs of a product."""
    bandwidth: Rate
    """Bytes/s of kernels that only move data, by the bytes that one reads and writes."""
    pointwise: float = 1.0
    """The share of their bytes that pointwise operators move: less than 1 where a compiler fuses them."""
    attention: float = 1.0
    """The share of :attr:`compute` that attention kernels reach."""
    convolution: float = 1.0
    """The share of :attr:`compute` that convolutions reach: above 1 where fewer operations are done than counted."""
    operators: Mapping[str, float] = field(factory=dict)
    """Bytes/s of operators that compute more than they move (``aten.tanh`` on a CPU), by name without overload: a lower
    bound on the time of the bytes that they move."""
    overhead: float = 0.0
    """Fixed seconds of each kernel: its launch, or the operator's overhead in eager mode."""
    capacity: int | None = None
    host_bandwidth: float | None = None
    """Bytes/s between the device and the host, in each direction."""
    host_ranks: int | None = None
    """The ranks that share a host, and its memory."""
    networks: tuple[Network, ...] = ()
    """The first that fits a group is taken."""
    canonical: str = field(init=False, repr=False)
    """All figures as one text, equal for equal figures: what digests and caches are keyed by."""

    @canonical.default
    def _canonical(self) -> str:
        figures = {
            "compute": {dtype: _numbers(rate.points) for dtype, rate in self.compute.items()},
            "bandwidth": _numbers(self.bandwidth.points),
            "pointwise": float(self.pointwise),
            "attention": float(self.attention),
            "convolution": float(self.convolution),
            "operators": {name: float(rate) for name, rate in self.operators.items()},
            "overhead": float(self.overhead),
            "capacity": self.capacity,
            "host": None if self.host_bandwidth is None else float(self.host_bandwidth),
            **({} if self.host_ranks is None else {"host ranks": self.host_ranks}),
            "networks": [
                {
                    "ranks": network.ranks,
                    "bandwidth": None if network.bandwidth is None else float(network.bandwidth),
                    "latency": float(network.latency),
                    "times": sorted([each.collective, each.ranks, _numbers(each.points)] for each in network.times),
                }
                for network in self.networks
            ],
        }
        return json.dumps(figures, sort_keys=True, separators=(",", ":"))


def slower(device: DeviceProfile, computing: float, waiting: float) -> DeviceProfile:
    """A device that takes so many times as long to compute, and to communicate."""

    def scaled(rate: Rate) -> Rate:
        return Rate(tuple((size, figure / computing) for size, figure in rate.points))

    networks = tuple(
        evolve(
            network,
            bandwidth=None if network.bandwidth is None else network.bandwidth / waiting,
            latency=network.latency * waiting,
            times=tuple(evolve(each, points=tuple((x, y * waiting) for x, y in each.points)) for each in network.times),
        )
        for network in device.networks
    )
    return evolve(
        device,
        compute={dtype: scaled(rate) for dtype, rate in device.compute.items()},
        bandwidth=scaled(device.bandwidth),
        operators={name: rate / computing for name, rate in device.operators.items()},
        overhead=device.overhead * computing,
        networks=networks,
    )


def _numbers(points: tuple[tuple[float, float], ...]) -> list[list[float]]:
    """``600e12`` and ``600_000_000_000_000`` are one figure."""
    return [[float(size), float(figure)] for size, figure in points]


class CollectiveKind(Enum):
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_TO_ALL = "all-to-all"
    BROADCAST = "broadcast"
    """From one rank to all, or from all to one."""
    SCATTER = "scatter"
    """A piece from one rank to each, or from each to one."""
    POINT_TO_POINT = "send and receive"
    BARRIER = "barrier"


_PARTS = (
    # First two that contain the names of others.
    ("reducescatter", CollectiveKind.REDUCE_SCATTER),
    ("allgather", CollectiveKind.ALL_GATHER),
    ("allreduce", CollectiveKind.ALL_REDUCE),
    ("alltoall", CollectiveKind.ALL_TO_ALL),
    ("broadcast", CollectiveKind.BROADCAST),
    ("reduce", CollectiveKind.BROADCAST),
    ("scatter", CollectiveKind.SCATTER),
    ("gather", CollectiveKind.SCATTER),
    ("barrier", CollectiveKind.BARRIER),
    ("permute", CollectiveKind.POINT_TO_POINT),
    ("send", CollectiveKind.POINT_TO_POINT),
    ("recv", CollectiveKind.POINT_TO_POINT),
)


@cache
def collective_kind(name: str) -> CollectiveKind | None:
    """The kind that a name such as ``all_gather_into_tensor``, ``_allgather_base_`` or ``AllGather`` says; or None."""
    folded = name.lower().replace("_", "").replace("-", "")
    return next((kind for part, kind in _PARTS if part in folded), None)
