"""The classes that rules speak of: the values with one operator, one module within a block and one position there.

What a policy does to the values of a class it does in every block that it is about. Values outside the blocks have
classes of their own, by their whole module path with numbers left out.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum

from attrs import field, frozen

from policylang.graph.blocks import OUTSIDE, BlockTable
from policylang.graph.facts import Facts, Flag, forward_users, storage_roots
from policylang.operators.names import DETACHES
from policylang.planning.capabilities import Capabilities
from policylang.planning.decisions.decide import routing_owners, why_unsafe

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Fate(IntEnum):
    """What is to become of the values of a class."""

    EITHER = -1
    """The backward does not ask for them."""
    RECOMPUTE = 0
    SAVE = 1
    OFFLOAD = 2
    REBUILT = 3
    """They look into memory that waits on the host, and must not be saved: that would hold it."""


@frozen
class ValueClass:
    """What the values of a class have in common."""

    inside: bool
    """Whether they lie in blocks."""
    target: str
    """The operator in full."""
    module: str
    """Within the block; of what lies outside of blocks the whole path, a ``*`` for each number."""
    position: int
    """Counted from 1 among the values of this operator in this module."""


@frozen(eq=False)
class ValueClasses:
    """The classes of one graph."""

    of: Sequence[int] = field(repr=False)
    """Row, which may follow an owner, to the number of its class; -1 where no rule decides."""
    all: tuple[ValueClass, ...] = field(repr=False)
    rows: tuple[tuple[int, ...], ...] = field(repr=False)
    """By class, the owners, in graph order."""
    blocks: BlockTable = field(repr=False)
    block_glob: str
    """A glob of the blocks' own modules; empty where they have none in common."""
    crossing: frozenset[int] = field(repr=False)
    """What blocks hand on to each other or to what follows them."""
    kept: frozenset[int] = field(repr=False)
    """What must not run again if the backward asks for it: effects, routing, draws that cannot be repeated."""
    views: frozenset[int] = field(repr=False)
    """What looks into memory of other values."""

    def __len__(self) -> int:
        return len(self.all)


def value_classes(facts: Facts, blocks: BlockTable, capabilities: Capabilities, glob: str = "") -> ValueClasses:
    """The classes in the order in which the graph comes to them; one pass. ``glob`` is of the blocks."""
    owners, flags, block_of = facts.owners, facts.flags, blocks.block_of
    prefixes = _prefixes(facts, blocks)
    of = array("i", [-1]) * len(facts)
    numbers: dict[ValueClass, int] = {}
    rows: list[list[int]] = []
    seen: Counter[tuple[int, str, str]] = Counter()
    shortened: dict[tuple[int, str], str] = {}
    for row in facts.forward:
        if owners[row] != row or flags[row] & (Flag.SYMBOLIC | Flag.SEED):
            continue
        if capabilities.block_by_block and facts.targets[row] in DETACHES and facts.inputs[row]:
            of[row] = of[facts.inputs[row][0]]  # it is decided as what it reads is
            continue
        block, path = block_of[row], facts.modules[row]
        module = shortened.get((block, path))
        if module is None:
            module = shortened[block, path] = _NUMBER.sub("*", _within(path, prefixes[block]))
        counted = (block, facts.targets[row], path)
        seen[counted] += 1
        each = ValueClass(block != OUTSIDE, facts.targets[row], module, seen[counted])
        number = numbers.setdefault(each, len(numbers))
        if number == len(rows):
            rows.append([])
        rows[number].append(row)
        of[row] = number
    for row in facts.forward:
        if owners[row] != row and not flags[row] & Flag.SYMBOLIC:
            of[row] = of[owners[row]]
    crossing = {of[row] for row in facts.forward if _crosses(facts, row, block_of)}
    unsafe = [row for row in facts.forward if owners[row] == row and why_unsafe(facts, row, capabilities) is not None]
    kept = {of[row] for row in (*unsafe, *routing_owners(facts))}
    roots = storage_roots(facts)
    views = {of[row] for row in facts.forward if owners[row] == row and roots[row] != row}
    return ValueClasses(
        of=of,
        all=tuple(numbers),
        rows=tuple(map(tuple, rows)),
        blocks=blocks,
        block_glob=glob or _glob(prefixes),
        crossing=frozenset(crossing - {-1}),
        kept=frozenset(kept - {-1}),
        views=frozenset(views - {-1}),
    )


def _crosses(facts: Facts, row: int, block_of: Sequence[int]) -> bool:
    own = block_of[row]
    return own != OUTSIDE and any(block_of[user] != own for user in forward_users(facts, row))


def _prefixes(facts: Facts, blocks: BlockTable) -> list[tuple[str, ...]]:
    """By block, the path that its modules have in common, up to a number; last, for what lies outside, none."""
    found: list[tuple[str, ...] | None] = [None] * len(blocks.names)
    known: set[tuple[int, str]] = set()
    for row in facts.forward:
        block, path = blocks.block_of[row], facts.modules[row]
        if block == OUTSIDE or not path or (block, path) in known:
            continue
        known.add((block, path))
        parts, common = tuple(path.split(".")), found[block]
        if common is None:
            found[block] = parts
            continue
        same = 0
        while same < min(len(common), len(parts)) and common[same] == parts[same]:
            same += 1
        found[block] = common[:same]
    return [*(_up_to_number(each or ()) for each in found), ()]


def _up_to_number(parts: tuple[str, ...]) -> tuple[str, ...]:
    last = max((at for at, part in enumerate(parts) if part.isdigit()), default=-1)
    return parts[: last + 1] if last >= 0 else parts


def _within(path: str, prefix: tuple[str, ...]) -> str:
    parts = tuple(path.split("."))
    return ".".join(parts[len(prefix) :]) if prefix and parts[: len(prefix)] == prefix else path


def _glob(prefixes: Sequence[tuple[str, ...]]) -> str:
    """``layers.*``, where all blocks are children of one module."""
    found = {_NUMBER.sub("*", ".".join(prefix)) for prefix in prefixes[:-1]}
    glob = found.pop() if len(found) == 1 else ""
    parts = glob.split(".")
    return ".".join(parts[-2:]) if len(parts) > 1 and parts[-1] == "*" else ""
