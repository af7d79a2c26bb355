"""Which block a node of the backward belongs to, where nothing says it: that of the forward values it reads.

A value of a block is read by the backward of that block. What a block is given was made by the block before it: of two
blocks that follow one another, one that makes a value and one that reads it, the later one is meant. What is read all
over a model, as a mask is, tells nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from policylang.graph.facts import Facts, Phase
from policylang.planning.order.reading.roles import Role

UNSAID = -1


class BackwardLabels:
    """Labels are the numbers of the forward's stages, in their order. A graph without a forward has the numbers of its
    blocks, in the opposite order of that in which it reaches them."""

    def __init__(self, facts: Facts, block_of: Sequence[int], roles: Sequence[int]) -> None:
        self._facts = facts
        self._block_of = block_of
        self._roles = roles
        self._label: dict[int, int] = {}  # of what a forward computes
        self._latest: dict[int, int] = {}  # block to the last stage of it
        self._blocks: list[int] = []  # stage of the forward to block
        self._read: dict[int, int] = {}
        self._rank: dict[int, int] | None = None

    def learn(self, rows: Sequence[int], starts: Sequence[int], blocks: Sequence[int]) -> None:
        """The stages of one forward: where each starts among the rows that it computes, and its block."""
        base = len(self._blocks)
        self._blocks.extend(blocks)
        self._latest.update({block: base + at for at, block in enumerate(blocks) if block >= 0})
        at = -1
        for place, row in enumerate(rows):
            while at + 1 < len(starts) and starts[at + 1] <= place:
                at += 1
            if at >= 0:
                self._label[row] = base + at
        self._read.clear()

    def block(self, label: int) -> int:
        """The block of a label; -1 outside the blocks."""
        return self._blocks[label] if label >= 0 and self._blocks else label

    def of(self, rows: Sequence[int], again: Collection[int]) -> dict[int, int]:
        """The labels of the calls of one backward, in their order; :data:`UNSAID` where nothing tells it. ``again``:
        the second runs, which tell as the values of a forward do."""
        if not self._blocks and self._rank is None:
            seen = dict.fromkeys(block for block in self._block_of if block >= 0)
            self._rank = {block: -at for at, block in enumerate(seen)}
        found: dict[int, int] = {}
        computes, phases = Role.COMPUTES, self._facts.phases
        for row in rows:
            label = self._known(row)
            if label == UNSAID:
                for source in self._facts.inputs[row]:
                    gradient = self._roles[source] == computes and phases[source] == Phase.BACKWARD
                    if source in found and (gradient or self._known(source) == UNSAID):
                        told = UNSAID if gradient and source not in again else found[source]
                    else:
                        told = self._of_value(source)
                    if told != UNSAID and (label == UNSAID or self._order(told) > self._order(label)):
                        label = told
            found[row] = label
        return found

    def _known(self, row: int) -> int:
        label = self._label.get(row)
        if label is not None:
            return label
        block = self._block_of[row]
        return block if not self._blocks or block < 0 else self._latest.get(block, UNSAID)

    def _order(self, label: int) -> int:
        return label if self._blocks or self._rank is None else self._rank[label]

    def _of_value(self, row: int) -> int:
        """The one label, or the later of two that follow one another, of what makes and what reads a value."""
        found = self._read.get(row)
        if found is not None:
            return found
        labels = dict.fromkeys([self._known(row)])
        for user in self._facts.users[row]:
            labels[self._known(user)] = None
            if len(labels) > 3:
                break
        known = sorted((label for label in labels if label != UNSAID), key=self._order)
        label = known[-1] if known else UNSAID
        if len(known) > 2 or (len(known) == 2 and self._order(known[1]) - self._order(known[0]) != 1):
            label = UNSAID
        self._read[row] = label
        return label
