"""Which block a collective serves: the one that computes with what it brings, or that makes what it takes.

The place of a collective itself says little. Shards may be cast and gathered under a name of their own, whole blocks
before they are used; the nodes of a backward may carry no module path at all. What computes tells more: products and
norms have their block, and what has none, in a graph that names blocks, belongs to the latest block of what it reads.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property

from policylang.graph.blocks import has_no_modules
from policylang.graph.facts import Facts, Flag
from policylang.operators.moves import MOVERS
from policylang.operators.names import GATHER, WAITS

OUTSIDE = -1


class Serving:
    """The blocks that the collectives of one graph serve."""

    def __init__(self, facts: Facts, block_of: Sequence[int]) -> None:
        self.facts = facts
        self.block_of = block_of

    def block(self, collective: int) -> int:
        """The number of the block, -1 outside the blocks."""
        return self._used_in(collective) if self.facts.targets[collective] == GATHER else self._made_in(collective)

    def _used_in(self, collective: int) -> int:
        """The block of the first that computes with what comes of it."""
        facts, computed = self.facts, len(self.facts)
        seen, pending = {collective}, [collective]
        while pending:
            for user in facts.users[pending.pop()]:
                if facts.ops[user] != "call_function" or user in seen:
                    continue
                seen.add(user)
                if self._passes[user]:
                    pending.append(user)
                else:
                    computed = min(computed, user)
        return self.blocks[computed] if computed < len(facts) else self.block_of[collective]

    def _made_in(self, collective: int) -> int:
        """The block of the last that computes what goes into it."""
        facts, computed = self.facts, OUTSIDE
        seen, pending = {collective}, [collective]
        while pending:
            for source in facts.inputs[pending.pop()]:
                if facts.ops[source] != "call_function" or source in seen:
                    continue
                seen.add(source)
                if self._passes[source]:
                    pending.append(source)
                else:
                    computed = max(computed, source)
        return self.blocks[computed] if computed >= 0 else self.block_of[collective]

    @cached_property
    def blocks(self) -> Sequence[int]:
        """Row to block, of rows that compute."""
        facts = self.facts
        if has_no_modules(facts):
            return self.block_of
        found = array("l", self.block_of)
        order: dict[int, int] = {OUTSIDE: OUTSIDE}
        kept = self._kept
        for row, op in enumerate(facts.ops):
            if op != "call_function" or kept[row]:
                found[row] = OUTSIDE
                continue
            if found[row] == OUTSIDE and not self._is_named(row):
                found[row] = max(
                    (found[source] for source in facts.inputs[row]), key=order.__getitem__, default=OUTSIDE
                )
            order.setdefault(found[row], len(order))
        return found

    def _is_named(self, row: int) -> bool:
        """Whether a graph says where a node belongs, be it outside the blocks."""
        facts, owner = self.facts, self.facts.owners[row]
        return bool(facts.modules[row] or facts.modules[owner]) or facts.ac_regions[owner] is not None

    @cached_property
    def _passes(self) -> bytearray:
        """The rows that compute nothing: layout operators, casts, collectives and their waits, one byte each."""
        flags, targets = self.facts.flags, self.facts.targets
        return bytearray(
            targets[row] in MOVERS or targets[row] in WAITS or bool(flags[row] & (Flag.COLLECTIVE | Flag.VIEW))
            for row in range(len(self.facts))
        )

    @cached_property
    def _kept(self) -> bytearray:
        """The rows that hand on what the graph is given, parameters for the most part: they are of no block."""
        facts, passes = self.facts, self._passes
        found = bytearray(len(facts))
        for row, op in enumerate(facts.ops):
            found[row] = op != "call_function" or (passes[row] and all(found[source] for source in facts.inputs[row]))
        return found
