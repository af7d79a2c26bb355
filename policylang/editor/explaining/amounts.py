"""Figures with a sign, counts and totals in a few words, as the command line prints them."""

from __future__ import annotations

from collections.abc import Iterable

from policylang.language.wording import Measured, counted, figure
from policylang.planning.inspection.breakdown import Amounts, Breakdown
from policylang.planning.inspection.worth import Worth
from policylang.report.layout import seconds_text

MINUS = "\N{MINUS SIGN}"
BETWEEN = " · "


def signed(amount: float, dimension: Measured) -> str:
    """``−1.9 GiB``, ``+8.2 TFLOP``; empty for what would be printed as nothing."""
    text = figure(abs(amount), dimension)
    return "" if text.startswith("0 ") else f"{'+' if amount > 0 else MINUS}{text}"


def values(count: int) -> str:
    return counted(count, "value")


def in_short(parts: Iterable[str]) -> str:
    return BETWEEN.join(filter(None, parts))


def worth_parts(worth: Worth) -> list[str]:
    """What a rule changes of what is kept and what runs twice: bytes, FLOPs and, on a device, time."""
    found = [signed(worth.saved_bytes, "bytes"), signed(worth.recomputed_flops, "flops")]
    if worth.recomputed_seconds is not None:
        found.append(signed(worth.recomputed_seconds, "seconds"))
    return [each for each in found if each] or ["changes nothing"]


def totals(found: Breakdown) -> str:
    """``keeps 18.3 GiB · recomputes 24.2% · peak 41.1 GiB · 1.07 s``: the share is one of the forward's operations."""
    under = found.under
    amounts = under.amounts
    return in_short(
        (
            f"keeps {figure(amounts.saved_bytes, 'bytes')}",
            f"offloads {figure(amounts.offloaded_bytes, 'bytes')}" if amounts.offloaded else "",
            recomputed_share(found),
            f"peak {figure(under.peak.bytes, 'bytes')}",
            f"step {figure(under.time.step, 'seconds')}" if under.time is not None else "",
        )
    )


def recomputed_share(found: Breakdown) -> str:
    """Of the operations; in bytes where it takes none. Empty where nothing runs twice."""
    amounts = found.under.amounts
    if not amounts.recomputed:
        return ""
    if not found.forward_flops or not amounts.recomputed_flops:
        return f"recomputes {figure(amounts.recomputed_bytes, 'bytes')}"
    return f"recomputes {figure(amounts.recomputed_flops / found.forward_flops, 'fraction')}"


def amounts_text(amounts: Amounts) -> str:
    """``37 MiB saved, 260.3 MiB and 3.9 GFLOP recomputed in 12 ms``."""
    again = ""
    if amounts.recomputed:
        work = f" and {figure(amounts.recomputed_flops, 'flops')}" if amounts.recomputed_flops else ""
        took = seconds_text(amounts.recomputed_seconds)
        again = f"{figure(amounts.recomputed_bytes, 'bytes')}{work} recomputed{took and f', which takes {took}'}"
    said = (
        f"{figure(amounts.saved_bytes, 'bytes')} saved" if amounts.saved else "",
        f"{figure(amounts.offloaded_bytes, 'bytes')} offloaded" if amounts.offloaded else "",
        again,
    )
    return ", ".join(filter(None, said))
