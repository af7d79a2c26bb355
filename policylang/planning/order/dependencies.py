"""What has to run before what: the edges of the graph, and what edges do not say.

Writes to memory and its readers, draws from one generator, operators with other effects, operators that nobody knows
(barriers), collectives whose order is kept, copies to the host and back, and the turn of forward and backward. The
order in which the collectives of a process group are started is none of it: any order will do that is the same on
every rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag
from policylang.operators.names import GETITEM, WAITS, is_unknown
from policylang.planning.order.reading.shared_memory import awaited, memory_order
from policylang.planning.order.reading.turns import turns

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
