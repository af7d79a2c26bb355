"""How one order differs from another: the steps that have to be moved to make both alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from attrs import frozen

Step = TypeVar("Step", bound=Hashable)


@frozen
class Displaced:
    """A step that stands elsewhere. ``behind`` and ``planned``: the numbers of the steps that it stands behind, among
    those that are in place, in the order found and in the order planned; -1 for the beginning."""

    at: int
    behind: int
    planned: int


def displaced(found: Sequence[Step], planned: Sequence[Step], weight: Callable[[Step], int]) -> list[Displaced]:
    """The steps of ``found`` that are not where ``planned`` has them, of the least weight in all; in the order of
    ``found``. Both have the same steps, each once. O(n log n), and O(n) where nothing differs.

    What stays is a heaviest increasing subsequence (Fredman, 1975, of unit weights), found with a Fenwick tree of
    prefix maxima.
    """
    if list(found) == list(planned):
        return []
    position = {step: at for at, step in enumerate(planned)}
    places = [position[step] for step in found]
    stays = _heaviest_increasing(places, [weight(step) for step in found])
    kept = [at in stays for at in range(len(found))]
    before_there = _before([at if kept[at] else -1 for at in range(len(found))])
    number = {place: at for at, place in enumerate(places)}
    before_planned = _before([number[place] if kept[number[place]] else -1 for place in range(len(planned))])
    return [Displaced(at, before_there[at], before_planned[place]) for at, place in enumerate(places) if not kept[at]]


def _before(kept: Sequence[int]) -> list[int]:
    """For each place the last number that stays before it."""
    found, last = [], -1
    for number in kept:
        found.append(last)
        last = number if number >= 0 else last
    return found


def _heaviest_increasing(places: Sequence[int], weights: Sequence[int]) -> frozenset[int]:
    """The numbers of the elements of a heaviest subsequence whose places rise."""
    tree: list[tuple[int, int]] = [(0, -1)] * (len(places) + 1)
    previous: list[int] = []
    top = (0, -1)
    for number, place in enumerate(places):
        best, at = (0, -1), place  # of the places before
        while at > 0:
            best = max(best, tree[at])
            at &= at - 1
        previous.append(best[1])
        total = (best[0] + weights[number], number)
        top = max(top, total)
        at = place + 1
        while at < len(tree):
            tree[at] = max(tree[at], total)
            at += at & -at
    stays, number = set(), top[1]
    while number >= 0:
        stays.add(number)
        number = previous[number]
    return frozenset(stays)
