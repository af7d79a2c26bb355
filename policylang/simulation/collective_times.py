"""The time of a collective: of a ring by bytes, bandwidth and latency, or from a measured table."""

from __future__ import annotations

from policylang.graph.facts import Facts
from policylang.language.devices.profile import DeviceProfile


def collective_seconds(facts: Facts, row: int, device: DeviceProfile) -> float:
    """From its start to its end, alone on its network."""
    group = facts.groups.get(facts.group_names[row])
    size = 1 if group is None else group.size
    moved = max(facts.bytes[row], *(facts.bytes[each] for each in facts.inputs[row]), 0)
    for network in device.networks:
        if (network.ranks is None or size <= network.ranks) and network.bandwidth is not None:
            return network.latency + moved * (size - 1) / size / network.bandwidth
    return 0.0
