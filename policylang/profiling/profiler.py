"""One measurement of a machine, from its trials to the text of a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from attrs import frozen

from policylang.language.devices.profile import DeviceProfile
from policylang.profiling.clock import DeviceClock
from policylang.profiling.collectives import MeasuredGroup, measured_groups
from policylang.profiling.functions import functions
from policylang.profiling.fused import fused
from policylang.profiling.machine import capacity, described
from policylang.profiling.measured import MeasuredDevice, measured
from policylang.profiling.operands import Operands
from policylang.profiling.products import products
from policylang.profiling.profile_text import profile_text, table_text
from policylang.profiling.shares import shares
from policylang.profiling.streams import host_copies, streams
from policylang.profiling.trials import Clock, Trial, measure

Progress = Callable[[str], object]
ON_COLLECTIVES = 0.5
"""The share of the budget that collectives have in a job of several ranks."""


@frozen(eq=False)
class Profiling:
    """What is to be measured, and for how long."""

    device: torch.device
    name: str
    compiled: bool = False
    """For steps under torch.compile: what its fusion leaves of pointwise operators is measured as well."""
    budget: float = 45.0
    """Seconds, about; the first round is whole in any case, and what a compiler takes for it comes on top."""


@frozen(eq=False)
class Profiled:
    """What a measurement gave."""

    profile: DeviceProfile
    text: str
    """Of the profile's file."""
    table: str
    """Of the file of collectives beside it; empty in a job of one rank."""
    refused: dict[str, str]
    """What the machine cannot do, and what it said."""


def profiled(
    what: Profiling, table: str, clock: Clock | None = None, progress: Progress = lambda _: None
) -> Profiled | None:
    """Measure this machine; None where neither a product nor a stream of bytes could be timed.

    With a default process group of several ranks, to be called on each of them: the first measures the device while the
    others wait, then all measure their collectives, and all have the same result. ``table``: the name of the file of
    collectives.
    """
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    budget = what.budget * (1 - ON_COLLECTIVES) if together else what.budget
    found: list[MeasuredDevice | None] = [None]
    if not together or dist.get_rank() == 0:
        found = [_of_device(what, clock or DeviceClock(what.device), budget, progress)]
    groups: Sequence[MeasuredGroup] = ()
    if together:
        dist.broadcast_object_list(found, 0)
        groups = measured_groups(what.device, what.budget * ON_COLLECTIVES, progress)
    (device,) = found
    if device is None:
        return None
    device = device.joined_by(tuple(group.network for group in groups))
    text = profile_text(device, described(what.device), compiled=what.compiled, groups=groups, table=table)
    return Profiled(device.profile, text, table_text(groups) if groups else "", device.refused)


def _of_device(what: Profiling, clock: Clock, budget: float, progress: Progress) -> MeasuredDevice | None:
    operands = Operands(what.device)
    with torch.no_grad():
        timings = measure(list(_trials(what, operands)), clock, budget, progress)
    return measured(timings, what.name, _dtype_of_shares(what), capacity(what.device))


def _trials(what: Profiling, operands: Operands) -> Iterator[Trial]:
    yield from products(operands)
    yield from streams(operands)
    yield from host_copies(operands)
    yield from shares(operands, getattr(torch, _dtype_of_shares(what)))
    yield from functions(operands)
    if what.compiled:
        yield from fused(operands)


def _dtype_of_shares(what: Profiling) -> str:
    """What most steps compute in there."""
    return "bfloat16" if what.device.type == "cuda" else "float32"
