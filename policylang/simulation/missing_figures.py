"""What a device's profile would have to say before a time can be: as the diagnostic that a caller gives."""

from __future__ import annotations

from policylang.language.diagnostics import Diagnostic, Span, diagnose
from policylang.language.wording import counted
from policylang.simulation.node_times import HOST_COPY, NO_DTYPE, NodeTimes


def lacking(times: NodeTimes, span: Span | None = None, *, copies: bool = False) -> Diagnostic | None:
    """The error of a profile that lacks a figure for something in the graph; None where it has them all.

    ``copies``: whether values are copied to the host by a plan. ``span``: where the device is named.
    """
    device = times.device
    missing = [f"matrix work in {dtype} ({counted(calls, 'call')})" for dtype, calls in times.unknown_dtypes.items()]
    missing += [f"{what} ({counted(calls, 'call')})" for what, calls in times.unpriced.items()]
    if copies and device.host_bandwidth is None and HOST_COPY not in times.unpriced:
        missing.append("copies to the host")
    if not missing:
        return None
    message = f"the profile of `{device.name}` has no figure for {missing[0]}"
    return diagnose(
        "APL159", message, span, help=_mend(times, copies), details=tuple(f"nor for {each}" for each in missing[1:])
    )


def _mend(times: NodeTimes, copies: bool) -> str:
    if times.unknown_dtypes:
        dtype = next(iter(times.unknown_dtypes))
        if dtype == NO_DTYPE:
            return "its operands have no dtype in this graph; take a snapshot in which each is a tensor of its own"
        known = ", ".join(sorted(times.device.compute))
        return f"add `{dtype} = …` to `[compute]`, in FLOP per second; it has {known}"
    if copies or HOST_COPY in times.unpriced:
        return "add `[host]` with `bandwidth = …`, in bytes per second each way"
    return "add a `[[network]]` with `bandwidth = …` and without `ranks`, for the groups that no other fits"
