"""The candidates of a tuning: mixtures of patterns that might be written, with their composed figures and their texts.

Patterns are the best choices of whole classes, and what people do. In variants of a pattern some of what it saves
waits on the host: the largest classes, as much of a block as is copied while the block computes, and where memory is
short the blocks' outputs, or all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from statistics import median_low

import numpy as np
from attrs import frozen

from policylang.graph.blocks import BlockTable, blocks_of
from policylang.graph.facts import Facts, Flag, Phase
from policylang.language.globs import PathGlob
from policylang.language.selectors import nth
from policylang.language.syntax import Action
from policylang.planning.decisions.offloading import resolve_offloads
from policylang.planning.liveness import SavedForBackward, backward_needs
from policylang.planning.value_outcome import Decision, Why, offloads
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.composition import NO_RULES, Composition, Ints, Mixtures, SegmentProfile
from policylang.tuning.decision_list import Zone, scripts
from policylang.tuning.phrases import Option, ValueClasses, Vocabulary

_LEAST = 0.1
"""The share of the forward's values that a stack has at least."""

Prefix = tuple[str, ...]


def stacks(facts: Facts) -> tuple[str, BlockTable]:
    """The glob of a ``blocks`` statement, and the blocks that there are then. The glob is empty where the language's
    own choice takes all that there is.

    Blocks are the children of the outermost lists that repeat: the 16 bottlenecks of a ResNet-50, not its four stages.
    """
    alone = blocks_of(facts)
    if not alone.names or any(region is not None for region in facts.ac_regions):
        return "", alone
    repeated = _repeated_lists(facts)
    nodes = Counter(_starred(facts.modules[row], repeated) for row in facts.forward)
    found = [prefix for prefix, count in nodes.items() if prefix and count >= _LEAST * len(facts.forward)]
    if not found:
        return "", alone
    parents = list(dict.fromkeys(prefix[-2] if len(prefix) > 1 else "" for prefix in found))
    names = list(dict.fromkeys(prefix[-1] for prefix in found))
    if len(found) == 1:
        numbered = found[0].index("*") if "*" in found[0] else len(found[0])
        glob = ".".join((*found[0][numbered - 1 :], "*"))
    elif len(names) == 1 and all(parents):
        glob = f"{{{','.join(parents)}}}.{names[0]}.*"
    else:
        glob = f"{{{','.join(names)}}}.*"
    together = blocks_of(facts, PathGlob(glob))
    if list(together.block_of) == list(alone.block_of):
        return "", alone
    wanted = sum(nodes[prefix] for prefix in found)
    got = sum(1 for row in facts.forward if facts.modules[row] and together.block_of[row] >= 0)
    return (glob, together) if wanted == got else ("", alone)


def _starred(path: str, repeated: Collection[Prefix]) -> Prefix:
    """The outermost list of a path that repeats; none is empty."""
    parts = path.split(".")
    ends = (at for at, part in enumerate(parts) if part.isdigit())
    prefixes = (tuple("*" if part.isdigit() else part for part in parts[:at]) for at in ends)
    return next((prefix for prefix in prefixes if prefix in repeated), ())


def _repeated_lists(facts: Facts) -> frozenset[Prefix]:
    """The paths with numbered children of which two compute the same."""
    words: dict[object, int] = {}
    children: dict[tuple[Prefix, str], list[int]] = {}
    numbered = {
        path: [(parts[:at], part, parts[at + 1 :]) for at, part in enumerate(parts) if part.isdigit()]
        for path in dict.fromkeys(facts.modules[row] for row in facts.forward)
        if (parts := tuple(path.split(".")))
    }
    for row in facts.forward:
        for prefix, number, within in numbered[facts.modules[row]]:
            word = facts.targets[row], within, facts.bytes[row], facts.flops[row]
            children.setdefault((prefix, number), []).append(words.setdefault(word, len(words)))
    seen: set[tuple[Prefix, tuple[int, ...]]] = set()
    found: set[Prefix] = set()
    for (prefix, _), each in children.items():
        if (alike := (prefix, tuple(each))) in seen:
            found.add(tuple("*" if part.isdigit() else part for part in prefix))
        seen.add(alike)
    return frozenset(found)


Pattern = tuple[int, ...]
"""A :class:`Option` for each class."""

_SAVED_BY_HAND = ((), ("attention",), ("matmul",), ("compute",), ("attention", "matmul"))


def of_choice(facts: Facts, classes: ValueClasses, kept: Collection[int], again: Collection[int]) -> Pattern:
    """The outcome of most values of each class if some producers are saved and some are recomputed."""
    roots, of, owners = facts.storage_roots, classes.of, facts.owners
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
    pattern = []
    for number in range(len(classes)):
        if not saved[number] and not repeated[number]:
            pattern.append(int(Option.EITHER))
        else:
            pattern.append(int(Option.SAVE if saved[number] >= repeated[number] else Option.RECOMPUTE))
    return tuple(pattern)


def by_hand(classes: ValueClasses, inside: Vocabulary, outside: Vocabulary) -> Iterator[Pattern]:
    """Save all; recompute all but the outputs of blocks, and but some operators."""
    yield tuple(int(Option.SAVE) for _ in classes.all)
    for groups in _SAVED_BY_HAND:
        kept = set(classes.crossing)
        for vocabulary in (inside, outside):
            for group in groups:
                kept.update(vocabulary.of_group(group))
        yield tuple(
            int(Option.SAVE if number in kept or (inside.numbers and not each.inside) else Option.RECOMPUTE)
            for number, each in enumerate(classes.all)
        )
    for kept_inside in (classes.crossing, frozenset[int]()):
        yield tuple(int(Option.SAVE if number in kept_inside else Option.RECOMPUTE) for number in range(len(classes)))
    yield tuple(int(Option.RECOMPUTE if each.inside else Option.SAVE) for each in classes.all)


def texts_by_hand(blocks: int) -> Iterator[str]:
    """Candidates beyond patterns of blocks that save their outputs: blocks recomputed from their attention's or
    products' results, every second block, stages at the fewest bytes alive."""
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


_FEW = 2
"""So many classes take a line or two to write."""
_BASES = 100_000
_MOST_BASES, _LEAST_BASES, _SMALL_BASES = 10, 4, 1
"""The patterns that are varied: so many nodes in whole graphs, within limits. Of those that keep least, so many are
varied in every way."""
_SHARE = 0.7
"""The share of what computation would hide that is moved, if copies were never delayed."""
_LARGE = 0.1
"""A share of the largest value: two copies may be in flight at once, and that of a small value takes the place of a
large one's."""
_OFFLOAD = Decision(Action.OFFLOAD, None, Why.RULE)
_RECOMPUTE = Decision(Action.RECOMPUTE, None, Why.RULE)


def host_variants(
    facts: Facts, times: NodeTimes, classes: ValueClasses, patterns: Sequence[SegmentProfile]
) -> Iterator[tuple[int, Pattern]]:
    """Each with the number of the pattern that it is a variant of. Patterns that nothing beats in both bytes and time,
    a few over the whole range, are varied."""
    sizes = _movable_bytes(facts, classes)
    room = _hidden_in_a_block(facts, times, classes)
    for at, number in enumerate(_bases(patterns, _BASES // max(len(facts), 1))):
        pattern = patterns[number].asked
        movable = [each for each, size in enumerate(sizes) if size and pattern[each] == Option.SAVE]
        movable.sort(key=lambda each: (-sizes[each], each))
        large = [each for each in movable if sizes[each] >= _LARGE * sizes[movable[0]]]
        filled, left = tuple[int, ...](), _SHARE * room
        for each in large:  # as many as there is room for, each taken that still fits
            if sizes[each] <= left:
                filled, left = (*filled, each), left - sizes[each]
        few = filled[:_FEW]
        total, most = (sum(sizes[each] for each in those) for those in (filled, few))
        kinds = [few] if 2 * most >= total else [filled, few]
        if at < _SMALL_BASES:
            kinds += [tuple(each for each in large if each in classes.crossing), tuple(large)]
        for chosen in dict.fromkeys(kinds):
            if chosen:
                moved = (Option.OFFLOAD if each in chosen else option for each, option in enumerate(pattern))
                yield number, tuple(map(int, moved))


def _bases(patterns: Sequence[SegmentProfile], count: int) -> list[int]:
    """Some of those that nothing beats, by rising bytes, the first and the last among them."""
    usable = [number for number, each in enumerate(patterns) if each.saves_outputs or not each.waits]
    ordered = sorted(usable, key=lambda number: (patterns[number].saved.sum(), patterns[number].recompute.sum()))
    kept: list[int] = []
    for number in ordered:
        if not kept or patterns[number].recompute.sum() < patterns[kept[-1]].recompute.sum():
            kept.append(number)
    count = min(max(count, _LEAST_BASES), _MOST_BASES)
    if len(kept) <= count:
        return kept
    return [kept[at * (len(kept) - 1) // (count - 1)] for at in range(count)]


def _movable_bytes(facts: Facts, classes: ValueClasses) -> list[int]:
    """By class, the bytes that planning would move of it in a block; 0 outside of blocks where there are any."""
    decisions: list[Decision | None] = [None] * len(facts)
    for row in facts.forward:
        decisions[row] = _RECOMPUTE
    needs = backward_needs(facts, decisions)
    asked = sorted({*needs.recomputed, *needs.saved})
    always = Flag.SYMBOLIC | Flag.SEED
    moving = tuple(row for row in asked if not facts.flags[facts.owners[row]] & always)
    for row in moving:
        decisions[row] = _OFFLOAD
    resolve_offloads(NO_RULES, facts, decisions, SavedForBackward.of(offloaded=moving))
    block_of, blocks = classes.blocks.block_of, len(classes.blocks.names)
    sizes, roots = [0] * (len(classes) + 1), facts.storage_roots
    for row in moving:
        if offloads(decisions[row]) and facts.ops[roots[row]] == "call_function" and (block_of[row] >= 0 or not blocks):
            sizes[classes.of[row]] += facts.bytes[row]
    return [size // max(blocks, 1) for size in sizes[:-1]]


def _hidden_in_a_block(facts: Facts, times: NodeTimes, classes: ValueClasses) -> int:
    """Bytes that are copied while a block of middling length computes, in the shorter of forward and backward; of a
    graph without blocks while all of it does."""
    block_of, blocks = classes.blocks.block_of, len(classes.blocks.names)
    forward, backward = [0.0] * max(blocks, 1), 0.0
    for row, phase in enumerate(facts.phases):
        if phase == Phase.FORWARD and (block_of[row] >= 0 or not blocks):
            forward[block_of[row] if blocks else 0] += times.seconds[row]
        elif phase == Phase.BACKWARD:
            backward += times.seconds[row]
    return int(min(median_low(forward), backward / max(blocks, 1)) * (times.device.host_bandwidth or 0.0))


FIRST, LAST, EVERY = 0, 1, 2
_FEW_BLOCKS = 16
_NEAR = 3
"""Patterns are mixed with a third that is so many points of the hull apart."""


@frozen(eq=False)
class CandidateTable:
    """One entry a mixture: the blocks of a zone follow one pattern, the last few another, all others a third."""

    zone: Ints
    """The number of the pattern in the zone."""
    rest: Ints
    """The number of the pattern of the other blocks."""
    end: Ints
    """The number of the pattern of the last few."""
    around: Ints
    """The number of the pattern outside of blocks."""
    kind: Ints
    """``FIRST``, ``LAST`` or ``EVERY``."""
    number: Ints
    """So many blocks from that end; every so manyth."""
    last: Ints
    """The number of last blocks; 0 with only two patterns."""
    figures: Mixtures

    def __len__(self) -> int:
        return len(self.zone)


def candidate_table(
    composition: Composition,
    patterns: Sequence[SegmentProfile],
    *,
    mixed: bool,
    variants: Sequence[tuple[int, SegmentProfile]] = (),
) -> CandidateTable:
    """Every pattern in all blocks, and every two of them in the first or last so many or every so manyth: of those
    whose blocks save their outputs, or with ``mixed`` of all. A step from one number of blocks to the next is a
    large one; between two of them the last block, or where blocks are few the last two, may follow a third pattern.

    ``variants`` are patterns that copy to the host, each with the number of the pattern of which it is one: these are
    in all blocks, and in the first so many where the others follow that pattern or one near it.
    """
    count, blocks = len(patterns), composition.count
    shapes = [(FIRST, blocks)]
    shapes += [(kind, number) for number in range(1, blocks) for kind in (FIRST, LAST)]
    shapes += [(EVERY, number) for number in range(2, min(blocks // 2, 8) + 1)]
    staged = any(each.stage for each in composition.classes.all)
    if staged:  # the patterns tell stages apart: those next to each other are mixed
        shapes = [each for each in shapes if each[0] != EVERY]
    ordered = sorted(range(count), key=lambda number: (int(patterns[number].saved.sum()), number))
    rank = {number: at for at, number in enumerate(ordered)}
    rows: list[tuple[int, ...]] = []
    unlike = _unlike_outside(composition, patterns)
    least = min(unlike, key=lambda number: (int(patterns[number].saved[-1]), number), default=0)
    for one in range(count):
        for other in range(count):
            alone = one == other
            if not alone and not mixed and not (patterns[one].saves_outputs and patterns[other].saves_outputs):
                continue
            if staged and abs(rank[one] - rank[other]) > _NEAR:
                continue
            arounds = dict.fromkeys((one, *unlike) if alone else (one, other, least))
            for kind, number in shapes:
                if alone is (number == blocks) and (kind == EVERY or one <= other):
                    rows += [(one, other, other, around, kind, number, 0) for around in arounds]
            near = _NEAR if blocks <= _FEW_BLOCKS else 1
            if staged or alone or abs(one - other) > near:
                continue
            thirds = [
                third
                for third in range(count)
                if third not in (one, other) and patterns[third].saves_outputs
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


def _near(patterns: Sequence[SegmentProfile]) -> list[list[int]]:
    """By pattern, itself and those next to it by their bytes whose blocks save their outputs."""
    ordered = sorted(range(len(patterns)), key=lambda each: patterns[each].saved.sum())
    rank = {number: at for at, number in enumerate(ordered)}
    usable = sorted((each for each in rank if patterns[each].saves_outputs), key=rank.__getitem__)
    found = []
    for number in range(len(patterns)):
        below = [each for each in usable if rank[each] < rank[number]][-_NEAR:]
        above = [each for each in usable if rank[each] > rank[number]][:_NEAR]
        found.append([number, *below, *above])
    return found


def _made(
    composition: Composition, patterns: Sequence[SegmentProfile], rows: Sequence[tuple[int, ...]]
) -> CandidateTable:
    blocks = composition.count
    zone, rest, end, around, kind, number, last = np.array(rows, dtype=np.int64).T
    positions = np.arange(blocks)
    in_zone = (kind == FIRST)[:, None] & (positions < number[:, None])
    in_zone |= (kind == LAST)[:, None] & (positions >= blocks - number[:, None])
    in_zone |= (kind == EVERY)[:, None] & ((positions + 1) % np.maximum(number, 1)[:, None] == 0)
    chosen = np.where(in_zone, zone[:, None], rest[:, None])
    chosen = np.where(positions >= blocks - last[:, None], end[:, None], chosen)
    figures = composition.mixtures(patterns, chosen, around)
    return CandidateTable(zone, rest, end, around, kind, number, last, figures)


def _unlike_outside(composition: Composition, patterns: Sequence[SegmentProfile]) -> list[int]:
    """One pattern for each outcome outside of blocks: each is combined with every pattern in all blocks, the one that
    keeps least also with any two."""
    outside = [number for number, each in enumerate(composition.classes.all) if not each.inside]
    found: dict[tuple[int, ...], int] = {}
    for number, each in enumerate(patterns):
        found.setdefault(tuple(each.asked[at] for at in outside), number)
    return list(found.values())


def blocks_phrase(kind: int, number: int, blocks: int) -> str:
    """``in first 3 blocks``; all of them are ``in block``."""
    if number >= blocks:
        return "in block"
    if kind == EVERY:
        return f"in every {nth(number)} block"
    end = "first" if kind == FIRST else "last"
    return f"in {end} block" if number == 1 else f"in {end} {number} blocks"


class Writer:
    """Writes candidates as policies. What distinguishes two patterns is computed once for any number of blocks."""

    _MARK, _END = "in first 0 blocks", "in last 0 blocks"

    def __init__(
        self, patterns: Sequence[Pattern], inside: Vocabulary, outside: Vocabulary, *, head: str, override: bool
    ) -> None:
        self.patterns = patterns
        self.head = head
        self.inside = inside
        self.outside = outside
        self.override = override
        self._known: dict[tuple[int, int, int, int, bool], str | None] = {}

    def text(self, all_of: CandidateTable, at: int, blocks: int) -> str | None:
        """The text of a candidate; None where 16 statements do not hold it."""
        zone, rest, around = int(all_of.zone[at]), int(all_of.rest[at]), int(all_of.around[at])
        kind, number, last = int(all_of.kind[at]), int(all_of.number[at]), int(all_of.last[at])
        end = int(all_of.end[at]) if last else -1
        if zone == rest:
            return self._template(rest, rest, end, around)
        ways = [(self._template(rest, zone, end, around), blocks_phrase(kind, number, blocks))]
        if kind != EVERY:
            opposite = blocks_phrase(LAST if kind == FIRST else FIRST, blocks - number, blocks)
            ways.append((self._template(zone, rest, end, around, nested=True), opposite))
        found = [template.replace(self._MARK, place) for template, place in ways if template is not None]
        text = min(found, key=lambda text: (text.count("\n"), len(text), text), default=None)
        return None if text is None else text.replace(self._END, blocks_phrase(LAST, last, blocks))

    def _template(self, base: int, zone: int, end: int, around: int, *, nested: bool = False) -> str | None:
        key = base, zone, end, around, nested
        if key in self._known:
            return self._known[key]
        part = (base, zone, -1, around) if end >= 0 else (base, base, -1, around)
        if part != key[:4] and self._template(*part) is None:  # the whole has the lines of the part, and more
            self._known[key] = None
        else:
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
