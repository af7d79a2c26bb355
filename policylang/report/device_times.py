"""Times of a device in words: what they are of, and how they are printed beside other figures."""

from __future__ import annotations

from collections.abc import Mapping

from policylang.language.figures import counted, figure, joined, listed, priced_by_bytes_text
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.step_time import StepTime


def device_text(times: NodeTimes | None) -> str:
    """``times: h100-sxm; mylib.scan.default ×8 (no FLOP formula, so priced by bytes)``; empty without a device."""
    return (
        ""
        if times is None
        else f"times: {times.device.name}{times_note(times.uncounted, times.unknown_dtypes, times.unpriced)}"
    )


def times_note(uncounted: Mapping[str, int], unknown_dtypes: Mapping[str, int], unpriced: Mapping[str, int]) -> str:
    """What stands behind the name of a device: whose time is that of bytes alone, and what has none."""
    said = [priced_by_bytes_text(uncounted)] if uncounted else []
    if unknown_dtypes:
        products = counted(sum(unknown_dtypes.values()), "matrix product")
        dtypes = joined([dtype or "no dtype" for dtype in unknown_dtypes])
        said.append(f"{products} in {dtypes} (no figure in the profile, so priced by bytes)")
    if unpriced:
        names = [f"{name} ×{count}" if count > 1 else name for name, count in unpriced.items()]
        said.append(f"{listed(names, 6)} (no figure in the profile, so without a time)")
    return "".join(f"; {each}" for each in said)


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
