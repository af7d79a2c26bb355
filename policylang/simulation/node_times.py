"""The time of every node on a device, from facts alone: a roofline of its FLOPs and its bytes, or a collective's time.

Williams, Waterman and Patterson, "Roofline", CACM 2009: an operator takes the longer of the time in which the device
computes its FLOPs and the time in which it moves its bytes. ``docs/time.md`` explains it to users.

A collective takes its time from a measured table, or that of a ring by bytes, bandwidth and latency (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 2009): each of n ranks sends n - 1 pieces, of an all-gather the
shards, of a reduce-scatter the nths of what it puts in, of an all-reduce both.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from math import inf
from typing import assert_never
from weakref import WeakKeyDictionary

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag, Group, Ref, found_in, returns_memory_of_input
from policylang.language.devices.profile import CollectiveKind, CollectiveTimes, DeviceProfile, Network, collective_kind
from policylang.language.diagnostics import Diagnostic, Span, diagnose
from policylang.language.resources import tagged
from policylang.language.shown import counted
from policylang.operators.names import GETITEM, HARMLESS, WAITS

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
    found = tuple(each.row for each in found_in(arguments[at], Ref)) if len(arguments) > at else ()
    return found or facts.inputs[row]


def written_by(facts: Facts, row: int) -> tuple[int, ...]:
    """The nodes of the tensors that a collective writes in place."""
    target, arguments = facts.targets[row], facts.arguments[row]
    at = -1 if target.partition(".")[2].partition(".")[0].endswith("_out") else 0
    found = tuple(each.row for each in found_in(arguments[at], Ref)) if arguments else ()
    return found or facts.inputs[row]


def operator_name(target: str) -> str:
    """``all_gather_into_tensor`` of ``_c10d_functional.all_gather_into_tensor.default``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else target


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
        case CollectiveKind.SCATTER | CollectiveKind.BARRIER | None:
            return max(put, made) * others
        case _:
            assert_never(kind)


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


LOOK_UPS = frozenset(
    f"aten.{name}"
    for name in (
        *("embedding", "index", "_unsafe_index", "index_select", "gather", "take", "take_along_dim"),
        *("select_copy", "slice_copy", "masked_select"),
    )
)
"""Operators that find something in their first argument."""
BAGS = frozenset(f"aten.{name}" for name in ("_embedding_bag", "_embedding_bag_forward_only", "embedding_bag"))
"""Look-ups that return the sum of what they find."""
_OVERWRITES = frozenset(
    f"aten.{name}"
    for name in ("copy", "copy_", "fill", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_")
)
"""Operators that do not read their first argument."""
_AT_PLACES = frozenset(
    f"aten.{name}"
    for name in (
        *("index_put_", "_index_put_impl_", "_unsafe_index_put_", "index_add_", "index_copy_", "index_fill_"),
        *("scatter_", "scatter_add_", "scatter_reduce_", "masked_scatter_"),
    )
)
"""Operators that write a part of their first argument in place."""
_ALLOCATIONS = frozenset(
    f"aten.{name}"
    for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize_")
)
_ALL_GIVEN = ("higher_order.triton_kernel_wrapper_", "fsdp.")
"""Operators whose results are among their arguments."""
_WITHOUT_KERNEL = ("builtin.", "torch.", "math.", "prim.", "aten.sym_", "aten._assert", "aten._functional_assert")


def runs_kernel(facts: Facts, row: int) -> bool:
    """True if a node does anything on the device: views, pieces of tuples, waits, sizes and allocations do not."""
    target = facts.targets[row]
    if facts.ops[row] != "call_function" or target == GETITEM or target in WAITS or facts.flags[row] & Flag.SYMBOLIC:
        return False
    if returns_memory_of_input(facts, row) or target.startswith(_WITHOUT_KERNEL):
        return False
    return packet(target) not in _ALLOCATIONS


def packet(target: str) -> str:
    """An operator without its overload, ``aten.mm``; a higher-order operator has none."""
    return target if target.count(".") < 2 else target.rpartition(".")[0]


def bytes_moved(facts: Facts, row: int) -> int:
    """Bytes that one run of an operator (:func:`runs_kernel`) moves between the device's memory and itself. What it
    reads and what it returns, once each. Of an expanded tensor the memory behind it; of a table that is looked up in as
    much as is found; of what is overwritten nothing; of what is written in place at some places these."""
    target, inputs, made = facts.targets[row], facts.inputs[row], facts.bytes[row]
    operator = packet(target)
    read = [memory_read(facts, each) for each in inputs]
    if operator in LOOK_UPS and read:
        read[0] = min(read[0], made)
    elif operator in BAGS and len(read) > 1:  # a row of the table for each index
        shape = facts.shapes[inputs[0]]
        found = facts.bytes[inputs[0]] // max(shape[0], 1) * facts.numel[inputs[1]] if shape else read[0]
        read[0] = min(read[0], found)
    elif operator in _OVERWRITES and read:
        read[0] = 0
    elif operator in _AT_PLACES and read:
        piece = min(read[0], max(read[1:], default=0))
        return sum(read[1:]) + 2 * piece
    elif target.startswith(_ALL_GIVEN):
        return max(sum(read), made)
    elif facts.flags[row] & Flag.WRITES and not made:  # optimizers' kernels: all is read and written
        return 2 * sum(read)
    elif target.endswith("out"):  # the result is passed in
        return max(sum(read), made)
    return made + sum(read)


def memory_read(facts: Facts, row: int) -> int:
    """The bytes of memory behind a value: fewer than its size if elements share memory, as after ``expand``."""
    size, shape, strides = facts.bytes[row], facts.shapes[row], facts.strides[row]
    if not facts.numel[row] or shape is None or strides is None or len(shape) != len(strides):
        return size
    extent = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    numel = facts.numel[row]
    return size if extent >= numel else max(extent, 1) * (size // numel)


_INDICES = frozenset(("bool", "int16", "int32", "int64", "uint16", "uint32", "uint64"))


def matrix_dtype(facts: Facts, row: int) -> str:
    """The dtype of the first two matrices that an operator reads; of two the wider, which the narrower is brought to.
    Empty where nothing that it reads has one. Scales, offsets and biases are no operands: they come behind, or have one
    dimension. Whole numbers are indices, unless there is nothing else, as in a product of them."""
    tensors = [each for each in facts.inputs[row] if facts.dtypes[each] and facts.shapes[each] is not None]
    values = [each for each in tensors if facts.shapes[each] and facts.dtypes[each] not in _INDICES]
    matrices = [each for each in values if len(facts.shapes[each] or ()) >= 2]
    operands = (matrices or values or tensors)[:2]
    if not operands:
        return facts.dtypes[row]
    return facts.dtypes[max(operands, key=lambda each: facts.bytes[each] / (facts.numel[each] or inf))]


_FUSED_ALIKE = HARMLESS | {
    *("aten._to_copy", "aten.copy", "aten.copy_", "aten.lift_fresh_copy", "aten.contiguous"),
    *("aten.masked_fill", "aten.tril", "aten.triu", "aten.constant_pad_nd", "aten.threshold_backward"),
    *("aten.full", "aten.full_like", "aten.new_full", "aten.fill", "aten.fill_", "aten.scalar_tensor"),
    *("aten.zeros", "aten.zeros_like", "aten.new_zeros", "aten.zero_", "aten.ones", "aten.ones_like", "aten.new_ones"),
    *("aten.arange", "prims.iota", "aten.native_dropout", "aten.bernoulli", "aten.rand", "aten.rand_like"),
    *("prims.inductor_random", "prims.inductor_lookup_seed"),
}
"""Operators that Inductor fuses into pointwise loops though torch does not tag them: casts, fills, masks, draws."""
_ATTENTION = re.compile(r"attention|attn")
HOST_COPY = "copy between the device and the host"
NO_DTYPE = "an unknown dtype"
"""The dtype of products whose operands have none in the facts, as of tuples."""


@frozen(eq=False)
class NodeTimes:
    """One entry per node of the facts."""

    device: DeviceProfile
    seconds: Sequence[float] = field(repr=False)
    """One run, alone on the device; 0 for what does nothing there, as views. Of a collective the time from its start
    to its end, of its wait 0."""
    uncounted: Mapping[str, int]
    """The operators that are priced by their bytes though they could do matrix work, and how many calls."""
    unknown_dtypes: Mapping[str, int]
    """The dtypes of matrix work that the profile has no figure for, and how many calls; these are priced by bytes."""
    unpriced: Mapping[str, int] = field(factory=dict)
    """Collectives and copies that the profile has no figure for, as phrases, with their calls; priced at nothing."""


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
    """True if a compiler fuses an operator with its neighbours: pointwise operators, those it treats like them, and
    reductions, which read their producers' results without going through memory."""
    operator = packet(target)
    return any(
        each in tagged("pointwise") or each in tagged("reduction") or each in _FUSED_ALIKE
        for each in (operator, operator.removesuffix("_"))
    )


class _Pricing:
    def __init__(self, facts: Facts, device: DeviceProfile) -> None:
        self.facts, self.device, self.collectives = facts, device, CollectivePrices(device)
        self.uncounted, self.unknown, self.unpriced = Counter[str](), Counter[str](), Counter[str]()

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
        """For one that computes as well, as a gather that is multiplied while it arrives, the longer of the two."""
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
        device, target, dtype = self.device, self.facts.targets[row], matrix_dtype(self.facts, row)
        rate = device.compute.get(dtype)
        if rate is None:
            self.unknown[dtype or NO_DTYPE] += 1
            return 0.0
        convolution = device.convolution if "convolution" in target else 1.0
        return flops / (rate.at(flops) * (device.attention if _ATTENTION.search(target) else convolution))

    def _crosses_to_host(self, row: int) -> bool:
        """True if its result is on the host and its input on a device, or the reverse."""
        facts, devices = self.facts, self.facts.devices
        source = facts.inputs[row][0] if facts.inputs[row] else row
        is_number = facts.numel[source] <= 1  # on the host it goes with tensors
        if is_number or not devices[row] or not devices[source]:
            return False
        return devices[source].startswith("cpu") != devices[row].startswith("cpu")


def lacking(times: NodeTimes, span: Span | None = None, *, copies: bool = False) -> Diagnostic | None:
    """The error of a profile that lacks a figure for something in the graph; None where it has them all. ``copies``:
    whether values are copied to the host by a plan. ``span``: where the device is named."""
    device = times.device
    missing = [f"matrix work in {dtype} ({counted(calls, 'call')})" for dtype, calls in times.unknown_dtypes.items()]
    missing += [f"{what} ({counted(calls, 'call')})" for what, calls in times.unpriced.items()]
    if copies and device.host_bandwidth is None and HOST_COPY not in times.unpriced:
        missing.append("copies to the host")
    if not missing:
        return None
    message = f"the profile of `{device.name}` has no figure for {missing[0]}"
    details = tuple(f"nor for {each}" for each in missing[1:])
    return diagnose("APL159", message, span, help=_fix(times, copies), details=details)


def _fix(times: NodeTimes, copies: bool) -> str:
    if times.unknown_dtypes:
        dtype = next(iter(times.unknown_dtypes))
        if dtype == NO_DTYPE:
            return "its operands have no dtype in this graph; take a snapshot in which each is a separate tensor"
        known = ", ".join(sorted(times.device.compute))
        return f"add `{dtype} = …` to `[compute]`, in FLOP per second; it has {known}"
    if copies or HOST_COPY in times.unpriced:
        return "add `[host]` with `bandwidth = …`, in bytes per second per direction"
    return "add a `[[network]]` with `bandwidth = …` and without `ranks`, for the groups that no other fits"
