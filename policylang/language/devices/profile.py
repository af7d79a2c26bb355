"""Device profiles: what a device computes, moves and sends in a second, as plain data.

A time is worked out of these figures and of a graph's facts alone (:mod:`policylang.simulation.node_times`), so that
every rank, and every machine on which a policy is checked, comes to the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from math import log

from attrs import field, frozen


@frozen
class Rate:
    """How much is done in a second, by how much there is to do: ``(size, per second)``, sizes rising.

    Between two sizes the rate goes straight over the logarithm of the size; beyond the first and the last it stays.
    """

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
    """Measured times of one collective in groups of one size: ``(bytes, seconds)``, bytes rising."""

    collective: str
    """``all_gather_into_tensor``."""
    ranks: int
    points: tuple[tuple[float, float], ...]


@frozen
class Network:
    """What collectives reach in the groups that it fits: of a ring by bandwidth and latency, or as measured."""

    ranks: int | None = None
    """It fits groups that lie inside so many neighbouring ranks; None for any."""
    bandwidth: float | None = None
    """Bytes per second that each rank sends."""
    latency: float = 0.0
    """Seconds that a collective takes whatever it sends."""
    times: tuple[CollectiveTimes, ...] = ()


@frozen(eq=False)
class DeviceProfile:
    """One device and what joins it to others."""

    name: str
    compute: Mapping[str, Rate]
    """FLOP/s that matrix products reach, by dtype (``bfloat16``) and by the FLOPs of a product."""
    bandwidth: Rate
    """Bytes/s of kernels that only move data, by the bytes that one reads and writes."""
    pointwise: float = 1.0
    """The share of their bytes that pointwise operators move: less than 1 where a compiler fuses them."""
    overhead: float = 0.0
    """Seconds that each kernel takes whatever it does: its launch, or the operator's way through eager mode."""
    capacity: int | None = None
    """Bytes of memory."""
    host_bandwidth: float | None = None
    """Bytes/s between the device and the host, each way."""
    networks: tuple[Network, ...] = ()
    """The first that fits a group is taken."""
    canonical: str = field(default="", repr=False)
    """All of the above as one text: what digests and caches are keyed by."""
