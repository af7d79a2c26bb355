"""The time of every node on a device: a roofline of its FLOPs and its bytes, from facts alone.

Williams, Waterman and Patterson, "Roofline", CACM 2009: an operator takes the longer of the time in which the device
computes its FLOPs and the time in which it moves its bytes.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag
from policylang.graph.storage import returns_memory_of_input
from policylang.language.devices.profile import DeviceProfile
from policylang.simulation.collective_times import collective_seconds


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


def node_times(facts: Facts, device: DeviceProfile) -> NodeTimes:
    """The time of every node; one pass."""
    uncounted: Counter[str] = Counter()
    unknown: Counter[str] = Counter()
    seconds = array("d", bytes(8 * len(facts)))
    for row, op in enumerate(facts.ops):
        if op != "call_function" or facts.owners[row] != row:
            continue
        if facts.flags[row] & Flag.COLLECTIVE:
            seconds[row] = collective_seconds(facts, row, device)
            continue
        if returns_memory_of_input(facts, row) or facts.flags[row] & Flag.SYMBOLIC:
            continue
        moved: float = facts.bytes[row] + sum(facts.bytes[each] for each in facts.inputs[row])
        if facts.uncounted and facts.uncounted[row]:
            uncounted[facts.uncounted[row]] += 1
        if not facts.flops[row]:
            moved *= device.pointwise
        seconds[row] = device.overhead + moved / device.bandwidth.at(moved)
        if facts.flops[row]:
            dtype = facts.dtypes[facts.inputs[row][0]] if facts.inputs[row] else facts.dtypes[row]
            rate = device.compute.get(dtype)
            if rate is None:
                unknown[dtype] += 1
            else:
                computing = device.overhead + facts.flops[row] / rate.at(facts.flops[row])
                seconds[row] = max(seconds[row], computing)
    return NodeTimes(device, seconds, dict(sorted(uncounted.items())), dict(sorted(unknown.items())))
