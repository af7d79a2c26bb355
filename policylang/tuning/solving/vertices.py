"""The lower hull of a problem: from the price of a byte to the choice that is best at it, for every price."""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp, fsum, ldexp

from attrs import frozen

from policylang.tuning.solving.choices import Choices
from policylang.tuning.solving.relaxation import Relaxation, Weighted

TICKS = 45
"""Times are counted in ticks, 2**45 of them in the time of all that may run again, or half as many."""
STRAIGHT = 10**9
"""A point that lies less than this part below the line between its neighbours is on it."""


@frozen
class Vertex:
    """A choice. Its bytes and its time, in ticks, are those of the columns that are 1."""

    bytes: int
    ticks: int
    columns: tuple[int, ...]


class Hull:
    """Between two points of the hull the price of a byte at which both are worth the same finds one below the line that
    joins them, or shows that there is none (Eisner and Severance, "Mathematical techniques for efficient record
    segmentation in large shared databases", Journal of the ACM 1976)."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.sizes: Sequence[int] = choices.sizes
        _, exponent = frexp(fsum(choices.seconds))
        self.ticks = [round(ldexp(each, TICKS - exponent)) for each in choices.seconds]
        rows = len(choices.facts)
        self.few = [2 * rows * (1 + (not size)) + row for row, size in zip(choices.rows, choices.sizes, strict=True)]
        self.relaxation = Relaxation(choices)

    def vertices(self, sizes: Sequence[int] | None = None) -> list[Vertex]:
        """From the most bytes to the fewest. ``sizes``: bytes by column, where they are not those of the problem."""
        self.sizes = self.choices.sizes if sizes is None else sizes
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

    def _is_below(self, here: Vertex, between: Vertex, there: Vertex) -> bool:
        freed, paid = here.bytes - there.bytes, there.ticks - here.ticks
        below = freed * (here.ticks - between.ticks) + paid * (here.bytes - between.bytes)
        return there.bytes <= between.bytes <= here.bytes and below * STRAIGHT > freed * paid

    def _vertex(self, columns: tuple[int, ...]) -> Vertex:
        return Vertex(sum(self.sizes[each] for each in columns), sum(self.ticks[each] for each in columns), columns)

    def _best(self, *costs: list[Weighted]) -> Vertex:
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
