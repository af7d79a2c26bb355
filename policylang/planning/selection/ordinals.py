"""Selection by position: ``first 2 S per block``, ``every 2nd S from 1st``; which blocks ``in last 4 blocks`` means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import floor
from typing import assert_never

from attrs import evolve

from policylang.graph.blocks import BlockTable
from policylang.graph.chains import Chains
from policylang.graph.facts import Facts
from policylang.language.syntax import BlockSet, Ordinal, Scope


def effective_scope(scope: Scope | None, has_blocks: bool) -> Scope:
    """Without ``per``: per block where the graph has blocks, else per graph."""
    if scope is not None:
        return scope
    return Scope.BLOCK if has_blocks else Scope.GRAPH


def group_keys(scope: Scope, rows: Sequence[int], facts: Facts, blocks: BlockTable, chains: Chains) -> list[Hashable]:
    """What each row is counted under: a block's number, a module's path, the name of a chain's first node.

    None for a node outside every block under ``per block``: it is not counted.
    """
    if scope is Scope.GRAPH:
        return [0] * len(rows)
    if scope is Scope.MODULE:
        modules = facts.modules
        return [modules[row] for row in rows]
    if scope is Scope.CHAIN:
        names, first = facts.names, chains.first
        return [names[first[row]] for row in rows]
    return [block if block >= 0 else None for block in map(blocks.block_of.__getitem__, rows)]


def choose(ordinal: Ordinal, rows: list[int], keys: Sequence[Hashable]) -> list[int]:
    """The rows at the ordinal's positions, counted from 1 in graph order within each group of equal keys."""
    totals = Counter(keys if ordinal.kind == "last" else ())
    counts: dict[Hashable, int] = {}
    chosen: list[int] = []
    for row, key in zip(rows, keys, strict=True):
        if key is not None:
            position = counts[key] = counts.get(key, 0) + 1
            if _takes(ordinal, position, totals.get(key, 0)):
                chosen.append(row)
    return chosen


def chosen_blocks(which: BlockSet, count: int) -> list[bool]:
    """For each of ``count`` blocks, whether the block set holds it."""
    if which.kind == "any":
        return [True] * count
    if which.kind == "range":
        return [which.low <= block <= which.high for block in range(count)]
    if which.share is not None:
        which = evolve(which, n=floor(which.share * count), share=None)
    return [_takes(which, position, count) for position in range(1, count + 1)]


def _takes(which: Ordinal | BlockSet, position: int, total: int) -> bool:
    """Whether a choice takes a position of ``total``, counted from 1."""
    n = which.n
    match which.kind:
        case "first":
            return position <= n
        case "last":
            return position > total - n
        case "nth":
            return position == n
        case "every":
            start = which.start or n
            return n > 0 and position >= start and (position - start) % n == 0
        case "any" | "range":
            raise ValueError(f"`{which.kind}` takes no position")
        case _:
            assert_never(which.kind)
