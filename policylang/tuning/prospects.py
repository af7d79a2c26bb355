"""All mixtures of patterns that might be written, with their figures as they are composed: the set that a budget picks
from. It is fixed for a graph and a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from policylang.language.formatting.unparse import nth
from policylang.tuning.composition import Composition, Ints, Mixtures, Pieces
from policylang.tuning.decision_list import Zone, scripts
from policylang.tuning.patterns import Fates
from policylang.tuning.phrases import Vocabulary

FIRST, LAST, EVERY = 0, 1, 2


@frozen(eq=False)
class Prospects:
    """One entry a mixture: the blocks of a zone follow one pattern, all others another."""

    zone: Ints
    """The number of the pattern in the zone."""
    rest: Ints
    """The number of the pattern of the other blocks."""
    around: Ints
    """The number of the pattern of what lies outside of blocks."""
    kind: Ints
    """``FIRST``, ``LAST`` or ``EVERY``."""
    number: Ints
    """So many blocks from that end; every so manyth."""
    figures: Mixtures

    def __len__(self) -> int:
        return len(self.zone)


def prospects(composition: Composition, patterns: Sequence[Pieces], *, mixed: bool) -> Prospects:
    """Every pattern in all blocks, and every two of them in the first or last so many or every so manyth: of those
    whose blocks keep what they hand on, or with ``mixed`` of all."""
    count, blocks = len(patterns), composition.count
    shapes = [(FIRST, blocks)]
    shapes += [(kind, number) for number in range(1, blocks) for kind in (FIRST, LAST)]
    shapes += [(EVERY, number) for number in range(2, min(blocks // 2, 8) + 1)]
    rows: list[tuple[int, int, int, int, int]] = []
    for one in range(count):
        for other in range(count):
            for kind, number in shapes:
                if (one == other) != (number == blocks):
                    continue
                if one != other and not mixed and not (patterns[one].hands_on and patterns[other].hands_on):
                    continue
                if kind != EVERY and one > other:
                    continue
                rows += [(one, other, around, kind, number) for around in dict.fromkeys((one, other))]
    if not blocks:
        rows = [(one, one, one, FIRST, 0) for one in range(count)]
    table = np.array(rows, dtype=np.int64)
    zone, rest, around, kind, number = table.T
    in_zone = np.zeros((len(rows), blocks), dtype=bool)
    positions = np.arange(blocks)
    in_zone |= (kind == FIRST)[:, None] & (positions < number[:, None])
    in_zone |= (kind == LAST)[:, None] & (positions >= blocks - number[:, None])
    in_zone |= (kind == EVERY)[:, None] & ((positions + 1) % np.maximum(number, 1)[:, None] == 0)
    chosen = np.where(in_zone, zone[:, None], rest[:, None])
    return Prospects(zone, rest, around, kind, number, composition.mixtures(patterns, chosen, around))


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

    _MARK = "in first 0 blocks"

    def __init__(self, patterns: Sequence[Fates], inside: Vocabulary, outside: Vocabulary, *, override: bool) -> None:
        self.patterns = patterns
        self.inside = inside
        self.outside = outside
        self.override = override
        self._known: dict[tuple[int, int, int], str | None] = {}

    def text(self, all_of: Prospects, at: int, blocks: int) -> str | None:
        """The text of a prospect; None where ten statements do not hold it."""
        zone, rest, around = int(all_of.zone[at]), int(all_of.rest[at]), int(all_of.around[at])
        kind, number = int(all_of.kind[at]), int(all_of.number[at])
        if zone == rest:
            return self._template(rest, rest, around)
        ways = [(self._template(rest, zone, around), place_of(kind, number, blocks))]
        if kind != EVERY:
            opposite = place_of(LAST if kind == FIRST else FIRST, blocks - number, blocks)
            ways.append((self._template(zone, rest, around), opposite))
        found = [template.replace(self._MARK, place) for template, place in ways if template is not None]
        return min(found, key=lambda text: (text.count("\n"), len(text), text), default=None)

    def _template(self, base: int, zone: int, around: int) -> str | None:
        key = base, zone, around
        if key not in self._known:
            zones = [] if base == zone else [Zone(self._MARK, self.patterns[zone])]
            made = scripts(self.inside, self.outside, self.patterns[base], zones, self.patterns[around])
            texts = (script.text(self.override) for script in made)
            self._known[key] = next((text for text in texts if text is not None), None)
        return self._known[key]
