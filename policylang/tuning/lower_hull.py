"""The lower hull of what can be had: seconds of second runs against bytes kept, over all choices of a graph."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from math import fsum, inf

from attrs import field, frozen

from policylang.graph.blocks import BlockTable
from policylang.graph.facts import Facts, Flag, storage_roots
from policylang.planning.capabilities import Capabilities
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.solving.choices import Choices, choices_of
from policylang.tuning.solving.fixed import MUST_RUN
from policylang.tuning.solving.movable import hidden_bytes, most_moved, movable_memory
from policylang.tuning.solving.second_runs import NONE
from policylang.tuning.solving.vertices import Hull

SHARES = 4
"""With copies to the host, the hulls at which a byte that may be moved is worth so many quarters of another."""
NOTHING: Mapping[int, int] = {}


@frozen(eq=False)
class HullPoint:
    """From the most bytes, where nothing runs again that takes time, to the fewest."""

    saved: int
    """Bytes kept on the device for the backward, as planning counts them."""
    seconds: float
    """Of second runs."""
    kept: frozenset[int] = field(repr=False)
    """Owners whose value is saved."""
    again: frozenset[int] = field(repr=False)
    """Owners that run again, views of what runs again among them."""
    moved: frozenset[int] = field(default=frozenset(), repr=False)
    """Owners whose value waits on the host in between, views of what is copied among them."""


def lower_hull(
    facts: Facts,
    times: NodeTimes,
    capabilities: Capabilities,
    *,
    keep: Collection[int] = (),
    override: bool = False,
    offload: bool = False,
    blocks: BlockTable | None = None,
) -> tuple[HullPoint, ...]:
    """The lower hull over all choices that planning takes for right: nothing that is safe to decide is below it.

    ``keep``: rows whose values are kept where the backward comes down to them, as by a rule that saves them.
    ``override``: what the user has tagged may be decided otherwise. ``blocks``: of a path that runs one block at a
    time, outside of which it decides nothing.

    With ``offload`` values may wait on the host as well, as many as can be copied while the device computes, each way.
    The points are then the best that were found, and what fits between two of them may be a little below the line. What
    certainly nothing goes below is the hull without ``offload``, at the bytes on device and host together.

    Raises:
        PolicyError: the solver is not installed.
    """
    choices = choices_of(facts, times, capabilities, keep=keep, override=override, blocks=blocks)
    if not offload or not capabilities.offloads:
        return hull_of(choices)
    return _hull_with_copies(choices, times, override=override)


def hull_of(choices: Choices) -> tuple[HullPoint, ...]:
    """The lower hull of a problem."""
    if not choices.rows:
        return (_point(choices, ()),)
    return tuple(_point(choices, vertex.columns) for vertex in Hull(choices).vertices())


def _hull_with_copies(choices: Choices, times: NodeTimes, *, override: bool) -> tuple[HullPoint, ...]:
    """What is moved is a knapsack: of what a choice has in memory, as much as can be copied. A choice is best for it
    where a byte that may be moved costs some share of one that may not: none of it while there is room for all, all of
    it once every choice fills the room."""
    room = hidden_bytes(choices.facts, times)
    movable = movable_memory(choices, override=override) if room else {}
    if not movable:
        return hull_of(choices)
    roots = [row if size else NONE for row, size in zip(choices.rows, choices.sizes, strict=True)]
    hull, found = Hull(choices), dict[tuple[int, ...], HullPoint]()
    for share in range(SHARES, -1, -1):
        sizes = [size * (share if root in movable else SHARES) for root, size in zip(roots, choices.sizes, strict=True)]
        for vertex in hull.vertices(sizes):
            if vertex.columns not in found:
                kept = {root: movable[root] for root in map(roots.__getitem__, vertex.columns) if root in movable}
                moved = most_moved(choices.facts, kept, room)
                found[vertex.columns] = _point(choices, vertex.columns, moved)
    return _lower(found.values())


def _lower(points: Collection[HullPoint]) -> tuple[HullPoint, ...]:
    """Those on the lower hull of some points, from the most bytes that buy anything to the fewest."""
    hull: list[HullPoint] = []
    for point in sorted(points, key=lambda point: (point.seconds, point.saved)):
        if hull and point.saved >= hull[-1].saved:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return tuple(hull)


def _is_above(here: HullPoint, between: HullPoint, there: HullPoint) -> bool:
    paid = (between.seconds - here.seconds) * (here.saved - there.saved)
    return paid >= (there.seconds - here.seconds) * (here.saved - between.saved)


def bound_at(hull: Sequence[HullPoint], saved: float) -> float:
    """The seconds of second runs that no choice goes below which keeps at most so many bytes: straight between two
    points of the hull. Infinite below what must be kept."""
    after = bisect_left(hull, -saved, key=lambda point: -point.saved)  # the first that keeps no more
    if after == len(hull):
        return inf
    there = hull[after]
    if after == 0 or there.saved == saved:
        return there.seconds
    here = hull[after - 1]
    return here.seconds + (there.seconds - here.seconds) * (here.saved - saved) / (here.saved - there.saved)


def bytes_at(hull: Sequence[HullPoint], seconds: float) -> float:
    """The bytes that no choice goes below whose second runs take at most so many seconds. Infinite below what must run
    again."""
    after = bisect_right(hull, seconds, key=lambda point: point.seconds)  # the first that takes longer
    if after == 0:
        return inf
    here = hull[after - 1]
    if after == len(hull):
        return here.saved
    there = hull[after]
    return here.saved - (here.saved - there.saved) * (seconds - here.seconds) / (there.seconds - here.seconds)


def _point(choices: Choices, columns: Sequence[int], moved: Mapping[int, int] = NOTHING) -> HullPoint:
    """A choice, and what planning makes of it: the walk of :func:`policylang.planning.liveness.backward_needs`.

    ``moved``: the memory that is copied to the host, and the row that is.
    """
    facts, roots = choices.facts, storage_roots(choices.facts)
    decided = again_of(choices, columns)
    needed = bytearray(len(facts))
    for row in choices.read:
        needed[row] = 1
    offloaded = {facts.owners[row] for row in moved.values()}
    kept: set[int] = set()
    again: set[int] = set()
    forward, flags, owners, inputs = facts.forward_mask, facts.flags, facts.owners, facts.inputs
    for row in reversed(facts.forward):
        if not needed[row] or flags[row] & Flag.SYMBOLIC:
            continue
        owner = owners[row]
        if decided[owner]:
            again.add(owner)
            for source in inputs[row]:
                needed[source] |= forward[source]
        elif roots[row] in moved:
            offloaded.add(owner)
        elif owner not in choices.moved:
            kept.add(owner)
    return HullPoint(
        saved=sum(choices.sizes[column] for column in columns if choices.rows[column] not in moved),
        seconds=fsum(choices.seconds[column] for column in columns),
        kept=frozenset(kept),
        again=frozenset(again),
        moved=frozenset(offloaded),
    )


def again_of(choices: Choices, columns: Sequence[int]) -> bytearray:
    """By owner, 1 where the decision is *recompute*: of a view where what it looks into is not kept."""
    facts, keeps, runs = choices.facts, choices.keeps, choices.runs
    roots = storage_roots(facts)
    chosen = bytearray(len(choices.rows))
    for column in columns:
        chosen[column] = 1
    decided = bytearray(len(facts))
    for row in facts.forward:
        owner, fixed = facts.owners[row], choices.fixed[facts.owners[row]]
        if fixed:
            decided[owner] = fixed == MUST_RUN
        elif choices.same_as[row] != row:
            keep = keeps[roots[row]]
            decided[owner] |= keep == NONE or not chosen[keep]
        elif runs[owner] != NONE:
            decided[owner] |= chosen[runs[owner]]
    return decided
