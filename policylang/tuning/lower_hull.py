"""The lower hull of what can be had: seconds of second runs against bytes kept, over all choices of a graph."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from math import frexp, fsum, inf, ldexp

from attrs import field, frozen

from policylang.graph.facts import Facts, Flag
from policylang.graph.storage import storage_roots
from policylang.planning.capabilities import Capabilities
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.choices import MUST_RUN, NONE, Choices, choices_of
from policylang.tuning.relaxation import Relaxation, Weighted

TICKS = 45
"""Times are counted in ticks, 2**45 of them in the time of all that may run again, or half as many."""
STRAIGHT = 10**9
"""A point that lies less than this part below the line between its neighbours is on it."""


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


def lower_hull(
    facts: Facts,
    times: NodeTimes,
    capabilities: Capabilities,
    *,
    keep: Collection[int] = (),
    override: bool = False,
) -> tuple[HullPoint, ...]:
    """The lower hull over all choices that planning takes for right: nothing that is safe to decide is below it.

    ``keep``: rows whose values are kept where the backward comes down to them, as by a rule that saves them.
    ``override``: what the user has tagged may be decided otherwise.

    Raises:
        PolicyError: the solver is not installed.
    """
    return hull_of(choices_of(facts, times, capabilities, keep=keep, override=override))


def hull_of(choices: Choices) -> tuple[HullPoint, ...]:
    """The lower hull of a problem."""
    if not choices.rows:
        return (_point(choices, ()),)
    return tuple(_point(choices, vertex.columns) for vertex in _Hull(choices).vertices())


@frozen
class _Vertex:
    bytes: int
    ticks: int
    columns: tuple[int, ...]


class _Hull:
    """Between two points of the hull the price of a byte at which both are worth the same finds one below the line that
    joins them, or shows that there is none (Eisner and Severance, "Mathematical techniques for efficient record
    segmentation in large shared databases", Journal of the ACM 1976)."""

    def __init__(self, choices: Choices) -> None:
        self.sizes = choices.sizes
        _, exponent = frexp(fsum(choices.seconds))
        self.ticks = [round(ldexp(each, TICKS - exponent)) for each in choices.seconds]
        rows = len(choices.facts)
        self.few = [2 * rows * (1 + (not size)) + row for row, size in zip(choices.rows, choices.sizes, strict=True)]
        self.relaxation = Relaxation(choices)

    def vertices(self) -> list[_Vertex]:
        found = [self._best([(1, self.ticks)], [(1, self.sizes)])]
        ahead = [self._best([(1, self.sizes)], [(1, self.ticks)])]
        while ahead:
            here, there = found[-1], ahead[-1]
            freed, paid = here.bytes - there.bytes, there.ticks - here.ticks
            if freed <= 0:
                ahead.pop()
                continue
            if paid <= 0:
                found[-1] = ahead.pop()
                continue
            price = [(freed, self.ticks), (paid, self.sizes)]
            between = self._vertex(self.relaxation.cheapest(price))
            if not self._is_below(here, between, there):
                found.append(ahead.pop())
                continue
            best = self._best(price, [(1, self.sizes)])
            ahead.append(best if self._is_below(here, best, there) else between)
        return found

    def _is_below(self, here: _Vertex, between: _Vertex, there: _Vertex) -> bool:
        freed, paid = here.bytes - there.bytes, there.ticks - here.ticks
        below = freed * (here.ticks - between.ticks) + paid * (here.bytes - between.bytes)
        return there.bytes <= between.bytes <= here.bytes and below * STRAIGHT > freed * paid

    def _vertex(self, columns: tuple[int, ...]) -> _Vertex:
        return _Vertex(sum(self.sizes[each] for each in columns), sum(self.ticks[each] for each in columns), columns)

    def _best(self, *costs: list[Weighted]) -> _Vertex:
        """The least of the first costs, of those the least of the next; of equals the one with few and early parts."""
        relaxation = self.relaxation
        columns: tuple[int, ...] = ()
        few: list[Weighted] = [(1, self.few)]
        for each in (*costs, few):
            columns = relaxation.cheapest(each)
            if not relaxation.is_cut:
                break
            relaxation.narrow()
        relaxation.widen()
        return self._vertex(columns)


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


def _point(choices: Choices, columns: Sequence[int]) -> HullPoint:
    """A choice, and what planning makes of it: the walk of :func:`policylang.planning.liveness.backward_needs`."""
    facts = choices.facts
    decided = again_of(choices, columns)
    needed = bytearray(len(facts))
    for row in choices.read:
        needed[row] = 1
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
        elif owner not in choices.moved:
            kept.add(owner)
    return HullPoint(
        saved=sum(choices.sizes[column] for column in columns),
        seconds=fsum(choices.seconds[column] for column in columns),
        kept=frozenset(kept),
        again=frozenset(again),
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
