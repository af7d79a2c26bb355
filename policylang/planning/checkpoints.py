"""Eager checkpoints around blocks: what each holds, how far its recomputation goes, and when it begins.

A block is recomputed as a whole, operator by operator, up to the last value that its backward reads. Every operator
that is not saved runs, whether or not the backward needs its value. A value that a rule saves is therefore held until
the recomputation reaches it; a value after the last one is not held, since nobody reads it. The inputs of the block are
held until its backward is over.

Saved bytes, schedules, peaks and tuning all use this module, for the graph of a whole model and for the trace of one
block.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence

from attrs import field, frozen

from policylang.graph.blocks import OUTSIDE, BlockTable
from policylang.graph.facts import Facts, Flag, GraphKind, Phase, forward_users
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.syntax import ExpectCount, ExpectTotal, InBlock, Ordinal, Policy, Scope
from policylang.language.walk import with_lets
from policylang.operators.names import DETACHES, GETITEM
from policylang.planning.value_outcome import Decision

_BACKWARD = int(Phase.BACKWARD)


@frozen(eq=False)
class Checkpoints:
    """The checkpoints of a step, numbered from 0; columns have an entry for each of them."""

    of: Sequence[int] = field(repr=False)
    """Node of the forward to its checkpoint; -1 outside of all."""
    reach: Sequence[int]
    """The first node that is not recomputed any more; 0 where the backward reads nothing of the block's."""
    first: Sequence[int]
    """The backward node before which the block is recomputed."""
    last: Sequence[int]
    """The last node of the backward that reads what the block has made."""
    given: Sequence[Collection[int]] = field(repr=False)
    """The values of the forward that the block reads and has not made."""
    read: frozenset[int] = field(default=frozenset(), repr=False)
    """Values that the backward reads and nothing recomputes: outside the blocks, or passed from one to the next."""
    unchanged: Collection[int] = ()
    """Nodes of a traced block that return their argument unchanged, and have nothing to keep."""
    inner: Mapping[int, int] = field(factory=dict)
    """In a traced block: by node of an operation inside an operator (a DTensor's), the node of that operator. It
    runs only with that operator, and is never held separately: if the operator is saved, it is neither saved nor
    recomputed."""


def checkpoint_of_all(facts: Facts, reach: int, unchanged: Collection[int], inner: Mapping[int, int]) -> Checkpoints:
    """The checkpoint of a traced block, which is the whole graph."""
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
        returned[row] = of[row] != OUTSIDE and leaves_block(facts, row, of)
    read: set[int] = set()
    for row, phase in enumerate(phases):
        for source in facts.inputs[row] if phase == _BACKWARD else ():
            if not facts.forward_mask[source] or facts.flags[source] & Flag.SYMBOLIC:
                continue
            at = of[source]
            # a block's output is read by the block's backward, or by that of the next block
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
    """The nodes that are kept for the backward, and those that are recomputed, in graph order. A saved view is kept
    with its memory; a view of an input costs nothing and is rebuilt."""
    roots, of, reach, inner = facts.storage_roots, checkpoints.of, checkpoints.reach, checkpoints.inner
    saved = set(checkpoints.read).union(*checkpoints.given)
    again: list[int] = []
    for row in facts.forward:
        if of[row] == OUTSIDE or row >= reach[of[row]]:
            continue
        decision = decisions[inner.get(row, row)]
        runs = decision is None or decision.outcome.reads_again
        if row in inner and not runs:
            continue
        if runs or (row in checkpoints.unchanged and roots[row] not in saved):
            again.append(row)
            continue
        # no size, no operator whose pieces are separate nodes, and none that returns outer memory that it wrote to
        flags = facts.flags[row]
        is_tuple = flags & Flag.MULTI_OUTPUT and facts.targets[row] != GETITEM
        is_foreign = flags & (Flag.WRITES | Flag.REPEATABLE) == Flag.WRITES or flags & Flag.SYMBOLIC
        if facts.ops[roots[row]] == "call_function" and not is_tuple and not is_foreign:
            saved.add(row)
    return tuple(sorted(saved)), tuple(again)


def kept_rows(facts: Facts, saved: Collection[int]) -> frozenset[int]:
    """The saved nodes whose value has to be held: not the views of another saved value, which are rebuilt.

    A node that writes in place belongs to its memory's first node, and is held with it.
    """
    roots, rows = facts.storage_roots, frozenset(saved)
    return frozenset(
        row for row in rows if roots[row] == row or roots[row] not in rows or not facts.flags[row] & Flag.VIEW
    )


def leaves_block(facts: Facts, row: int, place_of: Sequence[int]) -> bool:
    """True if a value leaves its block in the forward."""
    return any(place_of[user] != place_of[row] for user in forward_users(facts, row))


PATH_CANNOT, WHOLE_GRAPH = "APL306", "APL391"


@frozen(eq=False)
class BlockContext:
    """The part of a model that a traced block is, and how far its recomputation goes."""

    reach: int
    """The first node that is not recomputed."""
    blocks: BlockTable | None = None
    """If the graph is one block: that block, among the others. None for a whole model."""
    numbered: bool = True
    """True if it is known which block it is."""
    unchanged: frozenset[int] = frozenset()
    """The nodes that return their argument as it is, and that a recomputation may skip."""
    inner: Mapping[int, int] = field(factory=dict)
    """By node of an operation inside an operator (a DTensor's), the node of that operator, with which alone it runs."""


@frozen(eq=False)
class AroundBlocks:
    """The nodes of a whole model that checkpoints around its blocks do not see."""

    outside: frozenset[int] = frozenset()
    """The forward nodes outside every block: no checkpoint is there, and no rule ranges over them."""
    block_outputs: frozenset[int] = frozenset()
    """Block outputs: the next checkpoint holds them as its input, whatever the rules."""
    detached: Mapping[int, int] = field(factory=dict)
    """Each ``detach``, with its input. Autograd asks for it, as often as it likes: it is no operator of a block."""


def around_blocks(facts: Facts, blocks: BlockTable) -> AroundBlocks:
    """One pass over the edges; nothing of a graph without blocks, which is one block as a whole."""
    if not blocks.names:
        return AroundBlocks()
    block_of, owners = blocks.block_of, facts.owners
    outside = frozenset(row for row in facts.forward if block_of[row] == OUTSIDE)
    returned = {owners[row] for row in facts.forward if block_of[row] != OUTSIDE and leaves_block(facts, row, block_of)}
    detached = [row for row in facts.forward if facts.targets[row] in DETACHES and facts.inputs[row]]
    return AroundBlocks(outside, frozenset(returned), {row: facts.inputs[row][0] for row in detached})


def beyond_one_block(policy: Policy, place: BlockContext | None) -> Iterator[Diagnostic]:
    """An error for every rule that one block cannot follow as the whole model would, and a warning for every
    expectation about the whole, unless the graph is the whole model."""
    for rule in policy.rules:
        for part in with_lets(policy, rule.selector):
            if isinstance(part, Ordinal) and part.scope is Scope.GRAPH:
                asks = "counts over the whole graph, and an eager checkpoint sees one block at a time"
                help = "count `per block`"
            elif isinstance(part, InBlock) and part.which.kind != "any" and place is not None and not place.numbered:
                asks = "asks which block this is, and the checkpoint does not know"
                help = "use `policylang.checkpoint_model`, or give `policylang.context_fn` the whole model"
            else:
                continue
            yield diagnose(PATH_CANNOT, f"`{rule.text}` {asks}", rule.span, help=help)
            break
    for expectation in policy.expectations if place is not None else ():
        if is_about_whole(expectation):
            yield diagnose(
                WHOLE_GRAPH,
                f"`{expectation.span.one_line}` is about a whole graph, and is not checked: "
                "an eager checkpoint sees one block at a time",
                span=expectation.span,
                help="write it `per block`, or check it with `policylang plan` on a snapshot of the model",
            )


def is_about_whole(expectation: object) -> bool:
    """True if it adds up or counts over the whole graph."""
    if isinstance(expectation, ExpectTotal):
        return not expectation.per_block
    return isinstance(expectation, ExpectCount) and expectation.scope in (None, Scope.GRAPH)
