"""What the values that one rule decides come to: in all, and block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import fsum

from attrs import frozen

from policylang.planning.inspection.breakdown import Amounts, BlockGroup, Breakdown, ValueEntry


@frozen
class RuleAmounts:
    amounts: Amounts
    """Of all blocks together."""
    groups: tuple[tuple[BlockGroup, Amounts], ...]
    """Of one of the blocks that are alike; only where it decides a value that the backward needs."""


def rule_amounts(found: Breakdown, source: str) -> RuleAmounts:
    """Of the rules that begin in one line, ``file:line``, which is mostly one. What is left to PyTorch counts as
    saved."""
    groups = [(group, [each for each in group.entries if each.source == source]) for group in found.groups]
    everything = _sum((each, group.times) for group, entries in groups for each in entries)
    return RuleAmounts(everything, tuple((group, _sum((each, 1) for each in mine)) for group, mine in groups if mine))


def _sum(entries: Iterable[tuple[ValueEntry, int]]) -> Amounts:
    """Each entry so many times."""
    counts, sizes = Counter[str](), Counter[str]()
    flops, seconds = 0, list[float]()
    for each, times in entries:
        counts[each.fate] += each.count * times
        sizes[each.fate] += each.bytes * times
        flops += each.flops * times
        if each.seconds is not None:
            seconds.append(each.seconds * times)
    return Amounts(
        saved=counts["saved"] + counts["left to PyTorch"],
        saved_bytes=sizes["saved"] + sizes["left to PyTorch"],
        open_bytes=sizes["left to PyTorch"],
        recomputed=counts["recomputed"],
        recomputed_bytes=sizes["recomputed"],
        recomputed_flops=flops,
        offloaded=counts["offloaded"],
        offloaded_bytes=sizes["offloaded"],
        recomputed_seconds=fsum(seconds) if seconds else None,
    )
