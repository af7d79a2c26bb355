"""The time of every node on a device: a roofline of its FLOPs and its bytes, from facts alone.

Williams, Waterman and Patterson, "Roofline", CACM 2009: an operator takes the longer of the time in which the device
computes its FLOPs and the time in which it moves its bytes. ``docs/time.md`` says it for people.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from weakref import WeakKeyDictionary

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag
from policylang.language.devices.profile import DeviceProfile
from policylang.language.resources import tagged
from policylang.operators.matrix_work import HARMLESS
from policylang.simulation.bytes_moved import bytes_moved, packet, runs_kernel
from policylang.simulation.collective_times import CollectivePrices, described
from policylang.simulation.matrix_dtype import matrix_dtype

_FUSED_ALIKE = HARMLESS | {
    *("aten._to_copy", "aten.copy", "aten.copy_", "aten.lift_fresh_copy", "aten.contiguous"),
    *("aten.masked_fill", "aten.tril", "aten.triu", "aten.constant_pad_nd", "aten.threshold_backward"),
    *("aten.full", "aten.full_like", "aten.new_full", "aten.fill", "aten.fill_", "aten.scalar_tensor"),
    *("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.zero_", "aten.ones", "aten.ones_like", "aten.new_ones"),
    *("aten.arange", "prims.iota", "aten.native_dropout", "aten.bernoulli", "aten.rand", "aten.rand_like"),
    *("prims.inductor_random", "prims.inductor_lookup_seed"),
}
"""What Inductor puts into the loops of pointwise operators though torch does not tag it: casts, fills, masks, draws."""
_ATTENTION = re.compile(r"attention|attn")
HOST_COPY = "copy between the device and the host"
NO_DTYPE = "an unknown dtype"
"""What products count as whose operands have none in the facts, as of tuples."""


@frozen(eq=False)
class NodeTimes:
    """One entry a row of the facts."""

    device: DeviceProfile
    seconds: Sequence[float] = field(repr=False)
    """Of one run, alone on the device; 0 for what does nothing there, as views. Of a collective the time from its start
    to its end, of its wait 0."""
    uncounted: Mapping[str, int]
    """The operators that are priced by their bytes though they could do matrix work, and how many calls."""
    unknown_dtypes: Mapping[str, int]
    """The dtypes of matrix work that the profile has no figure for, and how many calls; these are priced by bytes."""
    unpriced: Mapping[str, int] = field(factory=dict)
    """The collectives and copies that the profile has no figure for, as phrases, and how many calls; they are priced at
    nothing."""


_known: WeakKeyDictionary[Facts, dict[tuple[str, str], NodeTimes]] = WeakKeyDictionary()


def node_times(facts: Facts, device: DeviceProfile) -> NodeTimes:
    """The time of every node; one pass over nodes and edges, once for each facts and profile."""
    known = _known.setdefault(facts, {})
    key = (device.name, device.canonical)
    if key not in known:
        known[key] = _Pricing(facts, device).times()
    return known[key]


@cache
def is_fused(target: str) -> bool:
    """Whether a compiler puts an operator into one kernel with its neighbours: pointwise operators, what it treats like
    them, and reductions, which read what their producers make without a way through memory."""
    operator = packet(target)
    return any(
        each in tagged("pointwise") or each in tagged("reduction") or each in _FUSED_ALIKE
        for each in (operator, operator.removesuffix("_"))
    )


class _Pricing:
    def __init__(self, facts: Facts, device: DeviceProfile) -> None:
        self.facts = facts
        self.device = device
        self.collectives = CollectivePrices(device)
        self.uncounted: Counter[str] = Counter()
        self.unknown: Counter[str] = Counter()
        self.unpriced: Counter[str] = Counter()

    def times(self) -> NodeTimes:
        facts = self.facts
        seconds = array("d", bytes(8 * len(facts)))
        for row in range(len(facts)):
            if facts.flags[row] & Flag.COLLECTIVE:
                seconds[row] = self._collective(row)
            elif runs_kernel(facts, row):
                seconds[row] = self._kernel(row)
        counts = (dict(sorted(each.items())) for each in (self.uncounted, self.unknown, self.unpriced))
        return NodeTimes(self.device, seconds, *counts)

    def _collective(self, row: int) -> float:
        """Of one that computes as well, as a gather that is multiplied while it arrives, the longer of the two."""
        facts = self.facts
        length = self.collectives.seconds(facts, row)
        if length is None:
            self.unpriced[described(facts, row)] += 1
            length = 0.0
        return max(length, self._kernel(row)) if facts.flops[row] else length

    def _kernel(self, row: int) -> float:
        facts, device = self.facts, self.device
        if uncounted := facts.uncounted[row] if facts.uncounted else "":
            self.uncounted[uncounted] += 1
        moved = bytes_moved(facts, row)
        if self._crosses_to_host(row):
            if device.host_bandwidth is None:
                self.unpriced[HOST_COPY] += 1
                return 0.0
            return device.overhead + facts.bytes[row] / device.host_bandwidth
        flops = facts.flops[row]
        share = device.pointwise if not flops and is_fused(facts.targets[row]) else 1.0
        moving = share * (device.overhead + moved / device.bandwidth.at(moved))
        if rate := device.operators.get(packet(facts.targets[row])):
            moving = max(moving, moved / rate)
        return max(moving, device.overhead + self._computing(row, flops)) if flops else moving

    def _computing(self, row: int, flops: int) -> float:
        """0 where the profile does not say it."""
        dtype = matrix_dtype(self.facts, row)
        rate = self.device.compute.get(dtype)
        if rate is None:
            self.unknown[dtype or NO_DTYPE] += 1
            return 0.0
        target, share = self.facts.targets[row], 1.0
        if _ATTENTION.search(target):
            share = self.device.attention
        elif "convolution" in target:
            share = self.device.convolution
        return flops / (rate.at(flops) * share)

    def _crosses_to_host(self, row: int) -> bool:
        """Whether its result lies on the host and what it reads on a device, or the other way round."""
        facts = self.facts
        if not facts.devices[row] or not facts.inputs[row]:
            return False
        source = facts.inputs[row][0]
        if not facts.devices[source] or facts.numel[source] <= 1:  # a number on the host may stand beside tensors
            return False
        return facts.devices[source].startswith("cpu") != facts.devices[row].startswith("cpu")
