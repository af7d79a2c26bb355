"""What the values that one rule decides come to: in all, and block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import fsum

from attrs import frozen

from policylang.language.wording import folded_names
from policylang.planning.inspection.breakdown import Amounts, BlockGroup, Breakdown, ValueEntry


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


def amounts_of_rules(found: Breakdown) -> dict[str, RuleAmounts]:
    """By ``file:line``, of the rules that begin there, mostly one. What is left to PyTorch counts as saved. A line
    without values that the backward needs is not there."""
    lines: dict[str, list[tuple[BlockGroup, list[ValueEntry]]]] = {}
    for group in found.groups:
        for entry in group.entries:
            if entry.source is not None:
                mine = lines.setdefault(entry.source, [])
                if not mine or mine[-1][0] is not group:
                    mine.append((group, []))
                mine[-1][1].append(entry)
    return {source: _rule(mine, found.plan.block_names) for source, mine in lines.items()}


def _rule(mine: Sequence[tuple[BlockGroup, Sequence[ValueEntry]]], names: Sequence[str]) -> RuleAmounts:
    everything = _sum((each, group.times) for group, entries in mine for each in entries)
    alike: dict[Amounts, list[int]] = {}
    rest: list[RuleInBlocks] = []
    for group, entries in mine:
        amounts = _sum((each, 1) for each in entries)
        if group.blocks:
            alike.setdefault(amounts, []).extend(group.blocks)
        else:
            rest.append(RuleInBlocks(group.label, (), amounts))
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
