"""Assigns the nodes of a graph to the blocks of its model."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

from attrs import frozen

from policylang.graph.facts import Facts, GraphKind
from policylang.graph.repeated_blocks import has_no_modules, repeated_stretches

OUTSIDE = -1


class ModuleMatcher(Protocol):
    """What a ``blocks`` glob does to a module path."""

    def outermost(self, path: str) -> str | None:
        """The outermost module on the path that matches, itself a prefix of the path; None where none does."""
        ...


@frozen(eq=False)
class BlockTable:
    """Blocks are numbered from 0 in the order in which the graph reaches them; those of a backward alone as it leaves
    them, the last one first, which is the order of its forward."""

    block_of: Sequence[int]
    """Row to block number, -1 outside every block."""
    names: tuple[str, ...]
    """The module path of each block; of an activation-checkpoint region, ``region 3``; of a graph that says nothing of
    modules, ``repeated stretch 3``."""
    alone: int | None = None
    """The number of the block that the whole graph is, where a model's blocks are graphs of their own."""


def blocks_of(facts: Facts, matcher: ModuleMatcher | None = None) -> BlockTable:
    """The blocks of a graph.

    With a matcher, each module that it matches is one. Without, each activation-checkpoint region if the graph has
    any, else the numbered children of the largest ``ModuleList``; a backward alone says nothing of its regions. A node
    without a module path of its own lies where its owner does. In a half of a partition that carries neither module
    paths nor regions, the stretches of operators that repeat are the blocks, whatever a matcher asks for
    (:mod:`policylang.graph.repeated_blocks`).
    """
    if has_no_modules(facts):
        block_of, count = repeated_stretches(facts)
        return BlockTable(block_of, tuple(f"repeated stretch {number}" for number in range(count)))
    if matcher is not None:
        return _by_module(facts, matcher.outermost)
    if facts.kind is not GraphKind.BACKWARD and any(region is not None for region in facts.ac_regions):
        return _by_region(facts)
    prefix = _largest_list(facts)
    if prefix is None:
        return BlockTable(array("i", [OUTSIDE]) * len(facts), ())
    depth = len(prefix)
    return _by_module(facts, lambda path: _numbered_child(path, prefix, depth))


def is_one_block(blocks: BlockTable, facts: Facts) -> bool:
    """Whether a graph is one block and nothing beside it, as that of a block compiled on its own."""
    return len(blocks.names) == 1 and all(blocks.block_of[facts.owners[row]] == 0 for row in facts.forward)


def _by_module(facts: Facts, block_name: Callable[[str], str | None]) -> BlockTable:
    numbers: dict[str, int] = {}
    block_of = array("i", [OUTSIDE]) * len(facts)
    modules, owners = facts.modules, facts.owners

    @cache
    def number_of(path: str) -> int:
        name = block_name(path) if path else None
        return OUTSIDE if name is None else numbers.setdefault(name, len(numbers))

    # Forward rows first: a block is numbered by its first forward node, whatever stands around it.
    for rows in (facts.forward, range(len(facts))):
        for row in rows:
            block_of[row] = number_of(modules[row] or modules[owners[row]])
    if facts.kind is GraphKind.BACKWARD:
        return _as_left(block_of, tuple(numbers))
    return BlockTable(block_of, tuple(numbers))


def _as_left(block_of: array[int], names: tuple[str, ...]) -> BlockTable:
    """With the blocks numbered by their last rows, from the end."""
    order = dict.fromkeys(block for block in reversed(block_of) if block != OUTSIDE)
    number = {block: at for at, block in enumerate(order)}
    renumbered = array("i", (number.get(block, OUTSIDE) for block in block_of))
    return BlockTable(renumbered, tuple(names[block] for block in order))


def _by_region(facts: Facts) -> BlockTable:
    numbers: dict[int, int] = {}
    block_of = array("i", [OUTSIDE]) * len(facts)
    regions, owners = facts.ac_regions, facts.owners
    for row in facts.forward:
        region = regions[row]
        if region is None:
            region = regions[owners[row]]
        if region is not None:
            block_of[row] = numbers.setdefault(region, len(numbers))
    return BlockTable(block_of, tuple(f"region {region}" for region in numbers))


def _numbered_child(path: str, prefix: tuple[str, ...], depth: int) -> str | None:
    parts = path.split(".")
    if len(parts) > depth and tuple(parts[:depth]) == prefix and parts[depth].isdigit():
        return ".".join(parts[: depth + 1])
    return None


def _largest_list(facts: Facts) -> tuple[str, ...] | None:
    """The path whose numbered children hold the most forward nodes; of a backward alone, the most nodes.

    The most nodes, not the most children: the experts of one layer may outnumber the layers. Lists of one child give
    way to any list of two; between lists that hold the same nodes the outer one is meant.
    """
    nodes: dict[tuple[str, ...], int] = {}
    children: dict[tuple[str, ...], set[str]] = {}
    rows = range(len(facts)) if facts.kind is GraphKind.BACKWARD else facts.forward
    for path, count in Counter(facts.modules[row] for row in rows).items():
        parts = path.split(".")
        for position, part in enumerate(parts):
            if part.isdigit():
                prefix = tuple(parts[:position])
                nodes[prefix] = nodes.get(prefix, 0) + count
                children.setdefault(prefix, set()).add(part)
    # dicts keep graph order and max takes the first of equals: no hash order reaches the answer
    return max(nodes, key=lambda prefix: (len(children[prefix]) > 1, nodes[prefix], -len(prefix)), default=None)
