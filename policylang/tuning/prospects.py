"""All mixtures of patterns that might be written, with their figures as they are composed: the set that a budget picks
from. It is fixed for a graph and a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from policylang.language.selectors import nth
from policylang.tuning.composition import Composition, Ints, Mixtures, Pieces
from policylang.tuning.decision_list import Zone, scripts
from policylang.tuning.patterns import Fates
from policylang.tuning.phrases import Vocabulary

FIRST, LAST, EVERY = 0, 1, 2
_FEW_BLOCKS = 16
_NEAR = 3
"""Patterns are mixed with a third that is so many points of the hull apart."""


@frozen(eq=False)
class Prospects:
    """One entry a mixture: the blocks of a zone follow one pattern, the last few another, all others a third."""

    zone: Ints
    """The number of the pattern in the zone."""
    rest: Ints
    """The number of the pattern of the other blocks."""
    end: Ints
    """The number of the pattern of the last few."""
    around: Ints
    """The number of the pattern of what lies outside of blocks."""
    kind: Ints
    """``FIRST``, ``LAST`` or ``EVERY``."""
    number: Ints
    """So many blocks from that end; every so manyth."""
    last: Ints
    """How many blocks the last few are; 0 where there are only two patterns."""
    figures: Mixtures

    def __len__(self) -> int:
        return len(self.zone)


def prospects(
    composition: Composition,
    patterns: Sequence[Pieces],
    *,
    mixed: bool,
    variants: Sequence[tuple[int, Pieces]] = (),
) -> Prospects:
    """Every pattern in all blocks, and every two of them in the first or last so many or every so manyth: of those
    whose blocks keep what they hand on, or with ``mixed`` of all. A step from one number of blocks to the next is a
    large one; between two of them the last block, or where blocks are few the last two, may follow a third pattern.

    ``variants`` are patterns that copy to the host, each with the number of the pattern of which it is one: these are
    in all blocks, and in the first so many where the others follow that pattern or one near it.
    """
    count, blocks = len(patterns), composition.count
    shapes = [(FIRST, blocks)]
    shapes += [(kind, number) for number in range(1, blocks) for kind in (FIRST, LAST)]
    shapes += [(EVERY, number) for number in range(2, min(blocks // 2, 8) + 1)]
    rows: list[tuple[int, ...]] = []
    unlike = _unlike_outside(composition, patterns)
    least = min(unlike, key=lambda number: (int(patterns[number].saved[-1]), number), default=0)
    for one in range(count):
        for other in range(count):
            alone = one == other
            if not alone and not mixed and not (patterns[one].hands_on and patterns[other].hands_on):
                continue
            arounds = dict.fromkeys((one, *unlike) if alone else (one, other, least))
            for kind, number in shapes:
                if alone is (number == blocks) and (kind == EVERY or one <= other):
                    rows += [(one, other, other, around, kind, number, 0) for around in arounds]
            near = _NEAR if blocks <= _FEW_BLOCKS else 1
            if alone or abs(one - other) > near:
                continue
            thirds = [
                third
                for third in range(count)
                if third not in (one, other) and patterns[third].hands_on
                if blocks <= _FEW_BLOCKS or min(abs(one - third), abs(other - third)) <= _NEAR
            ]
            rows += [
                (one, other, third, around, FIRST, number, last)
                for third in thirds
                for last in ((1, 2) if blocks <= _FEW_BLOCKS else (1,))
                for number in range(1, blocks - last)
                for around in arounds
            ]
    if not blocks:
        rows = [(one, one, one, one, FIRST, 0, 0) for one in range(count)]
    if not variants:
        return _made(composition, patterns, rows)
    beside = _near(patterns)
    bases = [one for one, _ in variants]
    rows += [
        (one, other, other, around, FIRST, number, 0)
        for one, base in enumerate(bases, count)
        for other in (
            *beside[base],
            *(each for each, of in enumerate(bases, count) if of in beside[base] and each != one),
        )
        for number in range(1, blocks)
        for around in dict.fromkeys((one, other))
    ]
    rows += [(one, one, one, one, FIRST, blocks, 0) for one in range(count, count + len(bases))]
    return _made(composition, [*patterns, *(each for _, each in variants)], rows)


def _near(patterns: Sequence[Pieces]) -> list[list[int]]:
    """By pattern, itself and those next to it by their bytes whose blocks keep what they hand on."""
    ordered = sorted(range(len(patterns)), key=lambda each: patterns[each].saved.sum())
    rank = {number: at for at, number in enumerate(ordered)}
    usable = sorted((each for each in rank if patterns[each].hands_on), key=rank.__getitem__)
    found = []
    for number in range(len(patterns)):
        below = [each for each in usable if rank[each] < rank[number]][-_NEAR:]
        above = [each for each in usable if rank[each] > rank[number]][:_NEAR]
        found.append([number, *below, *above])
    return found


def _made(composition: Composition, patterns: Sequence[Pieces], rows: Sequence[tuple[int, ...]]) -> Prospects:
    blocks = composition.count
    zone, rest, end, around, kind, number, last = np.array(rows, dtype=np.int64).T
    positions = np.arange(blocks)
    in_zone = (kind == FIRST)[:, None] & (positions < number[:, None])
    in_zone |= (kind == LAST)[:, None] & (positions >= blocks - number[:, None])
    in_zone |= (kind == EVERY)[:, None] & ((positions + 1) % np.maximum(number, 1)[:, None] == 0)
    chosen = np.where(in_zone, zone[:, None], rest[:, None])
    chosen = np.where(positions >= blocks - last[:, None], end[:, None], chosen)
    figures = composition.mixtures(patterns, chosen, around)
    return Prospects(zone, rest, end, around, kind, number, last, figures)


def _unlike_outside(composition: Composition, patterns: Sequence[Pieces]) -> list[int]:
    """One pattern for each thing that is done outside of blocks: any of them goes with any pattern in all blocks, and
    that which keeps least with any two."""
    outside = [number for number, each in enumerate(composition.classes.all) if not each.inside]
    found: dict[tuple[int, ...], int] = {}
    for number, each in enumerate(patterns):
        found.setdefault(tuple(each.asked[at] for at in outside), number)
    return list(found.values())


def place_of(kind: int, number: int, blocks: int) -> str:
    """``in first 3 blocks``; all of them are ``in block``."""
    if number >= blocks:
        return "in block"
    if kind == EVERY:
        return f"in every {nth(number)} block"
    end = "first" if kind == FIRST else "last"
    return f"in {end} block" if number == 1 else f"in {end} {number} blocks"


class Writer:
    """Writes prospects as policies. How to tell two patterns apart is worked out once for any number of blocks."""

    _MARK, _END = "in first 0 blocks", "in last 0 blocks"

    def __init__(
        self, patterns: Sequence[Fates], inside: Vocabulary, outside: Vocabulary, *, head: str, override: bool
    ) -> None:
        self.patterns = patterns
        self.head = head
        self.inside = inside
        self.outside = outside
        self.override = override
        self._known: dict[tuple[int, int, int, int, bool], str | None] = {}

    def text(self, all_of: Prospects, at: int, blocks: int) -> str | None:
        """The text of a prospect; None where ten statements do not hold it."""
        zone, rest, around = int(all_of.zone[at]), int(all_of.rest[at]), int(all_of.around[at])
        kind, number, last = int(all_of.kind[at]), int(all_of.number[at]), int(all_of.last[at])
        end = int(all_of.end[at]) if last else -1
        if zone == rest:
            return self._template(rest, rest, end, around)
        ways = [(self._template(rest, zone, end, around), place_of(kind, number, blocks))]
        if kind != EVERY:
            opposite = place_of(LAST if kind == FIRST else FIRST, blocks - number, blocks)
            ways.append((self._template(zone, rest, end, around, nested=True), opposite))
        found = [template.replace(self._MARK, place) for template, place in ways if template is not None]
        text = min(found, key=lambda text: (text.count("\n"), len(text), text), default=None)
        return None if text is None else text.replace(self._END, place_of(LAST, last, blocks))

    def _template(self, base: int, zone: int, end: int, around: int, *, nested: bool = False) -> str | None:
        key = base, zone, end, around, nested
        if key not in self._known:
            zones = [] if base == zone else [Zone(self._MARK, self.patterns[zone])]
            zones += [] if end < 0 else [Zone(self._END, self.patterns[end], nested)]
            made = scripts(
                self.inside,
                self.outside,
                self.patterns[base],
                zones,
                self.patterns[around],
                undecided=not self.override,
            )
            texts = (script.text(self.head, override=self.override) for script in made)
            self._known[key] = next((text for text in texts if text is not None), None)
        return self._known[key]
