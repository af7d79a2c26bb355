"""The time of a collective: from a measured table, or of a ring by bytes, bandwidth and latency.

In a ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009) each of n ranks sends n - 1 pieces:
of an all-gather the shards, of a reduce-scatter the nths of what it puts in, of an all-reduce both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from policylang.graph.facts import Facts, Group, Ref
from policylang.language.devices.profile import CollectiveKind, CollectiveTimes, DeviceProfile, Network, collective_kind

_RESULT_FIRST = frozenset(
    f"c10d.{name}.default"
    for name in (
        *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_", "gather_"),
        *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "scatter_"),
        *("alltoall_", "alltoall_base_"),
    )
)
"""Collectives whose first argument is what they write."""
_SUFFIXES = ("_out", "_coalesced", "_")


class CollectivePrices:
    """Prices the collectives of one device; what its tables hold is looked up, not searched."""

    def __init__(self, device: DeviceProfile) -> None:
        self._networks = [(network, _index(network)) for network in device.networks]

    def seconds(self, facts: Facts, row: int) -> float | None:
        """From its start to its end, alone on its network; None where the profile has no figure for it."""
        group = facts.groups.get(facts.group_names[row])
        put = sum(facts.bytes[each] for each in put_in(facts, row))
        size = _size(facts, row, group, put)
        if size == 1:
            return 0.0
        name = operator_name(facts.targets[row])
        kind = collective_kind(name)
        for network, measured in self._networks:
            if not fits(network, group, size):
                continue
            if times := _look_up(measured, name, kind, size):
                return times.at(put)
            if network.bandwidth is not None:
                return network.latency + _sent(kind, put, facts.bytes[row], size) / network.bandwidth
        return None


def fits(network: Network, group: Group | None, size: int) -> bool:
    """True if a group is inside the neighbouring ranks that a network joins: by its ranks, else by its size."""
    if network.ranks is None:
        return True
    if group is not None and group.ranks:
        return min(group.ranks) // network.ranks == max(group.ranks) // network.ranks
    return 0 < size <= network.ranks


def described(facts: Facts, row: int) -> str:
    """For people: ``all-gather among 64 ranks``."""
    name = operator_name(facts.targets[row])
    kind = collective_kind(name)
    put = sum(facts.bytes[each] for each in put_in(facts, row))
    size = _size(facts, row, facts.groups.get(facts.group_names[row]), put)
    among = f"{size} ranks" if size else "an unknown number of ranks"
    return f"{name if kind is None else kind.value} among {among}"


def put_in(facts: Facts, row: int) -> tuple[int, ...]:
    """The nodes of the tensors that one rank passes to a collective."""
    target, arguments = facts.targets[row], facts.arguments[row]
    at = 1 if target in _RESULT_FIRST else 0
    found = tuple(_rows(arguments[at])) if len(arguments) > at else ()
    return found or facts.inputs[row]


def written_by(facts: Facts, row: int) -> tuple[int, ...]:
    """The nodes of the tensors that a collective writes in place."""
    target, arguments = facts.targets[row], facts.arguments[row]
    at = -1 if target.partition(".")[2].partition(".")[0].endswith("_out") else 0
    found = tuple(_rows(arguments[at])) if arguments else ()
    return found or facts.inputs[row]


def operator_name(target: str) -> str:
    """``all_gather_into_tensor`` of ``_c10d_functional.all_gather_into_tensor.default``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


def _rows(argument: Any) -> Iterator[int]:
    if isinstance(argument, Ref):
        yield argument.row
    elif isinstance(argument, tuple):
        for part in argument:
            yield from _rows(part)


def _size(facts: Facts, row: int, group: Group | None, put: int) -> int:
    """The size of the group: as known, else derived from the bytes; 0 if neither gives it."""
    if group is not None and (group.size or group.ranks):
        return group.size or len(group.ranks)
    less, more = sorted((put, facts.bytes[row]))
    return more // less if less and more > less else 0


def _sent(kind: CollectiveKind | None, put: int, made: int, size: int) -> float:
    """Bytes that each rank sends in a ring."""
    others = (size - 1) / size if size else 1.0
    match kind:
        case CollectiveKind.ALL_GATHER:
            return max(put * size, made) * others
        case CollectiveKind.ALL_REDUCE:
            return 2 * put * others
        case CollectiveKind.REDUCE_SCATTER | CollectiveKind.ALL_TO_ALL:
            return put * others
        case CollectiveKind.BROADCAST | CollectiveKind.POINT_TO_POINT:
            return put
        case _:
            return max(put, made) * others


_Measured = dict[tuple[str | CollectiveKind | None, int], CollectiveTimes]


def _index(network: Network) -> _Measured:
    found: _Measured = {}
    for each in network.times:
        found.setdefault((each.collective, each.ranks), each)
        if kind := collective_kind(each.collective):
            found.setdefault((kind, each.ranks), each)
    return found


def _look_up(measured: _Measured, name: str, kind: CollectiveKind | None, size: int) -> CollectiveTimes | None:
    """By the operator's own name, by that of the one it is a form of, by its kind."""
    if not measured:
        return None
    forms = (name.removesuffix(end) for end in _SUFFIXES if name.endswith(end))
    return next((measured[each, size] for each in (name, *forms, kind) if (each, size) in measured), None)
