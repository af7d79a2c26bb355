"""What may be done to the classes of values in a block: points of the linear program's hull, and what people do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from policylang.graph.facts import Facts, storage_roots
from policylang.tuning.lower_hull import HullPoint
from policylang.tuning.phrases import Vocabulary
from policylang.tuning.value_classes import Fate, ValueClasses

Fates = tuple[int, ...]
"""A :class:`Fate` for each class."""

_SAVED_BY_HAND = (
    (),
    ("attention",),
    ("matmul",),
    ("compute",),
    ("attention", "matmul"),
)


def of_choice(facts: Facts, classes: ValueClasses, kept: Collection[int], again: Collection[int]) -> Fates:
    """What most values of each class come to where some owners are saved and some run again."""
    roots, of, owners = storage_roots(facts), classes.of, facts.owners
    saved, repeated = [0] * (len(classes) + 1), [0] * (len(classes) + 1)
    marked: set[int] = set()
    for owner in sorted(kept):
        root = owners[roots[owner]] if facts.ops[roots[owner]] == "call_function" else owner
        if root not in marked:  # a look at what is kept costs nothing
            marked.add(root)
            saved[of[root]] += 1
    for owner in sorted(again):
        if owner not in marked:
            repeated[of[owner]] += 1
    fates = []
    for number in range(len(classes)):
        if not saved[number] and not repeated[number]:
            fates.append(int(Fate.EITHER))
        else:
            fates.append(int(Fate.SAVE if saved[number] >= repeated[number] else Fate.RECOMPUTE))
    return tuple(fates)


def by_hand(classes: ValueClasses, inside: Vocabulary, outside: Vocabulary) -> Iterator[Fates]:
    """Save all; recompute all but what blocks hand on, and but some operators."""
    yield tuple(int(Fate.SAVE) for _ in classes.all)
    for groups in _SAVED_BY_HAND:
        kept = set(classes.crossing)
        for vocabulary in (inside, outside):
            for group in groups:
                kept.update(vocabulary.of_group(group))
        yield tuple(
            int(Fate.SAVE if number in kept or (inside.numbers and not each.inside) else Fate.RECOMPUTE)
            for number, each in enumerate(classes.all)
        )
    for kept_inside in (classes.crossing, frozenset[int]()):
        yield tuple(int(Fate.SAVE if number in kept_inside else Fate.RECOMPUTE) for number in range(len(classes)))
    yield tuple(int(Fate.RECOMPUTE if each.inside else Fate.SAVE) for each in classes.all)


def texts_by_hand(blocks: int) -> Iterator[str]:
    """What is no pattern of blocks that keep what they hand on: blocks that run again from what their attention or
    their products return, every second block, stages that follow what is alive."""
    if blocks > 1:
        yield "recompute everything in every 2nd block\nundecided -> save\n"
        yield "recompute everything in block\nsave attention in block\nundecided -> save\n"
    yield "recompute everything\nsave everything where crosses cut per 2 GiB\n"
    if blocks > 1:
        yield "recompute everything in block\nsave attention in block\nsave matmul in block\nundecided -> save\n"
        yield "recompute everything in first half of blocks\nsave attention in block\nundecided -> save\n"
    for size in ("1 GiB", "4 GiB", "512 MiB", "256 MiB", "8 GiB", "128 MiB", "64 MiB", "16 GiB"):
        yield f"recompute everything\nsave everything where crosses cut per {size}\n"
    if blocks > 1:
        yield "recompute everything in every 2nd block\nsave attention in block\nundecided -> save\n"


def thinned(points: Sequence[HullPoint], least: float) -> list[HullPoint]:
    """Without the points that lie less than ``least`` seconds below the line between those that stay (Douglas and
    Peucker, "Algorithms for the reduction of the number of points", 1973)."""
    kept = {0, len(points) - 1}
    pending = [(0, len(points) - 1)]
    while pending:
        left, right = pending.pop()
        here, there = points[left], points[right]
        farthest, depth = -1, least
        for at in range(left + 1, right):
            share = (here.saved - points[at].saved) / max(here.saved - there.saved, 1)
            below = here.seconds + share * (there.seconds - here.seconds) - points[at].seconds
            if below > depth:
                farthest, depth = at, below
        if farthest >= 0:
            kept.add(farthest)
            pending += [(left, farthest), (farthest, right)]
    return [points[at] for at in sorted(kept)]
