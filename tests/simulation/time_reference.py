"""A slow account of times, written from the sentences of ``docs/time.md``, to hold the fast one against: each node is
looked at alone, and each step looks through all that ran before it."""

from __future__ import annotations

from itertools import pairwise
from math import log, prod

from policylang.graph.facts import Facts, Flag
from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.simulation.node_times import NodeTimes

WAIT, PIECE = "_c10d_functional.wait_tensor.default", "builtin.getitem"
POINTWISE = (
    *("aten.add.Tensor", "aten.mul.Tensor", "aten.add_.Tensor", "aten.sum.dim"),
    "prims.convert_element_type.default",
)
VIEWS = ("aten.view.default", "aten.expand.default")


def slow_rate(rate: Rate, size: float) -> float:
    points = rate.points
    if size <= points[0][0]:
        return points[0][1]
    for (low, slow), (high, fast) in pairwise(points):
        if low <= size < high:
            return slow + (fast - slow) * (log(size) - log(low)) / (log(high) - log(low))
    return points[-1][1]


def slow_seconds(facts: Facts, row: int, device: DeviceProfile) -> float:
    """Of one node; of a collective as a ring of its group's ranks."""
    target = facts.targets[row]
    if facts.ops[row] != "call_function" or target in (WAIT, PIECE, *VIEWS) or facts.flags[row] & Flag.SYMBOLIC:
        return 0.0
    if facts.flags[row] & Flag.COLLECTIVE:
        return _ring(facts, row, device)
    moved = facts.bytes[row]
    for number, read in enumerate(facts.inputs[row]):
        size = _distinct(facts, read)
        if number == 0 and target.startswith("aten.embedding."):
            size = min(size, facts.bytes[row])
        if number == 0 and target.startswith("aten.copy_."):
            size = 0
        moved += size
    moving = moved / slow_rate(device.bandwidth, moved) + device.overhead
    if target in POINTWISE or target.startswith("aten.copy_."):
        moving *= device.pointwise
    if not facts.flops[row]:
        return moving
    rate = device.compute.get(_operand(facts, row))
    if rate is None:
        return moving
    reached = slow_rate(rate, facts.flops[row]) * (device.attention if "attention" in target else 1)
    return max(moving, facts.flops[row] / reached + device.overhead)


def _distinct(facts: Facts, row: int) -> int:
    """The bytes that a tensor's elements lie in: each place in memory counts once."""
    shape, strides = facts.shapes[row], facts.strides[row]
    if shape is None or strides is None or not facts.numel[row]:
        return facts.bytes[row]
    places = {0}
    for length, stride in zip(shape, strides, strict=True):
        places = {place + step * stride for place in places for step in range(length)}
    return len(places) * facts.bytes[row] // prod(shape)


def _operand(facts: Facts, row: int) -> str:
    """Matrices before vectors before anything; whole numbers last."""
    for least, integers in ((2, False), (1, False), (0, True)):
        operands = [
            each
            for each in facts.inputs[row]
            if len(facts.shapes[each] or ()) >= least and (integers or facts.dtypes[each] != "int64")
        ]
        if operands:
            widest = sorted(operands[:2], key=lambda each: -(facts.bytes[each] // facts.numel[each]))
            return facts.dtypes[widest[0]]
    return facts.dtypes[row]


def _ring(facts: Facts, row: int, device: DeviceProfile) -> float:
    ranks = facts.groups[facts.group_names[row]].ranks
    put, made = facts.bytes[facts.inputs[row][0]], facts.bytes[row]
    count = len(ranks)
    if count == 1:
        return 0.0
    for network in device.networks:
        if network.ranks is None or len({rank // network.ranks for rank in ranks}) == 1:
            sent = {
                "all_gather_into_tensor": max(put * count, made) / count * (count - 1),
                "reduce_scatter_tensor": put / count * (count - 1),
                "all_reduce": 2 * put / count * (count - 1),
                "all_to_all_single": put / count * (count - 1),
                "broadcast": put,
            }[facts.targets[row].split(".")[1]]
            return network.latency + sent / network.bandwidth
    return 0.0


def slow_step(facts: Facts, steps: list[tuple[int, int, int]], times: NodeTimes) -> tuple[float, float, float]:
    """Seconds of second runs, of the step, and of waiting. Kinds: 0 and 1 are runs, 2 to 5 copies and their ends."""
    host = times.device.host_bandwidth
    began: list[tuple[str, int, int, float]] = []  # stream, row, which copy, when it is over
    awaited: list[tuple[str, int, int, float]] = []
    clock = waiting = again = 0.0
    for kind, row, region in steps:
        copy = 0 if kind == 0 else region
        wanted: list[float] = []
        if kind <= 1:
            again += times.seconds[row] if kind == 1 else 0
            for needed in _collectives_read(facts, row):
                runs = [(which, over) for stream, ran, which, over in began if ran == needed and stream[0] == "g"]
                here = [over for which, over in runs if which == region]
                first = [over for which, over in runs if which == 0]
                wanted += (here or first)[-1:]
        elif kind in (3, 5):
            stream = "down" if kind == 3 else "up"
            pending = [each for each in began if each[:2] == (stream, row) and each not in awaited]
            wanted += [over for _, _, _, over in pending[:1]]
            awaited += pending[:1]
        until = max([clock, *wanted])
        waiting += until - clock
        clock = until
        if kind in (2, 4):
            stream = "down" if kind == 2 else "up"
            busy = max([clock, *(over for at, _, _, over in began if at == stream)])
            began.append((stream, row, region, busy + (facts.bytes[row] / host if host else 0)))
        elif kind <= 1 and _is_beside(facts, row):
            stream = f"g{facts.group_names[row]}"
            busy = max([clock, *(over for at, _, _, over in began if at == stream)])
            began.append((stream, row, copy, busy + times.seconds[row]))
        elif kind <= 1:
            clock += times.seconds[row]
    end = max([clock, *(over for *_, over in began)])
    return again, end, waiting + end - clock


def _collectives_read(facts: Facts, row: int) -> list[int]:
    """Those whose results a node computes with, or waits for: through views, pieces and waits."""
    target = facts.targets[row]
    if facts.ops[row] != "call_function" or target == PIECE or (facts.flags[row] & Flag.VIEW and target != WAIT):
        return []
    found = []
    for read in facts.inputs[row]:
        at = read
        while not _is_beside(facts, at) and facts.inputs[at] and _passes_on(facts, at):
            at = facts.inputs[at][0]
        if _is_beside(facts, at):
            found.append(at)
    return found


def _passes_on(facts: Facts, row: int) -> bool:
    return facts.targets[row] in (WAIT, PIECE) or bool(facts.flags[row] & Flag.VIEW)


def _is_beside(facts: Facts, row: int) -> bool:
    """A collective that multiplies as well runs among the computation."""
    return bool(facts.flags[row] & Flag.COLLECTIVE) and not facts.flops[row]
