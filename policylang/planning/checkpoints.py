"""The checkpoints around blocks in eager: what each of them holds, how far its second run comes, and when it begins.

A block runs again as a whole, operator by operator, up to the last value that its backward reads. Nothing is left out
on the way: what is not saved runs, whether or not the backward asks for its value. What a rule saves is therefore held
until the second run comes to it, and behind that last value not at all: no one reads it. What the block is given is
held until its backward is over.

One account of it for saved bytes, schedules, peaks and tuning, of a whole model's graph and of one block's trace alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence

from attrs import field, frozen

from policylang.graph.blocks import OUTSIDE, BlockTable
from policylang.graph.facts import Facts, Flag, GraphKind, Phase, forward_users, storage_roots
from policylang.operators.names import GETITEM
from policylang.planning.value_decision import Decision, is_open, recomputes

_BACKWARD = int(Phase.BACKWARD)


@frozen(eq=False)
class Checkpoints:
    """The checkpoints of a step, numbered from 0; columns have an entry for each of them."""

    of: Sequence[int] = field(repr=False)
    """Row of the forward to its checkpoint; -1 outside of all."""
    reach: Sequence[int]
    """The first row that the second run does not come to; 0 where the backward reads nothing of the block's."""
    first: Sequence[int]
    """The row of the backward before which the second run takes place."""
    last: Sequence[int]
    """The last row of the backward that reads what the block has made."""
    given: Sequence[Collection[int]] = field(repr=False)
    """The values of the forward that the block reads and has not made."""
    read: frozenset[int] = field(default=frozenset(), repr=False)
    """What the backward reads that no second run makes: it is outside of the blocks, or goes from one to the next."""
    unchanged: Collection[int] = ()
    """Of a traced block: the rows that give their argument as it is, and have nothing of their own to keep."""
    inner: Mapping[int, int] = field(factory=dict)
    """Of a traced block: by row of an operation inside an operator (a DTensor's), the row of that operator. It runs
    with it alone, and is not held by itself: where the operator is saved, it is neither saved nor recomputed."""


def checkpoint_of_all(facts: Facts, reach: int, unchanged: Collection[int], inner: Mapping[int, int]) -> Checkpoints:
    """Of a traced block, which is the whole graph."""
    backward = [row for row, phase in enumerate(facts.phases) if phase == _BACKWARD]
    of, first, last = array("i", bytes(4 * len(facts))), backward[:1] or [len(facts)], backward[-1:] or [OUTSIDE]
    return Checkpoints(of, (reach,), first, last, ((),), unchanged=unchanged, inner=inner)


def checkpoints_around(facts: Facts, blocks: BlockTable) -> Checkpoints:
    """One around each block of a model's graph; a graph without blocks is one. Each micro-batch of a flat graph has its
    own. O(nodes + edges)."""
    block_of, phases = blocks.block_of, facts.phases
    of = array("i", [OUTSIDE]) * len(facts)
    numbers: dict[tuple[int, int], int] = {}
    steps, behind = 0, False
    for row, phase in enumerate(phases):
        if facts.forward_mask[row]:
            steps, behind = steps + behind, False
            block = block_of[row] if blocks.names else 0
            if block != OUTSIDE:
                of[row] = numbers.setdefault((block, steps), len(numbers))
        elif phase == _BACKWARD:
            behind = facts.kind is GraphKind.FLAT
    reach, first, last = ([start] * len(numbers) for start in (0, len(facts), OUTSIDE))
    returned = bytearray(len(facts))
    for row in facts.forward:
        returned[row] = of[row] != OUTSIDE and handed_on(facts, row, of)
    read: set[int] = set()
    for row, phase in enumerate(phases):
        for source in facts.inputs[row] if phase == _BACKWARD else ():
            if not facts.forward_mask[source] or facts.flags[source] & Flag.SYMBOLIC:
                continue
            at = of[source]
            # what a block returns is read by its own backward, or by that of what follows
            if at == OUTSIDE or (returned[source] and block_of[row] != block_of[source]):
                read.add(source)
                continue
            reach[at], first[at], last[at] = max(reach[at], source + 1), min(first[at], row), max(last[at], row)
    given: list[dict[int, None]] = [{} for _ in numbers]
    for row in facts.forward:
        at = of[row]
        for source in facts.inputs[row] if at != OUTSIDE and row < reach[at] else ():
            if of[source] != at and facts.forward_mask[source] and not facts.flags[source] & Flag.SYMBOLIC:
                given[at][source] = None
    return Checkpoints(of, reach, first, last, given, frozenset(read))


def held_and_rerun(
    facts: Facts, decisions: Sequence[Decision | None], checkpoints: Checkpoints
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows that are kept for the backward, and those that run a second time, in graph order. A saved view is kept
    with the memory it looks into; a view of an input costs nothing and is simply taken again."""
    roots, of, reach, inner = storage_roots(facts), checkpoints.of, checkpoints.reach, checkpoints.inner
    saved = set(checkpoints.read).union(*checkpoints.given)
    again: list[int] = []
    for row in facts.forward:
        if of[row] == OUTSIDE or row >= reach[of[row]]:
            continue
        decision = decisions[inner.get(row, row)]
        runs = decision is None or is_open(decision) or recomputes(decision)
        if row in inner and not runs:
            continue
        if runs or (row in checkpoints.unchanged and roots[row] not in saved):
            again.append(row)
        elif facts.ops[roots[row]] == "call_function" and may_be_kept(facts, row):
            saved.add(row)
    return tuple(sorted(saved)), tuple(again)


def kept_rows(facts: Facts, saved: Collection[int]) -> frozenset[int]:
    """Of the saved rows, those whose value has to be held: not the views of another saved value, which are taken again.

    A row that writes in place belongs to its memory's first row, and is held with it.
    """
    roots, rows = storage_roots(facts), frozenset(saved)
    return frozenset(
        row for row in rows if roots[row] == row or roots[row] not in rows or not facts.flags[row] & Flag.VIEW
    )


def handed_on(facts: Facts, row: int, place_of: Sequence[int]) -> bool:
    """Whether a value leaves its block in the forward."""
    return any(place_of[user] != place_of[row] for user in forward_users(facts, row))


def may_be_kept(facts: Facts, row: int) -> bool:
    """No size, no operator whose pieces are rows of their own, and none that returns outer memory that it wrote to."""
    flags = facts.flags[row]
    is_tuple = flags & Flag.MULTI_OUTPUT and facts.targets[row] != GETITEM
    return not is_tuple and not flags & Flag.SYMBOLIC and flags & (Flag.WRITES | Flag.REPEATABLE) != Flag.WRITES
