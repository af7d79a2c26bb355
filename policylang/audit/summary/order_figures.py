"""What the scheduling lines of a policy came to, as numbers by name."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from policylang.audit.summary.order_account import OrderAccount, StepTotals


def order_figures(orders: Sequence[OrderAccount]) -> dict[str, int | float]:
    """Of whole graphs as they are planned: sums, and the most of what is alive and in flight in any of them. Empty
    without scheduling lines; without a device there are no times."""
    whole = [account for account in orders if not account.half]
    if not whole:
        return {}
    lines = [line for account in whole for line in account.lines]
    return {
        "buckets": sum(line.buckets for line in lines),
        "collectives_joined": sum(line.moved for line in lines if line.buckets),
        "collectives_moved": sum(line.moved for line in lines if not line.buckets),
        **_of_steps([account.planned for account in whole], ""),
        **_of_steps([account.traced for account in whole], "_as_traced"),
    }


def _of_steps(steps: Sequence[StepTotals], ending: str) -> dict[str, int | float]:
    found: dict[str, int | float] = {
        f"collectives{ending}": sum(step.collectives for step in steps),
        f"peak_bytes{ending}": max(step.peak for step in steps),
        f"in_flight_bytes{ending}": max(step.in_flight for step in steps),
    }
    times = [(step.exposed, step.step) for step in steps if step.exposed is not None and step.step is not None]
    if len(times) == len(steps):
        found[f"exposed_seconds{ending}"] = fsum(exposed for exposed, _ in times)
        found[f"step_seconds{ending}"] = fsum(step for _, step in times)
    return found
