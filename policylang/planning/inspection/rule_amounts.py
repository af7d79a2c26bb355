"""What the values that one rule decides come to: in all, and block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import fsum

from attrs import frozen

from policylang.language.figures import folded_names
from policylang.planning.inspection.breakdown import Amounts, Breakdown, ValueEntry


@frozen
class RuleInBlocks:
    """Blocks in which a rule comes to the same, whatever else happens there."""

    label: str
    """``model.layers.0–31``."""
    blocks: tuple[int, ...]
    """Empty for what lies outside every block."""
    amounts: Amounts
    """Of one of them."""

    @property
    def times(self) -> int:
        return max(len(self.blocks), 1)


@frozen
class RuleAmounts:
    amounts: Amounts
    """Of all blocks together."""
    groups: tuple[RuleInBlocks, ...]
    """Where it decides a value that the backward needs; in the order of their first block."""


def rule_amounts(found: Breakdown, source: str) -> RuleAmounts:
    """Of the rules that begin in one line, ``file:line``, which is mostly one. What is left to PyTorch counts as
    saved."""
    mine = [(group, [each for each in group.entries if each.source == source]) for group in found.groups]
    everything = _sum((each, group.times) for group, entries in mine for each in entries)
    alike: dict[Amounts, list[int]] = {}
    rest: list[RuleInBlocks] = []
    for group, entries in mine:
        amounts = _sum((each, 1) for each in entries)
        if entries and group.blocks:
            alike.setdefault(amounts, []).extend(group.blocks)
        elif entries:
            rest.append(RuleInBlocks(group.label, (), amounts))
    names = found.plan.block_names
    inside = [
        RuleInBlocks(folded_names([names[block] for block in sorted(blocks)]), tuple(sorted(blocks)), amounts)
        for amounts, blocks in alike.items()
    ]
    return RuleAmounts(everything, (*sorted(inside, key=lambda each: each.blocks), *rest))


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
