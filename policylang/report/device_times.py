"""Times of a device in words: what they are of, and how they are printed beside other figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from policylang.language.wording import figure, priced_by_bytes_text

if TYPE_CHECKING:
    from policylang.planning.plan import Plan
    from policylang.simulation.node_times import NodeTimes
    from policylang.simulation.step_time import StepTime


def device_text(device: str, uncounted: Mapping[str, int], what: str = "times") -> str:
    """``times: h100-sxm; mylib.scan.default ×8 (no FLOP formula, so priced by bytes)``."""
    return f"{what}: {device}" + (f"; {priced_by_bytes_text(uncounted)}" if uncounted else "")


def times_text(times: NodeTimes | None) -> str:
    """The same of the times of a graph; empty without a device."""
    return "" if times is None else device_text(times.device.name, times.uncounted)


def plan_times_text(plan: Plan) -> str:
    """The same of a plan; where its device has no figure for something, that there are no times, and why."""
    return times_text(plan.shown_times) if plan.untold is None else f"no times: {plan.untold.message}"


def seconds_text(seconds: float | None) -> str:
    """Empty for nothing that could be printed, and without a device."""
    text = figure(seconds or 0.0, "seconds")
    return "" if text.startswith("0 ") else text


def recomputed_text(time: StepTime) -> str:
    """``55.2 ms (20.1%)``: the share is one of the forward's time."""
    if not time.recomputed:
        return "-"
    share = f" ({figure(time.recomputed / time.forward, 'fraction')})" if time.forward else ""
    return figure(time.recomputed, "seconds") + share


def price_text(seconds: float | None) -> str:
    """``1.9 ms a GiB``; empty where there is no price."""
    return "" if seconds is None else f"{figure(seconds, 'seconds')} a GiB"


def exposed_text(time: StepTime) -> str:
    """``12.1 ms (3%)``: the share is one of the step."""
    if not time.exposed:
        return "-"
    return f"{figure(time.exposed, 'seconds')} ({figure(time.exposed / time.step, 'fraction')})"
