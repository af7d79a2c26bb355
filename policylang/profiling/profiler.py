"""One measurement of a machine, from its trials to the text of a profile."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from math import floor, log10

import torch
import torch.distributed as dist
from attrs import evolve, frozen

from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.profiling.collectives import MIB, MeasuredGroup, measured_groups, milliseconds
from policylang.profiling.families import BEFORE, functions, fused, host_copies, products, shares, streams
from policylang.profiling.measured import MeasuredDevice, capacity, machine_description, measured
from policylang.profiling.trials import Clock, DeviceClock, Operands, measure

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
        yield "# Of one round: with more `--seconds`, medians of several, and how far they lie apart."
    yield f"name = {json.dumps(profile.name, ensure_ascii=False)}"
    yield ""
    yield "[compute]"
    yield "# Products of matrices: [FLOPs of one, FLOP/s]."
    for dtype, rate in profile.compute.items():
        yield f"{dtype} = {_points(rate)}"
    for what, why in measured.refused.items():
        yield f"# {what.removeprefix(BEFORE)} was left out: {_one_line(why)}"
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
    return "".join(
        "  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)) + "\n" for line in lines
    )


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
    clock: Clock | None = None,
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
        operands = Operands(device)
        dtype = "bfloat16" if device.type == "cuda" else "float32"  # what most steps compute in there
        trials = [
            *products(operands),
            *streams(operands),
            *host_copies(operands),
            *shares(operands, getattr(torch, dtype)),
            *functions(operands),
            *(fused(operands) if compiled else ()),
        ]
        with torch.no_grad():
            timings = measure(trials, clock or DeviceClock(device), budget - on_collectives, progress)
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
