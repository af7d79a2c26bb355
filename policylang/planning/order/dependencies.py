"""Who reads and writes the same memory: what must not change places although no edge says so.

---

The forward and the backward of a graph that runs them in turn: nothing is moved from one into the other.

---

What has to run before what: the edges of the graph, and what edges do not say.

Writes to memory and its readers, draws from one generator, operators with other effects, operators that nobody knows
(barriers), collectives whose order is kept, copies to the host and back, and the turn of forward and backward. The
order in which the collectives of a process group are started is none of it: any order will do that is the same on
every rank.


---

What of a graph computes, what communicates, and what is done for a collective's sake alone."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import accumulate
from weakref import WeakKeyDictionary

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag, GraphKind, Phase
from policylang.graph.storage import returns_memory_of_input, storage_roots
from policylang.operators.names import GETITEM, WAITS
from policylang.operators.unknown_effects import is_unknown

_SETS = ("aten.set_", "aten.resize_", "inductor.resize_storage_bytes_")
"""Operators after which one tensor has the memory of another, or other memory than before."""
_WRITES_MORE = ("aten.rrelu_with_noise_",)


def memory_order(facts: Facts) -> Iterator[tuple[int, int]]:
    """Pairs of rows, the first of which has to run before the second: a write and what reads or writes the same memory
    next, and what reads it and the write after that. Linear in nodes and edges.

    A collective reads what it is given until it is awaited, and one that writes in place writes until then.
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
    """The collective that a ``wait_tensor`` awaits; None of other rows, and where it awaits an input."""
    if facts.targets[row] not in WAITS or not facts.inputs[row]:
        return None
    source = facts.inputs[row][0]
    if facts.targets[source] == GETITEM and facts.inputs[source]:
        source = facts.inputs[source][0]
    return source if facts.flags[source] & Flag.COLLECTIVE else None


def _writes(facts: Facts, row: int) -> Sequence[int]:
    """The rows whose memory a row may write: what an operator writes to is its first argument where its name ends so,
    and may be any of them otherwise."""
    if not facts.flags[row] & Flag.WRITES or facts.ops[row] != "call_function":
        return ()
    return facts.inputs[row][:1] if _in_place(facts.targets[row]) else facts.inputs[row]


def _in_place(target: str) -> bool:
    """Of ``aten.add_.Tensor`` and its like; those that begin with an underscore write several."""
    namespace, _, rest = target.partition(".")
    name = rest.partition(".")[0]
    plain = namespace == "aten" and name.endswith("_") and not name.startswith("_")
    return plain and not target.startswith((*_SETS, *_WRITES_MORE))


def _memory(facts: Facts) -> Sequence[int]:
    """By row a name of its memory. Operators that write are followed to what they may hand back, which is more than
    :func:`storage_roots` has to know."""
    roots = storage_roots(facts)
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
        if not flag & Flag.WRITES:
            continue
        if facts.targets[row].startswith(_SETS):
            for each in facts.inputs[row]:
                join(each, row)
        elif _in_place(facts.targets[row]):
            for each in facts.inputs[row][:1]:
                join(each, row)
        else:
            for each in facts.inputs[row]:
                if facts.shapes[each] is not None and facts.shapes[each] == facts.shapes[row]:
                    join(each, row)
    return [find(root) for root in roots]


_FORWARD, _BACKWARD = int(Phase.FORWARD), int(Phase.BACKWARD)


def turns(facts: Facts) -> Sequence[int]:
    """By row the number of the turn it runs in: 0 the first forward, then each backward and each further forward.

    A half has one turn. Forward rows between those of a backward, as traces leave them, are a turn of their own only
    where they multiply or communicate. Inputs and constants have turn 0, the output the last.
    """
    found = array("i", bytes(4 * len(facts)))
    if facts.kind not in (GraphKind.JOINT, GraphKind.FLAT):
        return found
    phases, ops, starts = facts.phases, facts.ops, _speaking(facts)
    turn, now = 0, _FORWARD
    for row, phase in enumerate(phases):
        if ops[row] == "call_function" and phase != now and (phase == _BACKWARD or starts[row]):
            turn, now = turn + 1, phase
        if ops[row] in ("call_function", "output"):
            found[row] = turn
    return found


def _speaking(facts: Facts) -> bytearray:
    """Rows of a forward between two backwards from which on it does something to speak of."""
    found, speaks = bytearray(len(facts)), False
    for row in range(len(facts) - 1, -1, -1):
        if facts.phases[row] == _BACKWARD:
            speaks = False
        elif facts.phases[row] == _FORWARD and facts.ops[row] == "call_function":
            speaks = speaks or bool(facts.flops[row] or facts.flags[row] & Flag.COLLECTIVE)
            found[row] = speaks
    return found


_HOST_COPIES = frozenset(f"policylang.{name}.default" for name in ("offload", "reload", "wait"))
_MULTI_OUTPUT_WAITS = WAITS | {GETITEM}
_CATEGORIES = int(Flag.COLLECTIVE | Flag.EFFECTFUL | Flag.WRITES)


@frozen(eq=False)
class Dependencies:
    before: Sequence[Sequence[int]]
    """For each row, the rows that have to run before it, data and all else; they all stand before it as traced."""
    barriers: Mapping[str, int] = field(factory=dict)
    """Unknown operators that nothing crosses, and how many calls."""


def dependencies(facts: Facts, kept: Collection[int] = ()) -> Dependencies:
    """``kept``: the rows of ``keep order of`` statements: nothing that communicates crosses them. Linear in nodes and
    edges."""
    unknown = unknown_operators(facts)
    before: list[set[int]] = [set(reads) for reads in facts.inputs]
    for first, second in _beyond_edges(facts, {*unknown, *_with_waits(facts, kept)}):
        before[second].add(first)
    counts = Counter(facts.targets[row] for row in unknown)
    return Dependencies([tuple(sorted(rows)) for rows in before], dict(sorted(counts.items())))


def held_rows(facts: Facts, kept: Collection[int]) -> set[int]:
    """What nothing that communicates crosses: operators that nobody knows, and of ``kept`` starts and waits."""
    return {*unknown_operators(facts), *_with_waits(facts, kept)}


def unknown_operators(facts: Facts) -> list[int]:
    """The calls of operators of which nobody knows whether they communicate."""
    return [
        row for row, target in enumerate(facts.targets) if target and is_unknown(target, facts.flags[row] & _CATEGORIES)
    ]


def communicates(facts: Facts, row: int) -> bool:
    """Whether a row starts a collective or awaits one, copies for the host aside."""
    return bool(facts.flags[row] & Flag.COLLECTIVE) or facts.targets[row] in WAITS


def _with_waits(facts: Facts, kept: Collection[int]) -> Iterator[int]:
    rows = frozenset(kept)
    yield from rows
    for row in range(len(facts)) if rows else ():
        if awaited(facts, row) in rows:
            yield row


def _beyond_edges(facts: Facts, barriers: Collection[int]) -> Iterator[tuple[int, int]]:
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    flags, targets = facts.flags, facts.targets
    yield from memory_order(facts)
    drawing = Flag.RANDOM | Flag.SEED
    yield from _one_by_one(row for row in calls if flags[row] & drawing and targets[row] not in _MULTI_OUTPUT_WAITS)
    yield from _one_by_one(row for row in calls if flags[row] & Flag.EFFECTFUL)
    yield from _one_by_one(row for row in calls if targets[row] in _HOST_COPIES)
    if barriers:
        yield from _not_across(calls, barriers, lambda row: row in barriers or communicates(facts, row))
    yield from _in_turn(calls, turns(facts))


def _one_by_one(rows: Iterable[int]) -> Iterator[tuple[int, int]]:
    last = -1
    for row in rows:
        if last >= 0:
            yield last, row
        last = row


def _not_across(
    calls: Sequence[int], barriers: Collection[int], is_held: Callable[[int], bool]
) -> Iterator[tuple[int, int]]:
    """Each held row has the barrier before it behind it, and each barrier all that was held since the one before."""
    last, since = -1, list[int]()
    for row in calls:
        if not is_held(row):
            continue
        if last >= 0:
            yield last, row
        if row in barriers:
            for each in since:
                yield each, row
            last, since = row, []
        else:
            since.append(row)


def _in_turn(calls: Sequence[int], turn_of: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The first row of a turn has all of the turn before it behind it, and all others of its own before them."""
    last, current = list[int](), list[int]()
    for row in calls:
        if current and turn_of[row] != turn_of[current[0]]:
            last, current = current, []
        if not current:
            for each in last:
                yield each, row
        elif last:
            yield current[0], row
        current.append(row)


class Role(IntEnum):
    NONE = 0
    """Inputs, constants, sizes, views and pieces."""
    COLLECTIVE = 1
    """It starts one, or awaits it."""
    AROUND = 2
    """It makes what a collective is given and nobody else reads (the cast of a shard), or works on what a collective
    has brought and on nothing else (a slice of gathered weights)."""
    COMPUTES = 3
    """What blocks are there for: all else, and whatever multiplies."""


_known: WeakKeyDictionary[Facts, Sequence[int]] = WeakKeyDictionary()


def roles_of(facts: Facts) -> Sequence[int]:
    """The :class:`Role` of each row. Linear in nodes and edges, once for each facts."""
    known = _known.get(facts)
    if known is None:
        known = _known[facts] = _roles(facts)
    return known


def _roles(facts: Facts) -> Sequence[int]:
    found = bytearray(len(facts))
    flags, flops, targets, ops = facts.flags, facts.flops, facts.targets, facts.ops
    for row, op in enumerate(ops):
        if op == "call_function":
            if flags[row] & Flag.COLLECTIVE or targets[row] in WAITS:
                found[row] = Role.COMPUTES if flops[row] else Role.COLLECTIVE
            elif targets[row] != GETITEM and not flags[row] & Flag.SYMBOLIC and not returns_memory_of_input(facts, row):
                found[row] = Role.COMPUTES
    around = _after(facts, found)
    for row in _before(facts, found):
        around[row] = 1
    for row in range(len(facts)):
        if around[row] and found[row] == Role.COMPUTES:
            found[row] = Role.AROUND
    return found


def _after(facts: Facts, roles: Sequence[int]) -> bytearray:
    """Rows that read nothing but what a collective has brought."""
    found = bytearray(len(facts))
    flags = facts.flags
    for row, reads in enumerate(facts.inputs):
        if facts.ops[row] != "call_function" or facts.flops[row] or roles[row] == Role.COLLECTIVE:
            continue
        read = [each for each in reads if not flags[each] & Flag.SYMBOLIC]
        found[row] = bool(read) and all(found[each] or roles[each] == Role.COLLECTIVE for each in read)
    return found


def _before(facts: Facts, roles: Sequence[int]) -> list[int]:
    """Rows that nothing but collectives reads in the end."""
    found = bytearray(len(facts))
    for row in range(len(facts) - 1, -1, -1):
        if facts.ops[row] != "call_function" or facts.flops[row] or roles[row] == Role.COLLECTIVE:
            continue
        users = facts.users[row]
        found[row] = bool(users) and all(found[each] or _starts(facts, each) for each in users)
    return [row for row in range(len(facts)) if found[row]]


def _starts(facts: Facts, row: int) -> bool:
    return bool(facts.flags[row] & Flag.COLLECTIVE)


class Progress:
    """How much has been computed where each collective starts and is awaited, in one order."""

    def __init__(self, facts: Facts, order: Sequence[int]) -> None:
        roles = roles_of(facts)
        counts = accumulate((roles[row] == Role.COMPUTES for row in order), initial=0)
        self._computed = dict(zip(order, counts, strict=False))
        self._waits: dict[int, list[int]] = {}
        for row in order:
            if (collective := awaited(facts, row)) is not None:
                self._waits.setdefault(collective, []).append(row)

    def shifted(self, row: int, other: Progress) -> bool:
        """Whether a collective starts earlier, or is awaited later, than in another order of the same calls."""
        waits = self._waits.get(row, ())
        return self._computed[row] < other._computed[row] or any(
            self._computed[each] > other._computed[each] for each in waits
        )
