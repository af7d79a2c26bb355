"""``expect saved per block <= 220 MiB`` and the other expectations about a total."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from attrs import frozen

from policylang.graph.blocks import BlockTable
from policylang.language.figures import beside
from policylang.language.syntax import COMPARISONS, ExpectTotal
from policylang.planning.liveness import CostedNeeds

Status = Literal["held", "failed", "deferred"]


@frozen
class Finding:
    """What an expectation came to, and the evidence for it."""

    status: Status
    found: str
    details: tuple[str, ...] = ()


def check_total(expectation: ExpectTotal, outcome: CostedNeeds, blocks: BlockTable, peak: Callable[[], int]) -> Finding:
    """Compare a total with its limit. ``peak`` is asked only for ``expect peak``, since it costs a simulation.

    While values are left to PyTorch's partitioner the totals known are lower bounds: enough to fail an upper limit,
    not to hold one.
    """
    if expectation.figure == "peak":
        if not outcome.settled:
            return Finding("deferred", _LEFT)
        return _judge(expectation, float(peak()), "", outcome.settled, ())
    if not expectation.per_block:
        return _judge(expectation, _total(expectation, outcome), "", outcome.settled, ())
    amounts = _by_block(expectation, outcome)
    if not amounts:
        return Finding("failed", "the graph has no blocks")
    block = _telling(expectation, amounts, numbers(blocks))
    return _judge(
        expectation, amounts[block], f" in block {block}", outcome.settled, (f"block {block} is {blocks.names[block]}",)
    )


_LEFT = "it depends on values that are left to PyTorch's partitioner"


def _judge(expectation: ExpectTotal, amount: float, where: str, settled: bool, details: tuple[str, ...]) -> Finding:
    limit = expectation.limit.value
    holds = COMPARISONS[expectation.op](amount, limit)
    found = beside(amount, limit, _dimension(expectation)) + where
    if settled:
        return Finding("held" if holds else "failed", found, details)
    if not holds and expectation.op in ("<", "<="):
        return Finding("failed", f"at least {found}", details)
    return Finding("deferred", _LEFT)


def _dimension(expectation: ExpectTotal) -> Literal["bytes", "flops", "fraction"]:
    if expectation.figure != "recomputed flops":
        return "bytes"
    return "fraction" if expectation.limit.dimension == "fraction" else "flops"


def _total(expectation: ExpectTotal, outcome: CostedNeeds) -> float:
    if expectation.figure == "saved":
        return outcome.saved_bytes
    if expectation.figure == "recomputed":
        return outcome.recomputed_bytes
    if _dimension(expectation) == "flops":
        return outcome.recomputed_flops
    return _share(outcome.recomputed_flops, outcome.forward_flops)


def _by_block(expectation: ExpectTotal, outcome: CostedNeeds) -> list[float]:
    if expectation.figure == "saved":
        return list(outcome.saved_bytes_by_block)
    if expectation.figure == "recomputed":
        return list(outcome.recomputed_bytes_by_block)
    if _dimension(expectation) == "flops":
        return list(outcome.recomputed_flops_by_block)
    pairs = zip(outcome.recomputed_flops_by_block, outcome.forward_flops_by_block, strict=True)
    return [_share(again, forward) for again, forward in pairs]


def _share(part: int, whole: int) -> float:
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
