"""The candidates of a tuning: mixtures of patterns that might be written, with their composed figures and their texts.

Patterns are the best choices of whole classes. In some of them values wait on the host: the largest classes, as much of
a block as is copied while the block computes, the blocks' outputs, or all that is large.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import permutations
from statistics import median_low

import numpy as np
from attrs import evolve, frozen

from policylang.graph.blocks import BlockTable, blocks_of
from policylang.graph.facts import Facts, Flag, Phase
from policylang.language.globs import PathGlob
from policylang.language.syntax import Action
from policylang.planning.decisions.offloading import resolve_offloads
from policylang.planning.liveness import SavedForBackward, backward_needs
from policylang.planning.value_outcome import Decision, Why, offloads
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.choices import Choice, Choices
from policylang.tuning.composition import NO_RULES, Composition, Ints, Mixtures, SegmentProfile
from policylang.tuning.decision_list import Zone, scripts
from policylang.tuning.phrases import Option, ValueClasses, Vocabulary
from policylang.tuning.program import whole_classes

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


def of_choice(facts: Facts, classes: ValueClasses, choice: Choice) -> Pattern:
    """The outcome of most values of each class."""
    roots, of, owners = facts.storage_roots, classes.of, facts.owners
    saved, repeated = [0] * (len(classes) + 1), [0] * (len(classes) + 1)
    marked: set[int] = set()
    for owner in sorted(choice.kept):
        root = owners[roots[owner]] if facts.ops[roots[owner]] == "call_function" else owner
        if root not in marked:  # a look at what is kept costs nothing
            marked.add(root)
            saved[of[root]] += 1
    for owner in sorted(choice.recomputed):
        if owner not in marked:
            repeated[of[owner]] += 1
    pattern = []
    for number in range(len(classes)):
        if not saved[number] and not repeated[number]:
            pattern.append(int(Option.EITHER))
        else:
            pattern.append(int(Option.SAVE if saved[number] >= repeated[number] else Option.RECOMPUTE))
    return tuple(pattern)


def of_products(classes: ValueClasses, inside: Vocabulary) -> Pattern:
    """Blocks keep their outputs and the results of their products: what runs again beside a peak is small, which the
    bytes kept do not tell, and the integer program knows no peak."""
    kept = {*classes.crossing, *inside.of_selector("matmul")}
    return tuple(
        int(Option.SAVE if number in kept or (inside.numbers and not each.inside) else Option.RECOMPUTE)
        for number, each in enumerate(classes.all)
    )


def texts_by_hand(blocks: int) -> Iterator[str]:
    """Candidates beyond patterns of blocks that save their outputs: every block or every second one recomputed from
    what comes before and its attention's or products' results, stages at the fewest bytes alive."""
    kept = "\nsave attention in block"
    for place in (
        ("block", "every 2nd block", f"block{kept}", f"block{kept}\nsave matmul in block") if blocks > 1 else ()
    ):
        yield f"recompute everything in {place}\nundecided -> save\n"
    for size in ("2 GiB", "1 GiB", "4 GiB", "512 MiB", "256 MiB", "8 GiB", "128 MiB", "64 MiB", "16 GiB"):
        yield f"recompute everything\nsave everything where crosses cut per {size}\n"


_FEW = 2
"""So many classes take a line or two to write."""
_SHARE = 0.7
"""The share of what computation would hide that is moved, if copies were never delayed."""
_LARGE = 0.1
"""A share of the largest value: two copies may be in flight at once, and that of a small value takes the place of a
large one's."""
_OFFLOAD = Decision(Action.OFFLOAD, None, Why.RULE)
_RECOMPUTE = Decision(Action.RECOMPUTE, None, Why.RULE)


def host_patterns(facts: Facts, times: NodeTimes, classes: ValueClasses, choices: Choices) -> Iterator[Pattern]:
    """The choices of the lower hull where some classes take no memory, which wait on the host: the largest whose copies
    computation hides, blocks' outputs, and all that are large."""
    sizes, left = _movable_bytes(facts, classes), _SHARE * _hidden_in_a_block(facts, times, classes)
    most = max(sizes, default=0)
    large = sorted((n for n, size in enumerate(sizes) if size > _LARGE * most), key=lambda n: (-sizes[n], n))
    filled: list[int] = []
    for number in large:  # as many as there is room for, each taken that still fits
        if sizes[number] <= left:
            filled.append(number)
            left -= sizes[number]
    crossing = [number for number in large if number in classes.crossing]
    for moved in dict.fromkeys(map(frozenset, (filled[:_FEW], filled, crossing, large))):
        columns = zip(choices.rows, choices.sizes, strict=True)
        free = evolve(choices, sizes=[0 if classes.of[row] in moved else size for row, size in columns])
        for each in whole_classes(free, classes.of, 0)[0] if moved else ():
            pattern = of_choice(facts, classes, each)
            options = (
                Option.OFFLOAD if n in moved and option == Option.SAVE else option for n, option in enumerate(pattern)
            )
            yield tuple(map(int, options))


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


@frozen(eq=False)
class CandidateTable:
    """One entry a mixture: the first so many blocks follow one pattern, the others another."""

    rows: Ints
    """By mixture the numbers of four: the pattern of the first blocks, that of the others, that outside of blocks, and
    how many first blocks there are."""
    figures: Mixtures


_NEAR = 3
"""Patterns that tell stages apart, or that copy, are mixed with so many on either side by bytes."""


def candidate_table(composition: Composition, patterns: Sequence[SegmentProfile], *, mixed: bool) -> CandidateTable:
    """Every pattern in all blocks, with every outcome outside of them. Every two in the first so many and the others:
    of those whose blocks save their outputs, or with ``mixed`` of all."""
    blocks, classes = composition.count, composition.classes.all
    staged = any(each.stage for each in classes)
    usable = [number for number, each in enumerate(patterns) if mixed or each.saves_outputs]
    beyond: dict[tuple[int, ...], int] = {}
    for number in usable:
        outside = zip(patterns[number].asked, classes, strict=True)
        beyond.setdefault(tuple(option for option, each in outside if not each.inside), number)
    by_bytes = sorted(beyond.values(), key=lambda number: (int(patterns[number].saved[-1]), number))
    again = [float(each.recompute.sum()) for each in patterns]
    ordered = sorted(again[number] for number in usable if not patterns[number].offloads)
    rank = [bisect_left(ordered, each) for each in again]
    moved = [{at for at, option in enumerate(each.asked) if option == Option.OFFLOAD} for each in patterns]
    rows = [(one, one, one, blocks) for one in range(len(patterns))]
    rows += [(one, one, around, blocks) for one in usable for around in beyond.values() if around != one]
    for one, other in permutations(usable if blocks > 1 else (), 2):
        near, copies = abs(rank[one] - rank[other]) <= _NEAR, patterns[one].offloads or patterns[other].offloads
        unlike = moved[one] and moved[other] and moved[one] != moved[other]
        if unlike or (not near and (staged or copies)):
            continue
        arounds = dict.fromkeys((one, other, by_bytes[0], by_bytes[-1]))
        rows += [(one, other, around, number) for number in range(1, blocks) for around in arounds]
    table = np.array(rows, dtype=np.int64)
    zone, rest, around, number = table.T
    chosen = np.where(np.arange(blocks) < number[:, None], zone[:, None], rest[:, None])
    return CandidateTable(table, composition.mixtures(patterns, chosen, around))


def _blocks_phrase(end: str, number: int) -> str:
    """``in first 3 blocks``."""
    return f"in {end} block" if number == 1 else f"in {end} {number} blocks"


class Writer:
    """Writes candidates as policies. What distinguishes two patterns is computed once for any number of blocks."""

    _MARK = "in first 0 blocks"

    def __init__(
        self, patterns: Sequence[Pattern], inside: Vocabulary, outside: Vocabulary, *, head: str, override: bool
    ) -> None:
        self.patterns = patterns
        self.head = head
        self.inside = inside
        self.outside = outside
        self.override = override
        self._known: dict[tuple[int, ...], str | None] = {}

    def text(self, table: CandidateTable, at: int, blocks: int) -> str | None:
        """The text of a candidate; None where 16 statements do not hold it."""
        zone, rest, around, number = table.rows[at].tolist()
        if zone == rest:
            return self._template(around, rest)
        ways = [
            (self._template(around, rest, zone), _blocks_phrase("first", number)),
            (self._template(around, zone, rest), _blocks_phrase("last", blocks - number)),
        ]
        found = [template.replace(self._MARK, place) for template, place in ways if template is not None]
        return min(found, key=lambda text: (text.count("\n"), len(text), text), default=None)

    def _template(self, around: int, base: int, *zones: int) -> str | None:
        """The text where the blocks of :attr:`_MARK` follow another pattern than the others."""
        key = around, base, *zones
        if key not in self._known:
            self._known[key] = None
            # the whole has the lines of its part, and more
            if not zones or self._template(around, base) is not None:
                pattern, beyond = self.patterns[base], self.patterns[around]
                zone = [Zone(self._MARK, self.patterns[each]) for each in zones]
                made = scripts(self.inside, self.outside, pattern, zone, beyond, undecided=not self.override)
                texts = (script.text(self.head, override=self.override) for script in made)
                self._known[key] = next((text for text in texts if text is not None), None)
        return self._known[key]
