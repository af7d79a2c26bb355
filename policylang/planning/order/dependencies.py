"""Constraints of an order: the blocks in which the forward and the backward run, and dependencies between nodes.

A backward node without a block belongs to that of the forward values it reads. A block's input was made by the block
before it, so of two consecutive blocks, one that makes a value and one that reads it, the later one counts. Values that
the whole model reads, such as masks, are ignored.

Dependencies are the edges of the graph, and implicit ones: writes to memory and its readers; random draws; operators
with other effects; unknown operators (barriers) and collectives whose order is kept, which no communication crosses;
copies to the host and back; forward before backward. Collectives of a process group may start in any order that is the
same on every rank.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, pairwise
from weakref import WeakKeyDictionary

from attrs import field, frozen

from policylang.graph.blocks import directions
from policylang.graph.facts import Facts, Flag, GraphKind, Phase, returns_memory_of_input
from policylang.language.cancellation import check_cancelled
from policylang.operators.names import GETITEM, HOST_COPIES, WAITS, is_unknown

NO_SEGMENT = -1
_UNKNOWN = -1


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
    """A *segment* is one block's computation in one direction, or that between two blocks, in order; -1: none."""

    segment_of: Sequence[int]
    """Node to segment; of a collective, the segment that makes or uses what it moves."""
    first: Sequence[int]
    """Segment to the first node that computes in it, as traced."""
    last: Sequence[int]
    direction: Sequence[int]
    """Segment to direction (:func:`~policylang.graph.blocks.directions`)."""
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
    """The segments of a graph whose nodes are in running order. Linear in nodes and edges. ``recomputed``:
    recomputations of forward values; they belong to the segment that uses them. Computation between two blocks of a
    forward is a segment; in a backward, so are the nodes before the first one with a known block."""
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


_SETS = ("aten.set_", "aten.resize_", "inductor.resize_storage_bytes_")
"""Operators after which one tensor has the memory of another, or other memory than before."""
_WRITES_MORE = ("aten.rrelu_with_noise_",)


def memory_order(facts: Facts) -> Iterator[tuple[int, int]]:
    """Pairs of nodes, the first of which has to run before the second because both use memory that one of them writes.
    A collective reads its input, or writes it in place, until it is awaited. Linear in nodes and edges."""
    if not facts.writing:
        return
    memory = _memory(facts)
    written_at_all = {memory[each] for row in range(len(facts)) for each in _writes(facts, row)}
    last_write: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for row, op in enumerate(facts.ops):
        if op != "call_function":
            continue
        collective = awaited(facts, row)
        of = row if collective is None else collective
        read = {memory[each] for each in (*facts.inputs[row], *facts.inputs[of])} & written_at_all
        written = {memory[each] for each in _writes(facts, of)}
        for each in sorted(read | written):
            if each in last_write:
                yield last_write[each], row
        for each in sorted(written):
            for reader in readers.pop(each, ()):
                yield reader, row
            last_write[each] = row
        for each in sorted(read - written):
            readers.setdefault(each, []).append(row)


def awaited(facts: Facts, row: int) -> int | None:
    """The collective that a ``wait_tensor`` awaits; None for other nodes, and for the wait of an input."""
    if facts.targets[row] not in WAITS or not facts.inputs[row]:
        return None
    source = facts.inputs[row][0]
    if facts.targets[source] == GETITEM and facts.inputs[source]:
        source = facts.inputs[source][0]
    return source if facts.flags[source] & Flag.COLLECTIVE else None


def _writes(facts: Facts, row: int) -> Sequence[int]:
    """The nodes whose memory a node may write: its first input if the operator's name says in-place, else any."""
    if not facts.flags[row] & Flag.WRITES or facts.ops[row] != "call_function":
        return ()
    return facts.inputs[row][:1] if _in_place(facts.targets[row]) else facts.inputs[row]


def _in_place(target: str) -> bool:
    """True if an operator such as ``aten.add_.Tensor`` writes its first input alone."""
    namespace, _, rest = target.partition(".")
    name = rest.partition(".")[0]
    plain = namespace == "aten" and name.endswith("_") and not name.startswith("_")
    return plain and not target.startswith((*_SETS, *_WRITES_MORE))


def _memory(facts: Facts) -> Sequence[int]:
    """By node a name of its memory. Unlike :func:`storage_roots`, follows operators that write to what they return."""
    roots = facts.storage_roots
    parents = list(range(len(facts)))

    def find(row: int) -> int:
        while parents[row] != row:
            parents[row] = parents[parents[row]]
            row = parents[row]
        return row

    def join(one: int, other: int) -> None:
        low, high = sorted((find(roots[one]), find(roots[other])))
        parents[high] = low

    for row, flag in enumerate(facts.flags):
        target, shape = facts.targets[row], facts.shapes[row]
        if not flag & Flag.WRITES:
            continue
        for number, each in enumerate(facts.inputs[row]):
            if target.startswith(_SETS):
                returned = True
            elif _in_place(target):
                returned = not number
            else:
                returned = shape is not None and facts.shapes[each] == shape
            if returned:
                join(each, row)
    return [find(root) for root in roots]


_FORWARD, _BACKWARD = int(Phase.FORWARD), int(Phase.BACKWARD)


_MULTI_OUTPUT_WAITS = WAITS | {GETITEM}
_CATEGORIES = int(Flag.COLLECTIVE | Flag.EFFECTFUL | Flag.WRITES)


@frozen(eq=False)
class Dependencies:
    before: Sequence[Sequence[int]]
    """By node, the nodes that have to run before it: inputs and implicit dependencies. All were traced before it."""
    barriers: Mapping[str, int] = field(factory=dict)
    """Unknown operators that nothing crosses, and the number of their calls."""


def dependencies(facts: Facts, kept: Collection[int] = ()) -> Dependencies:
    """``kept``: the nodes of ``keep order of`` lines, which no communication crosses. Linear in nodes and edges."""
    before: list[set[int]] = [set(reads) for reads in facts.inputs]
    for first, second in _implicit(facts, held_rows(facts, kept)):
        before[second].add(first)
    counts = Counter(facts.targets[row] for row in unknown_operators(facts))
    return Dependencies([tuple(sorted(rows)) for rows in before], dict(sorted(counts.items())))


def held_rows(facts: Facts, kept: Collection[int]) -> set[int]:
    """The nodes that no communication crosses: unknown operators, and starts and waits of ``kept``."""
    waits = (row for row in range(len(facts)) if awaited(facts, row) in kept) if kept else ()
    return {*unknown_operators(facts), *kept, *waits}


def unknown_operators(facts: Facts) -> list[int]:
    """The calls of operators that may communicate, for all that is known."""
    flags = facts.flags
    return [row for row, target in enumerate(facts.targets) if target and is_unknown(target, flags[row] & _CATEGORIES)]


def _implicit(facts: Facts, barriers: Collection[int]) -> Iterator[tuple[int, int]]:
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    flags, targets = facts.flags, facts.targets
    yield from memory_order(facts)
    drawing = Flag.RANDOM | Flag.SEED
    yield from pairwise(row for row in calls if flags[row] & drawing and targets[row] not in _MULTI_OUTPUT_WAITS)
    yield from pairwise(row for row in calls if flags[row] & Flag.EFFECTFUL)
    yield from pairwise(row for row in calls if targets[row] in HOST_COPIES)
    last, since = -1, list[int]()
    for row in calls if barriers else ():  # collectives come after the barrier before them and before the next
        if row not in barriers and not flags[row] & Flag.COLLECTIVE and targets[row] not in WAITS:
            continue
        if last >= 0:
            yield last, row
        if row in barriers:
            for each in since:
                yield each, row
            last, since = row, []
        else:
            since.append(row)
    direction_of, before, current = directions(facts), list[int](), list[int]()
    for row in calls:  # the first of a direction runs after the direction before it and before the rest
        if current and direction_of[row] != direction_of[current[0]]:
            before, current = current, []
        if not current:
            for each in before:
                yield each, row
        elif before:
            yield current[0], row
        current.append(row)


class Role(IntEnum):
    NONE = 0
    """Inputs, constants, sizes, views and pieces."""
    COLLECTIVE = 1
    """It starts one, or awaits it."""
    AROUND = 2
    """It makes the input of a collective and nothing else (the cast of a shard), or reads nothing but what a collective
    brought (a slice of gathered weights)."""
    COMPUTES = 3
    """All else, and whatever multiplies."""


_known: WeakKeyDictionary[Facts, Sequence[int]] = WeakKeyDictionary()


def roles_of(facts: Facts) -> Sequence[int]:
    """The :class:`Role` of each node. Linear in nodes and edges, once for each facts."""
    if facts not in _known:
        _known[facts] = _roles(facts)
    return _known[facts]


def _roles(facts: Facts) -> Sequence[int]:
    found = bytearray(len(facts))
    flags, flops, targets, ops = facts.flags, facts.flops, facts.targets, facts.ops
    for row, op in enumerate(ops):
        if op == "call_function":
            if flags[row] & Flag.COLLECTIVE or targets[row] in WAITS:
                found[row] = Role.COMPUTES if flops[row] else Role.COLLECTIVE
            elif targets[row] != GETITEM and not flags[row] & Flag.SYMBOLIC and not returns_memory_of_input(facts, row):
                found[row] = Role.COMPUTES
    free = (row for row, op in enumerate(ops) if op == "call_function" and not flops[row])
    light = [row for row in free if found[row] != Role.COLLECTIVE]
    brought = bytearray(role == Role.COLLECTIVE for role in found)  # all inputs were communicated
    for row in light:
        read = [each for each in facts.inputs[row] if not flags[each] & Flag.SYMBOLIC]
        brought[row] = bool(read) and all(brought[each] for each in read)
    sent = bytearray(bool(flag & Flag.COLLECTIVE) for flag in flags)  # nothing but collectives reads it in the end
    for row in reversed(light):
        sent[row] = bool(facts.users[row]) and all(sent[each] for each in facts.users[row])
    for row in light:
        if (brought[row] or sent[row]) and found[row] == Role.COMPUTES:
            found[row] = Role.AROUND
    return found


class ComputeProgress:
    """The compute done when each collective starts and is awaited, in one order."""

    def __init__(self, facts: Facts, order: Sequence[int]) -> None:
        roles = roles_of(facts)
        counts = accumulate((roles[row] == Role.COMPUTES for row in order), initial=0)
        self._computed = dict(zip(order, counts, strict=False))
        self._waits: dict[int, list[int]] = {}
        for row in order:
            if (collective := awaited(facts, row)) is not None:
                self._waits.setdefault(collective, []).append(row)

    def shifted(self, row: int, other: ComputeProgress) -> bool:
        """True if a collective starts earlier, or is awaited later, than in another order of the same calls."""
        waits = self._waits.get(row, ())
        computed = self._computed
        return computed[row] < other._computed[row] or any(other._computed[at] < computed[at] for at in waits)
