"""Patterns in which some of what another pattern saves waits on the host.

Which classes: the largest, as much of a block as is copied while the block computes; where memory is short, what blocks
hand on, or all. How many blocks do so is said when patterns are mixed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median_low

from policylang.graph.facts import Facts, Flag, Phase, storage_roots
from policylang.language.syntax import Action
from policylang.planning.decisions.offloading import resolve_offloads
from policylang.planning.liveness import SavedForBackward, backward_needs
from policylang.planning.value_outcome import Decision, Why, offloads
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.composition import NO_RULES, Pieces
from policylang.tuning.patterns import Fates
from policylang.tuning.value_classes import Fate, ValueClasses

_FEW = 2
"""So many classes take a line or two to say."""
_BASES = 100_000
_MOST_BASES, _LEAST_BASES, _SMALL_BASES = 10, 4, 1
"""How many patterns are varied: so many nodes in whole graphs, within limits. Of them, so many of those that keep
least are varied in every way."""
_SHARE = 0.7
"""How much is moved of what computation would hide if copies were never held up."""
_LARGE = 0.1
"""Of the largest: two copies may be under way at once, and one of a small value takes the place of a large one's."""
_OFFLOAD = Decision(Action.OFFLOAD, None, Why.RULE)
_RECOMPUTE = Decision(Action.RECOMPUTE, None, Why.RULE)


def host_variants(
    facts: Facts, times: NodeTimes, classes: ValueClasses, patterns: Sequence[Pieces]
) -> Iterator[tuple[int, Fates]]:
    """Each with the number of the pattern that it is a variant of. Patterns that nothing beats in both bytes and time,
    a few over the whole range, are varied."""
    sizes = _movable_bytes(facts, classes)
    room = _hidden_in_a_block(facts, times, classes)
    for at, number in enumerate(_bases(patterns, _BASES // max(len(facts), 1))):
        fates = patterns[number].asked
        movable = [each for each, size in enumerate(sizes) if size and fates[each] == Fate.SAVE]
        movable.sort(key=lambda each: (-sizes[each], each))
        large = [each for each in movable if sizes[each] >= _LARGE * sizes[movable[0]]]
        filled = _filled(large, sizes, _SHARE * room)
        few = filled[:_FEW]
        kinds = [few] if 2 * _total(few, sizes) >= _total(filled, sizes) else [filled, few]
        if at < _SMALL_BASES:
            kinds += [tuple(each for each in large if each in classes.crossing), tuple(large)]
        for chosen in dict.fromkeys(kinds):
            if chosen:
                yield number, _with(fates, chosen)


def _filled(numbers: Sequence[int], sizes: Sequence[int], room: float) -> tuple[int, ...]:
    """As many as there is room for, each taken that still fits."""
    found = []
    for each in numbers:
        if sizes[each] <= room:
            found.append(each)
            room -= sizes[each]
    return tuple(found)


def _total(numbers: Sequence[int], sizes: Sequence[int]) -> int:
    return sum(sizes[each] for each in numbers)


def _with(fates: Fates, moved: Sequence[int]) -> Fates:
    varied = list(fates)
    for each in moved:
        varied[each] = int(Fate.OFFLOAD)
    return tuple(varied)


def _bases(patterns: Sequence[Pieces], count: int) -> list[int]:
    """Some of those that nothing beats, by rising bytes, the first and the last among them."""
    usable = [number for number, each in enumerate(patterns) if each.hands_on or not each.waits]
    ordered = sorted(usable, key=lambda number: (patterns[number].saved.sum(), patterns[number].again.sum()))
    kept: list[int] = []
    for number in ordered:
        if not kept or patterns[number].again.sum() < patterns[kept[-1]].again.sum():
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
    sizes, roots = [0] * (len(classes) + 1), storage_roots(facts)
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
