"""Assigns the nodes of a graph to the blocks of its model."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Protocol

from attrs import frozen

from policylang.graph.facts import Facts, GraphKind

LEAST = 8
"""Nodes from one anchor to the next: what repeats in less is a loop within a layer."""
UNEVEN = 3
"""By how much one distance between anchors may be larger than another."""
ALIKE = 0.75
"""The least share of nodes that two adjacent layers have in common."""
MOST_TRIED = 4
"""Operators of each number of calls that are tried as anchors, and layers that the outermost ones are compared with."""
SLACK = 12
"""The most adjacent nodes that one layer may have and another not."""
AGAIN = 4
"""The adjacent nodes that must agree before two layers are in step after a difference."""
_SKIPS = [(skipped, both - skipped) for both in range(SLACK + 1) for skipped in range(both + 1)]
"""Numbers of nodes to skip in each of two layers, few first."""


def has_no_modules(facts: Facts) -> bool:
    """A forward or backward graph carries neither module paths nor activation-checkpoint regions."""
    halves = (GraphKind.FORWARD, GraphKind.BACKWARD)
    return facts.kind in halves and not any(facts.modules) and all(region is None for region in facts.ac_regions)


def repeated_stretches(facts: Facts) -> tuple[Sequence[int], int]:
    """Node to the number of its stretch in graph order, -1 outside all; and the number of stretches, 0 if nothing
    repeats. Near linear in nodes.

    A graph without module paths still has its layers: the same operators on the same shapes over the same groups. An
    operator called once per layer, an anchor, finds them: anchors are followed by nearly the same operators. Single
    nodes of some layers may differ. The outermost layers show where layers begin and end: the nodes before a forward's
    first layer, and after a backward's last one, differ from those between layers.
    """
    block_of = array("i", [-1]) * len(facts)
    rows = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    bounds = _stretches(facts, rows)
    for number, (start, end) in enumerate(bounds):
        for row in rows[start:end]:
            block_of[row] = number
    return block_of, len(bounds)


def _stretches(facts: Facts, rows: Sequence[int]) -> list[tuple[int, int]]:
    """The bounds of each stretch, as indices into ``rows``."""
    numbers: dict[object, int] = {}  # by operator, result and group
    kinds = ((facts.targets[row], facts.shapes[row], facts.dtypes[row], facts.group_names[row]) for row in rows)
    words = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    anchors = _anchors(facts, rows, words)
    if len(anchors) < 2:
        return []
    if facts.kind is not GraphKind.BACKWARD:
        return _bounded(words, anchors)
    # Read from its end, a backward looks as a forward does: the nodes after its last layer are unlike a layer.
    count = len(words)
    found = _bounded(words[::-1], [count - 1 - anchor for anchor in reversed(anchors)])
    return [(count - end, count - start) for start, end in reversed(found)]


def _anchors(facts: Facts, rows: Sequence[int], words: Sequence[int]) -> list[int]:
    """The places of an operator called once per layer. Products are preferred, since others (a last norm) may also be
    called outside the layers; then the operator with the most calls, then the first."""
    places: dict[int, list[int]] = {}
    for place, word in enumerate(words):
        places.setdefault(word, []).append(place)
    by_worth: dict[tuple[bool, int], list[list[int]]] = {}
    for found in places.values():
        gaps = [after - before for before, after in pairwise(found)]
        if gaps and min(gaps) >= LEAST and max(gaps) <= UNEVEN * min(gaps):
            by_worth.setdefault((facts.flops[rows[found[0]]] > 0, len(found)), []).append(found)
    for _, several in sorted(by_worth.items(), reverse=True):
        for found in several[:MOST_TRIED]:
            if 2 * (found[-1] - found[0]) * len(found) >= len(words) * (len(found) - 1) and _repeat(words, found):
                return found
    return []


def _repeat(words: Sequence[int], anchors: Sequence[int]) -> bool:
    """Much the same is done from each anchor to the next."""
    between = [Counter(words[start:end]) for start, end in pairwise(anchors)]
    shared = sum((one & other).total() for one, other in pairwise(between))
    whole = sum(max(one.total(), other.total()) for one, other in pairwise(between))
    return shared >= ALIKE * whole


def _bounded(words: Sequence[int], anchors: Sequence[int]) -> list[tuple[int, int]]:
    """From where to where each layer of a forward goes: all begin with what the first one begins with."""
    tried = range(1, min(len(anchors), MOST_TRIED + 1))
    # Compared with the layer that agrees with the first one for longest, backwards from its anchor.
    model = max(tried, key=lambda at: _in_step(words, anchors[0], anchors[at], -1, anchors[at] - anchors[at - 1] - 1))
    ahead = anchors[model] - anchors[model - 1] - 1
    ahead = _in_step(words, anchors[0], anchors[model], -1, ahead)[0]
    starts = [anchor - _in_step(words, anchor, anchors[model], -1, ahead)[1] for anchor in anchors]
    before = len(anchors) - 2 if len(anchors) < 3 else len(anchors) - 3
    behind = starts[before + 1] - anchors[before] - 1
    end = anchors[-1] + _in_step(words, anchors[-1], anchors[before], 1, behind)[1] + 1
    return list(pairwise([*starts, end]))


def _in_step(words: Sequence[int], here: int, there: int, step: int, most: int) -> tuple[int, int]:
    """How far the nodes before (step -1) or after two anchors are the same: those from ``there``, ``most`` at most, and
    those from ``here``. Nodes that only one of them has are skipped."""
    one = other = 0
    while one < most:
        for skipped, extra in _SKIPS:
            after, beyond = one + skipped + 1, other + extra + 1
            if after <= most and _agree(words, here + step * beyond, there + step * after, step, skipped + extra):
                one, other = after, beyond
                break
        else:
            break
    return one, other


def _agree(words: Sequence[int], here: int, there: int, step: int, passed: int) -> bool:
    """The nodes from two places on are the same: one node, or several after a skip."""
    for ahead in range(0, step * (AGAIN if passed else 1), step):
        one, other = here + ahead, there + ahead
        if min(one, other) < 0 or max(one, other) >= len(words) or words[one] != words[other]:
            return False
    return True


OUTSIDE = -1


class ModuleMatcher(Protocol):
    """A ``blocks`` glob."""

    def outermost(self, path: str) -> str | None:
        """The outermost module on the path that matches, itself a prefix of the path; None where none does."""
        ...


@frozen(eq=False)
class BlockTable:
    """Blocks are numbered from 0 in the order in which the graph reaches them; those of a backward alone as it leaves
    them, the last one first, which is the order of its forward."""

    block_of: Sequence[int]
    """Node to block number, -1 outside every block."""
    names: tuple[str, ...]
    """Of each block the module path; ``region 3`` of checkpoints; without module paths ``repeated stretch 3``."""
    alone: int | None = None
    """The number of the block that the whole graph is, if each block is compiled as a graph."""


def blocks_of(facts: Facts, matcher: ModuleMatcher | None = None) -> BlockTable:
    """The blocks of a graph.

    With a matcher, each module that it matches is one. Without, each activation-checkpoint region if the graph has any,
    else the numbered children of the largest ``ModuleList``; a backward alone does not carry its regions. A node
    without a module path is in its producer's block. In a forward or backward graph that carries neither module paths
    nor regions, the stretches of operators that repeat are the blocks, whatever a matcher asks for."""
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

    def numbered_child(path: str) -> str | None:
        *around, number = path.split(".")[: len(prefix) + 1]
        return ".".join((*around, number)) if tuple(around) == prefix and number.isdigit() else None

    return _by_module(facts, numbered_child)


def is_one_block(blocks: BlockTable, facts: Facts) -> bool:
    """The graph is one block and nothing else, as when each block is compiled alone."""
    return len(blocks.names) == 1 and all(blocks.block_of[facts.owners[row]] == 0 for row in facts.forward)


def _by_module(facts: Facts, block_name: Callable[[str], str | None]) -> BlockTable:
    numbers: dict[str, int] = {}
    block_of = array("i", [OUTSIDE]) * len(facts)
    modules, owners = facts.modules, facts.owners

    @cache
    def number_of(path: str) -> int:
        name = block_name(path) if path else None
        return OUTSIDE if name is None else numbers.setdefault(name, len(numbers))

    # Forward nodes first: a block is numbered by its first forward node.
    for rows in (facts.forward, range(len(facts))):
        for row in rows:
            block_of[row] = number_of(modules[row] or modules[owners[row]])
    names = tuple(numbers)
    if facts.kind is not GraphKind.BACKWARD:
        return BlockTable(block_of, names)
    order = dict.fromkeys(block for block in reversed(block_of) if block != OUTSIDE)  # from the end, by last node
    number = {block: at for at, block in enumerate(order)}
    renumbered = array("i", (number.get(block, OUTSIDE) for block in block_of))
    return BlockTable(renumbered, tuple(names[block] for block in order))


def _by_region(facts: Facts) -> BlockTable:
    numbers: dict[int, int] = {}
    block_of = array("i", [OUTSIDE]) * len(facts)
    regions, owners = facts.ac_regions, facts.owners
    for row in facts.forward:
        region = regions[owners[row]] if regions[row] is None else regions[row]
        if region is not None:
            block_of[row] = numbers.setdefault(region, len(numbers))
    return BlockTable(block_of, tuple(f"region {region}" for region in numbers))


def _largest_list(facts: Facts) -> tuple[str, ...] | None:
    """The path whose numbered children hold the most forward nodes; of a backward alone, the most nodes. The most
    nodes, not the most children: the experts of one layer may outnumber the layers. A list of two children or more is
    preferred to a list of one; of two lists with the same nodes, the outer one."""
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
