"""Expectations about a total: ``expect saved per block <= 220 MiB``, recomputed FLOPs, peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attrs import frozen

from policylang.graph.blocks import BlockTable
from policylang.language.syntax import COMPARISONS, ExpectTotal
from policylang.language.wording import beside
from policylang.planning.expectations.simulated import Amounts, Simulated
from policylang.planning.liveness import CostedNeeds

Status = Literal["held", "failed", "deferred"]


@frozen
class Finding:
    """The result of checking an expectation, and the evidence for it."""

    status: Status
    found: str
    details: tuple[str, ...] = ()
    margin: float | None = None


_COLUMNS = {
    "saved": ("saved_bytes", "bytes"),
    "recomputed": ("recomputed_bytes", "bytes"),
    "recomputed flops": ("recomputed_flops", "flops"),
    "recomputed operators": ("recomputed_operators", "operators"),
}
"""By figure, what says it, and what of the whole forward it is a share of."""
LEFT_OPEN = Finding("deferred", "it depends on values that are left to PyTorch's partitioner")
_UNTIMED = Finding("deferred", "no device says how long anything takes")


def check_total(expectation: ExpectTotal, outcome: CostedNeeds, blocks: BlockTable, simulated: Simulated) -> Finding:
    """Compare a total with its limit.

    While values are left to PyTorch's partitioner the totals known are lower bounds: enough to fail an upper limit,
    not to hold one.
    """
    if expectation.of_time and not simulated.timed:
        return _UNTIMED
    if expectation.figure in ("peak", "exposed", "step time"):
        return _judge(expectation, _whole(expectation, simulated), outcome) if outcome.final else LEFT_OPEN
    amount, by_block = _amounts(expectation, outcome, simulated)
    if not expectation.per_block:
        return _judge(expectation, amount, outcome)
    if not by_block:
        return Finding("failed", "the graph has no blocks")
    block = _telling(expectation, by_block, numbers(blocks))
    details = (f"block {block} is {blocks.names[block]}",)
    return _judge(expectation, by_block[block], outcome, f" in block {block}", details)


def _judge(
    expectation: ExpectTotal, amount: float, outcome: CostedNeeds, where: str = "", details: tuple[str, ...] = ()
) -> Finding:
    limit = expectation.limit.value
    holds = COMPARISONS[expectation.op](amount, limit)
    found = beside(amount, limit, expectation.limit.dimension) + where
    if outcome.final:
        return Finding("held" if holds else "failed", found, details, margin_of(expectation.op, amount, limit))
    if not holds and expectation.op in ("<", "<="):
        return Finding("failed", f"at least {found}", details, margin_of(expectation.op, amount, limit))
    return LEFT_OPEN


def margin_of(op: str, amount: float, limit: float) -> float:
    """How far a figure is from its limit: negative, or zero of a strict one, where it does not hold."""
    if op in ("<", "<="):
        return limit - amount
    return amount - limit if op in (">", ">=") else -abs(amount - limit)


def _whole(expectation: ExpectTotal, simulated: Simulated) -> float:
    """A figure of the step as it runs, which costs a simulation."""
    if expectation.figure == "peak":
        return float(simulated.peak)
    step = simulated.step
    if expectation.figure == "step time":
        return step.step
    return _share(step.exposed, step.step) if expectation.limit.dimension == "fraction" else step.exposed


def _amounts(expectation: ExpectTotal, outcome: CostedNeeds, simulated: Simulated) -> Amounts:
    """The figure, in all and by block: as it is, or as a share of the same of the whole forward."""
    timed = expectation.figure == "recomputed time"
    column, of = _COLUMNS.get(expectation.figure, ("", ""))
    amount, by_block = (
        simulated.recomputed_time if timed else (getattr(outcome, column), getattr(outcome, f"{column}_by_block"))
    )
    if expectation.limit.dimension != "fraction":
        return amount, by_block
    whole, whole_by_block = (
        simulated.forward_time if timed else (getattr(outcome.forward, of), getattr(outcome.forward, f"{of}_by_block"))
    )
    return _share(amount, whole), [_share(*pair) for pair in zip(by_block, whole_by_block, strict=True)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def numbers(blocks: BlockTable) -> Sequence[int]:
    """Of the blocks that are in the graph."""
    return range(len(blocks.names)) if blocks.alone is None else (blocks.alone,)


def _telling(expectation: ExpectTotal, amounts: Sequence[float], blocks: Sequence[int]) -> int:
    """The block that decides: the first that fails worst, or comes nearest to failing."""
    if expectation.op in ("<", "<="):
        return max(blocks, key=amounts.__getitem__)
    if expectation.op in (">", ">="):
        return min(blocks, key=amounts.__getitem__)
    holds = COMPARISONS[expectation.op]
    return next((block for block in blocks if not holds(amounts[block], expectation.limit.value)), blocks[0])
