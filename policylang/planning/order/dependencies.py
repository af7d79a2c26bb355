"""Dependencies: the edges of the graph, and implicit ones.

Implicit ones are: writes to memory and its readers; random draws; operators with other effects; unknown operators
(barriers) and collectives whose order is kept, which no communication crosses; copies to the host and back; forward
before backward. Collectives of a process group may start in any order that is the same on every rank.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from weakref import WeakKeyDictionary

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag, GraphKind, Phase, returns_memory_of_input
from policylang.operators.names import GETITEM, HOST_COPIES, WAITS, is_unknown

_SETS = ("aten.set_", "aten.resize_", "inductor.resize_storage_bytes_")
"""Operators after which one tensor has the memory of another, or other memory than before."""
_WRITES_MORE = ("aten.rrelu_with_noise_",)


def memory_order(facts: Facts) -> Iterator[tuple[int, int]]:
    """Pairs of nodes, the first of which has to run before the second because both use memory that one of them writes.

    A collective reads its input, or writes it in place, until it is awaited. Linear in nodes and edges.
    """
    if not any(flag & Flag.WRITES for flag in facts.flags):
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


def directions(facts: Facts) -> Sequence[int]:
    """By node the number of its *direction*: 0 the first forward, then each backward and each further forward.

    A forward or backward graph has one. Forward nodes traced within a backward are a separate direction only if they
    multiply or communicate. Inputs and constants have direction 0, the output the last.
    """
    found = array("i", bytes(4 * len(facts)))
    if facts.kind not in (GraphKind.JOINT, GraphKind.FLAT):
        return found
    phases, ops = facts.phases, facts.ops
    starts, weighs = bytearray(len(facts)), False  # from a forward node, a product or a collective follows
    for row in range(len(facts) - 1, -1, -1):
        if phases[row] == _BACKWARD:
            weighs = False
        elif phases[row] == _FORWARD and ops[row] == "call_function":
            weighs = weighs or bool(facts.flops[row] or facts.flags[row] & Flag.COLLECTIVE)
            starts[row] = weighs
    direction, now = 0, _FORWARD
    for row, phase in enumerate(phases):
        if ops[row] == "call_function" and phase != now and (phase == _BACKWARD or starts[row]):
            direction, now = direction + 1, phase
        if ops[row] in ("call_function", "output"):
            found[row] = direction
    return found


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
    return [
        row for row, target in enumerate(facts.targets) if target and is_unknown(target, facts.flags[row] & _CATEGORIES)
    ]


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
    light = [
        row for row, op in enumerate(ops) if op == "call_function" and not flops[row] and found[row] != Role.COLLECTIVE
    ]
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
        return self._computed[row] < other._computed[row] or any(
            self._computed[each] > other._computed[each] for each in waits
        )
