"""The blocks of a graph in the order in which the forward and the backward run them: the unit of ``1 block ahead``.

A backward node without a block belongs to that of the forward values it reads. A block's input was made by the block
before it, so of two consecutive blocks, one that makes a value and one that reads it, the later one counts. Values that
the whole model reads, such as masks, are ignored.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise

from attrs import field, frozen

from policylang.graph.facts import Facts, GraphKind, Phase
from policylang.language.cancellation import check_cancelled
from policylang.planning.order.dependencies import Role, directions, roles_of

NO_SEGMENT = -1
_UNKNOWN = -1
_BACKWARD = int(Phase.BACKWARD)


class _BackwardLabels:
    """Labels backward nodes with the number of a forward segment, or, in a graph without a forward, with that of a
    block; such a graph reaches its blocks in descending order."""

    def __init__(self, facts: Facts, block_of: Sequence[int], roles: Sequence[int]) -> None:
        self._facts = facts
        self._block_of = block_of
        self._roles = roles
        self._label: dict[int, int] = {}  # of what a forward computes
        self._latest: dict[int, int] = {}  # block to its last segment
        self._blocks: list[int] = []  # forward segment to block
        self._read: dict[int, int] = {}
        self._rank: dict[int, int] | None = None

    def learn(self, rows: Sequence[int], starts: Sequence[int], blocks: Sequence[int]) -> None:
        """Take in the segments of one forward: the place among its nodes where each starts, and its block."""
        base = len(self._blocks)
        self._blocks.extend(blocks)
        self._latest.update({block: base + at for at, block in enumerate(blocks) if block >= 0})
        for at, (start, end) in enumerate(pairwise((*starts, len(rows)))):
            self._label.update(dict.fromkeys(rows[start:end], base + at))
        self._read.clear()

    def block(self, label: int) -> int:
        """The block of a label; -1 outside the blocks."""
        return self._blocks[label] if label >= 0 and self._blocks else label

    def of(self, rows: Sequence[int], recomputed: Collection[int]) -> dict[int, int]:
        """The labels of the calls of one backward. ``recomputed`` calls count as forward values."""
        if not self._blocks and self._rank is None:
            seen = dict.fromkeys(block for block in self._block_of if block >= 0)
            self._rank = {block: -at for at, block in enumerate(seen)}
        found: dict[int, int] = {}
        computes, phases = Role.COMPUTES, self._facts.phases
        for row in rows:
            label = self._known(row)
            if label == _UNKNOWN:
                for source in self._facts.inputs[row]:
                    gradient = self._roles[source] == computes and phases[source] == Phase.BACKWARD
                    if source in found and (gradient or self._known(source) == _UNKNOWN):
                        told = _UNKNOWN if gradient and source not in recomputed else found[source]
                    else:
                        told = self._of_value(source)
                    if told != _UNKNOWN and (label == _UNKNOWN or self._order(told) > self._order(label)):
                        label = told
            found[row] = label
        return found

    def _known(self, row: int) -> int:
        label = self._label.get(row)
        if label is not None:
            return label
        block = self._block_of[row]
        return block if not self._blocks or block < 0 else self._latest.get(block, _UNKNOWN)

    def _order(self, label: int) -> int:
        return label if self._blocks or self._rank is None else self._rank[label]

    def _of_value(self, row: int) -> int:
        """The label of a value's producer and readers, if it is one or two consecutive ones: then the later."""
        found = self._read.get(row)
        if found is not None:
            return found
        labels = dict.fromkeys([self._known(row)])
        for user in self._facts.users[row]:
            labels[self._known(user)] = None
            if len(labels) > 3:
                break
        known = sorted((label for label in labels if label != _UNKNOWN), key=self._order)
        label = known[-1] if known else _UNKNOWN
        if len(known) > 2 or (len(known) == 2 and self._order(known[1]) - self._order(known[0]) != 1):
            label = _UNKNOWN
        self._read[row] = label
        return label


@frozen(eq=False, slots=False)
class Segments:
    """A *segment* is the computation of one block in one direction, or between two blocks. In running order; -1 means
    none."""

    segment_of: Sequence[int]
    """Node to segment; of a collective, the segment that makes or uses what it moves."""
    first: Sequence[int]
    """Segment to the first node that computes in it, as traced."""
    last: Sequence[int]
    direction: Sequence[int]
    """Segment to direction (:func:`~policylang.planning.order.dependencies.directions`)."""
    block: Sequence[int]
    """Segment to block number."""
    uses: Sequence[int] = field(repr=False)
    """Node to the first segment that computes with its result, directly or past views and collectives."""
    makes: Sequence[int] = field(repr=False)
    """Node to the last segment that computed its inputs, directly or past views and collectives."""
    direction_of: Sequence[int] = field(repr=False)
    """Node to direction."""

    @cached_property
    def _ends(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for segment, direction in enumerate(self.direction):
            found[direction] = (found.get(direction, (segment, segment))[0], segment)
        return found

    def ends(self, segment: int) -> tuple[int, int]:
        """The first and the last segment in the direction of a segment."""
        return self._ends[self.direction[segment]]


@frozen
class _Stretch:
    label: int
    """:data:`_UNKNOWN` outside the blocks."""
    places: list[int]
    """Among the computation of a direction."""


def segments(facts: Facts, block_of: Sequence[int], recomputed: Collection[int] = ()) -> Segments:
    """The segments of a graph whose nodes are in running order. Linear in nodes and edges.

    ``recomputed``: recomputations of forward values; they belong to the segment that uses them. Computation between two
    blocks of a forward is a segment; in a backward, so are the nodes before the first one with a known block.
    """
    return _SegmentFinder(facts, block_of, frozenset(recomputed)).found()


class _SegmentFinder:
    def __init__(self, facts: Facts, block_of: Sequence[int], recomputed: Collection[int]) -> None:
        self.facts = facts
        self.recomputed = recomputed
        self.roles = roles_of(facts)
        self.block_of = self._computing(block_of)
        self.direction_of = directions(facts)
        self.labels = _BackwardLabels(facts, self.block_of, self.roles)
        self.first: list[int] = []
        self.last: list[int] = []
        self.direction: list[int] = []
        self.block: list[int] = []

    def found(self) -> Segments:
        facts, roles = self.facts, self.roles
        calls: dict[int, list[int]] = {}
        for row, op in enumerate(facts.ops):
            if op == "call_function":
                calls.setdefault(self.direction_of[row], []).append(row)
        for direction, rows in calls.items():
            check_cancelled()
            self._find(direction, rows)
        check_cancelled()
        of_position = self._by_position()
        uses, makes = (array("i", [NO_SEGMENT]) * len(facts) for _ in range(2))
        for row in range(len(facts) - 1, -1, -1):
            read = (of_position[each] if roles[each] == Role.COMPUTES else uses[each] for each in facts.users[row])
            uses[row] = min((each for each in read if each >= 0), default=NO_SEGMENT)
        for row, reads in enumerate(facts.inputs):
            made = (of_position[each] if roles[each] == Role.COMPUTES else makes[each] for each in reads)
            makes[row] = max(made, default=NO_SEGMENT)
        segment_of = array("i", of_position)
        for row, role in enumerate(roles):
            if role in (Role.COLLECTIVE, Role.AROUND):
                for each in (uses[row], makes[row]):
                    if each >= 0 and self.direction[each] == self.direction_of[row]:
                        segment_of[row] = each
        return Segments(segment_of, self.first, self.last, self.direction, self.block, uses, makes, self.direction_of)

    def _computing(self, block_of: Sequence[int]) -> Sequence[int]:
        """Without blocks that only communicate, such as a checkpoint region of all gathers of a model."""
        rows = [row for row, role in enumerate(self.roles) if role == Role.COMPUTES and block_of[row] >= 0]
        heavy = [row for row in rows if self.facts.flops[row]]
        computing = {block_of[row] for row in heavy or rows}
        return [block if block in computing else NO_SEGMENT for block in block_of]

    # --- the segments of one direction ---

    def _find(self, direction: int, calls: Sequence[int]) -> None:
        rows = [row for row in calls if self.roles[row] == Role.COMPUTES]
        if not rows:
            return
        kind = self.facts.kind
        cut = kind in (GraphKind.FORWARD, GraphKind.BACKWARD)
        backward = kind is GraphKind.BACKWARD if cut else self.facts.phases[rows[0]] == _BACKWARD
        if backward:
            told = self.labels.of(calls, self.recomputed)
            labels = self._filled([_UNKNOWN if row in self.recomputed else told[row] for row in rows])
            for at in range(len(rows) - 2, -1, -1):
                if rows[at] in self.recomputed:
                    labels[at] = labels[at + 1]
        else:
            labels = [self.block_of[row] for row in rows]
        runs = self._runs(rows, labels)
        if not runs:
            return
        _add_ends(runs, labels, trailing=not backward)
        starts = [0]
        for before, run in pairwise(runs):  # a segment's first node may run before its first product
            low, high = before.places[-1] + 1, run.places[0]
            starts.append(next((place for place in range(low, high) if labels[place] == run.label), high))
        blocks = [self.labels.block(run.label) if backward else run.label for run in runs]
        self.first.extend(rows[start] for start in starts)
        self.last.extend(rows[end - 1] for end in (*starts[1:], len(rows)))
        self.direction.extend([direction] * len(runs))
        self.block.extend(blocks)
        if not backward:
            self.labels.learn(rows, starts, blocks)

    def _filled(self, labels: Sequence[int]) -> list[int]:
        """Nodes without a label have that of the node before; the first ones, none."""
        before = next((label for label in labels if label != _UNKNOWN), _UNKNOWN)
        before = before if self.labels.block(before) == NO_SEGMENT else _UNKNOWN
        found = []
        for label in labels:
            before = before if label == _UNKNOWN else label
            found.append(before)
        return found

    def _runs(self, rows: Sequence[int], labels: Sequence[int]) -> list[_Stretch]:
        """The stretches of one label among products, or among all nodes if there are none. A short one between two of
        the same label is part of it: traces and schedules shift nodes across the boundaries of blocks."""
        flops, recomputed = self.facts.flops, self.recomputed
        heavy = [at for at, row in enumerate(rows) if flops[row] and row not in recomputed]
        found: list[_Stretch] = []
        for at in heavy or [at for at, row in enumerate(rows) if row not in recomputed]:
            if found and found[-1].label == labels[at]:
                found[-1].places.append(at)
            else:
                found.append(_Stretch(labels[at], [at]))
        longest: dict[int, int] = {}
        for run in found:
            longest[run.label] = max(longest.get(run.label, 0), len(run.places))
        merged: list[_Stretch] = []
        for run in found:
            between = merged[-1] if len(merged) > 1 and merged[-2].label == run.label else None
            if between and (between.label == _UNKNOWN or 2 * len(between.places) <= longest[between.label]):
                merged.pop()
                merged[-1].places.extend((*between.places, *run.places))
            else:
                merged.append(run)
        return merged

    # --- the segment of each node ---

    def _by_position(self) -> Sequence[int]:
        found = array("i", [NO_SEGMENT]) * len(self.facts)
        at = now = NO_SEGMENT
        for row, op in enumerate(self.facts.ops):
            if op != "call_function":
                continue
            while at + 1 < len(self.first) and (
                self.first[at + 1] <= row or self.direction[at + 1] == self.direction_of[row] != now
            ):
                at += 1
                now = self.direction[at]
            found[row] = at
        return found


def _add_ends(runs: list[_Stretch], labels: Sequence[int], *, trailing: bool) -> None:
    """Add what computes before the first and after the last block: an embedding, a loss, which may not multiply."""
    if not any(label != _UNKNOWN for label in labels):
        return
    if labels[0] == _UNKNOWN and runs[0].label != _UNKNOWN:
        runs.insert(0, _Stretch(_UNKNOWN, [0]))
    end = len(labels)
    while labels[end - 1] == _UNKNOWN:
        end -= 1
    if trailing and end < len(labels) and runs[-1].label != _UNKNOWN:
        runs.append(_Stretch(_UNKNOWN, [end]))
