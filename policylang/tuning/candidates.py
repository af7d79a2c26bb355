"""The candidates of a tuning: mixtures of patterns that might be written, with their composed figures and their texts.

Patterns are the best choices of whole classes. In some of them values wait on the host: the largest classes, as much of
a block as is copied while the block computes, the blocks' outputs, or all that is large.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from functools import cache, cached_property
from itertools import permutations

import numpy as np

from policylang.graph.blocks import BlockTable, blocks_of
from policylang.graph.facts import Facts
from policylang.language.cancellation import collector_paused
from policylang.language.files import bundled_policies
from policylang.language.globs import PathGlob
from policylang.language.loader import parse_policy
from policylang.language.operators import OperatorTable
from policylang.planning.capabilities import Capabilities
from policylang.planning.decisions.decide import routing_owners
from policylang.planning.schedule import EachBlock
from policylang.simulation.node_times import NodeTimes, operator_name
from policylang.tuning.choices import Choices, choices_of
from policylang.tuning.composition import Composition, Ints, SegmentProfile
from policylang.tuning.decision_list import MOST_STATEMENTS, Zone, blocks_phrase, scripts
from policylang.tuning.evaluation import Besides, Budget, Candidate
from policylang.tuning.phrases import Option, ValueClasses, Vocabulary, value_classes
from policylang.tuning.program import bound_of, whole_classes
from policylang.tuning.refinement import Refinement

_KEPT, _RECOMPUTED = ("matmul", "attention"), ("pointwise", "add or mul", "activation")
"""The operators that people keep in a block, and those that they recompute in a block that keeps all others."""
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


def patterns_of(choices: Choices, classes: ValueClasses, count: int, *, moved: Set[int] = frozenset()) -> list[Pattern]:
    """The best choices of whole classes, as patterns; what is ``moved`` and kept is so on the host."""
    found = whole_classes(choices, classes.of, count, classes.beside, moved)
    kept = [Option.OFFLOAD if number in moved else Option.SAVE for number in range(len(classes))]
    return [
        tuple(
            int(kept[n] if n in saved else Option.RECOMPUTE if n in again or n in classes.views else Option.EITHER)
            for n in range(len(classes))
        )
        for saved, again in found
    ]


def patterns_by_hand(facts: Facts, classes: ValueClasses, inside: Vocabulary, outputs: Set[int]) -> Iterator[Pattern]:
    """Blocks that keep their ``outputs`` and some results, such as those of their products, or all but what is cheap:
    what runs again beside a peak is small, which the bytes kept do not tell, and the integer program knows no peak."""
    every = frozenset(range(len(classes)))
    within = every.intersection(inside.numbers) or every
    always = {*(every - within), *outputs, *(classes.of[owner] for owner in routing_owners(facts))}
    some = [*map(frozenset, map(inside.of_selector, _KEPT))]
    cheap = [*map(frozenset, map(inside.of_selector, _RECOMPUTED))]
    for kept in dict.fromkeys((*some, frozenset[int]().union(*some), *(within - each for each in cheap))):
        yield tuple(int(Option.SAVE if n in kept or n in always else Option.RECOMPUTE) for n in range(len(classes)))


def texts_by_hand(facts: Facts, blocks: int, head: str) -> Iterator[str]:
    """Candidates beyond patterns of blocks that save their outputs: every block or every second one recomputed from
    what comes before and its attention's or products' results, stages at the fewest bytes alive. What steers others,
    such as a router's choice, is saved anyway, and named, so that there is nothing to be said against the text.
    ``head``: the statement that names the blocks."""
    routed = dict.fromkeys(operator_name(facts.targets[row]) for row in routing_owners(facts))
    kept, also = "\nsave attention in block", "".join(f"save {name}\n" for name in routed)
    places = ("block", "every 2nd block", f"block{kept}", f"block{kept}\nsave matmul in block")
    for place in places if blocks > 1 else ():
        yield f"{head}recompute everything in {place}\n{also}undecided -> save\n"
    for size in ("2 GiB", "1 GiB", "4 GiB", "512 MiB", "256 MiB", "8 GiB", "128 MiB", "64 MiB", "16 GiB"):
        yield f"{head}recompute everything\nsave everything where crosses cut per {size}\n{also}"


@cache
def bundled_texts() -> tuple[tuple[str, str, str], ...]:
    """The policies that come along and order nothing, each as it is, and with what is left open saved or recomputed."""
    found = []
    for each in bundled_policies():
        include = f"include <{each.name}>\n"
        policy = parse_policy(include).policy
        if policy is not None and policy.rules and not policy.scheduling:
            found.append((include, f"{include}undecided -> save\n", f"{include}undecided -> recompute\n"))
    return tuple(found)


_MOVED = (2, 4)
"""Numbers of the largest classes that wait on the host in some patterns."""
_LARGE = 0.1
"""A share of the largest value: two copies may be in flight at once, and that of a small value takes the place of a
large one's."""


def host_patterns(classes: ValueClasses, choices: Choices) -> Iterator[Pattern]:
    """The choices of the lower hull where some classes take no memory, which wait on the host: some of the largest,
    blocks' outputs, and all that are large."""
    sizes = Counter[int]()
    for row, size in zip(choices.rows, choices.sizes, strict=True):
        if classes.of[row] >= 0 and (classes.all[classes.of[row]].inside or not classes.blocks.names):
            sizes[classes.of[row]] += size
    most = max(sizes.values(), default=0)
    large = [number for number, size in sizes.most_common() if size > _LARGE * most]
    crossing = [number for number in large if number in classes.crossing]
    for moved in dict.fromkeys(map(frozenset, (*(large[:count] for count in _MOVED), crossing, large))):
        yield from patterns_of(choices, classes, 0, moved=moved) if moved else ()


_NEAR = 3
"""Patterns that tell stages apart, or that copy, are mixed with so many on either side by bytes."""
_ALTERNATE = -2
"""In place of the number of the first blocks: every second block."""
_MARK = "in first 0 blocks"
_AT_ONCE = 4096
"""Mixtures that are composed at once: memory for each takes its blocks, and there are more in more blocks."""


class Candidates:
    """The candidates for one kind of memory, with their composed figures and their texts.

    In a mixture the first so many blocks follow one pattern and the others another; the last block may save everything,
    as its backward begins at once. What distinguishes two patterns is written once for any number of blocks.
    """

    def __init__(
        self,
        composition: Composition,
        profiles: Sequence[SegmentProfile],
        inside: Vocabulary,
        outside: Vocabulary,
        besides: Besides,
        *,
        by_peak: bool,
        head: str,
        override: bool,
    ) -> None:
        """``profiles``: of the patterns, the first of that which saves everything. ``by_peak``: the peak counts, of
        mixtures of patterns whose blocks save their outputs; else the bytes saved, of any."""
        self.inside, self.outside, self.head, self.override = inside, outside, head, override
        self.blocks = composition.count
        self.patterns = tuple(each.asked for each in profiles)
        self.rows = self._mixtures(composition, profiles, by_peak)
        """Five numbers per mixture: the pattern of the first blocks, that of the others, that outside of blocks, how
        many first blocks there are, and 1 if the last block saves everything."""
        parts = np.array_split(self.rows, 1 + len(self.rows) // _AT_ONCE)
        found = zip(*(composition.mixtures(profiles, self._by_block(each)) for each in parts), strict=True)
        peak, saved, recompute, copies = self.figures = tuple(map(np.concatenate, found))
        """:meth:`Composition.mixtures`, of all."""
        memory, seconds = peak if by_peak else saved, recompute + copies
        self.memory = [besides.on(each) for each in memory.tolist()] if by_peak else memory.tolist()
        self.seconds = seconds.tolist()
        self.by_time = np.lexsort((memory, seconds)).tolist()
        self.by_memory = np.lexsort((seconds, memory)).tolist()
        options = (each for pattern in self.patterns for each in enumerate(pattern))
        moved = {number for number, option in options if option == Option.OFFLOAD}
        sizes = (composition.facts.bytes[row] for each in moved for row in composition.classes.rows[each])
        self.slack = 2 * max(sizes, default=0)
        """Bytes by which what is composed may be too little: of two of the largest value that is copied, as two copies
        may be in flight, where blocks that copy border on others. The least that is found may be so much above the
        least that there is."""
        self._known: dict[tuple[int, ...], str | None] = {}

    def _mixtures(self, composition: Composition, profiles: Sequence[SegmentProfile], by_peak: bool) -> Ints:
        """Every pattern in all blocks, with every outcome outside of them; every two in the first so many blocks and
        the others; in eager, where blocks may be few and unlike, in every second block and the others."""
        blocks, classes = self.blocks, composition.classes.all
        staged = any(each.stage for each in classes)
        usable = [number for number, each in enumerate(profiles) if each.saves_outputs or not by_peak]
        beyond: dict[tuple[int, ...], int] = {}
        for number in usable:
            outside = zip(self.patterns[number], classes, strict=True)
            beyond.setdefault(tuple(option for option, each in outside if not each.inside), number)
        again = [float(each.recompute.sum()) for each in profiles]
        ordered = sorted(again[number] for number in usable if not profiles[number].offloads)
        rank = [bisect_left(ordered, each) for each in again]
        moved = [{at for at, option in enumerate(each) if option == Option.OFFLOAD} for each in self.patterns]
        rows = [(one, one, one, blocks, 0) for one in range(len(profiles))]
        rows += [(one, one, around, blocks, 0) for one in usable for around in beyond.values() if around != one]
        numbers = [*range(1, blocks)]
        numbers += [_ALTERNATE] if composition.checkpoints is not None and blocks > 2 else []
        for one, other in permutations(usable if blocks > 1 else (), 2):
            unlike = moved[one] and moved[other] and moved[one] != moved[other]
            far = abs(rank[one] - rank[other]) > _NEAR
            if unlike or (far and (staged or moved[one] or moved[other])):
                continue
            arounds = dict.fromkeys((one, other, 0))
            rows += [(one, other, around, number, 0) for number in numbers for around in arounds]
        fit = set(usable)
        rows += [(*row[:4], 1) for row in rows if blocks > 1 and row[0] and row[1] and row[0] in fit]
        return np.array(rows, dtype=np.int64)

    def _by_block(self, rows: Ints) -> Ints:
        """Mixture by block, and last around them, the number of the pattern."""
        zone, rest, around, number, last = rows.T
        at, number = np.arange(self.blocks), number[:, None]
        is_zone = np.where(number == _ALTERNATE, at % 2 == 1, at < number)
        chosen = np.where(is_zone, zone[:, None], rest[:, None])
        chosen[last == 1, -1:] = 0
        return np.column_stack([chosen, around])

    def likeness(self, at: int) -> tuple[int, ...]:
        """Alike are candidates that take about as much more than composed: those with the same outside of blocks, and
        of those that copy with the same in them."""
        zone, rest, around, *_ = self.rows[at].tolist()
        copies = any(Option.OFFLOAD in self.patterns[each] for each in (zone, rest, around))
        return (around, zone, rest) if copies else (around,)

    def text(self, at: int) -> str | None:
        """The text of a candidate; None where 16 statements do not hold it."""
        zone, rest, around, number, last = self.rows[at].tolist()
        ways = [(self._template(around, rest), "")]
        if number == _ALTERNATE:
            ways = [(self._template(around, rest, zone), "in every 2nd block")]
        elif zone != rest:
            ways = [
                (self._template(around, rest, zone), blocks_phrase("first", number)),
                (self._template(around, zone, rest), blocks_phrase("last", self.blocks - number)),
            ]
        found = [template.replace(_MARK, place) for template, place in ways if template is not None]
        text = min(found, key=lambda text: (text.count("\n"), len(text), text), default=None)
        if text is None or not last:
            return text
        lines = text.splitlines(keepends=True)
        at_end = len(lines) - lines[-1].startswith("undecided")
        lines.insert(at_end, f"{'override ' if self.override else ''}save everything in last block\n")
        return "".join(lines) if len(lines) <= MOST_STATEMENTS else None

    def _template(self, around: int, base: int, *zones: int) -> str | None:
        """The text where the blocks of :data:`_MARK` follow another pattern than the others."""
        key = around, base, *zones
        if key not in self._known:
            self._known[key] = None
            # the whole has the lines of its part, and more
            if not zones or self._template(around, base) is not None:
                pattern, beyond = self.patterns[base], self.patterns[around]
                apart = [Zone(_MARK, self.patterns[each]) for each in zones]
                made = scripts(self.inside, self.outside, pattern, apart, beyond, undecided=not self.override)
                texts = (script.text(self.head, override=self.override) for script in made)
                self._known[key] = next((text for text in texts if text is not None), None)
        return self._known[key]


_PROGRAMS, _LEAST_PROGRAMS, _NODES = 12, 4, 100_000
"""Numbers of bytes for which an integer program is solved, and nodes in whole graphs: each pattern is simulated."""


class SearchSpace:
    """What is chosen from where blocks are as one ``blocks`` statement says: its classes, words and candidates."""

    def __init__(
        self,
        facts: Facts,
        times: NodeTimes,
        capabilities: Capabilities,
        operators: OperatorTable,
        besides: Besides,
        glob: str,
        blocks: BlockTable,
        *,
        offload: bool,
        override: bool,
        say: Callable[[str], None],
    ) -> None:
        """``glob``: of the statement, with the ``blocks`` that there are then; empty where the text has none."""
        self.facts, self.times, self.capabilities, self.besides = facts, times, capabilities, besides
        self.offload, self.override, self._say = offload, override, say
        self.head = f"blocks {glob}\n" if glob else ""
        self.classes = value_classes(facts, blocks, capabilities, glob)
        self.inside = Vocabulary(facts, self.classes, operators, inside=True)
        self.outside = Vocabulary(facts, self.classes, operators, inside=False)
        self._each_block = EachBlock(facts, blocks) if capabilities.block_by_block else None
        self.composition = Composition(facts, times, self.classes, self._each_block)
        self._candidates: dict[bool, Candidates] = {}
        self._choices: dict[tuple[int, ...], Choices] = {}

    def bound(self, saved: int, save_all: Candidate | None) -> float:
        """Seconds of recomputation that no choice of values goes below that keeps at most so many bytes."""
        choices, held = self.choices(()), 0
        if self.capabilities.block_by_block and save_all is not None:  # beside the columns: held in any case
            held = save_all.saved - sum(choices.sizes)
        return bound_of(choices, saved - held)

    def choices(self, keep: Sequence[int]) -> Choices:
        if (key := tuple(keep)) not in self._choices:
            self._choices[key] = choices_of(
                self.facts,
                self.times,
                self.capabilities,
                keep=keep,
                override=self.override,
                blocks=self._each_block,
            )
        return self._choices[key]

    @cached_property
    def refinement(self) -> Refinement:
        return Refinement(self.choices(()), self.classes, self.inside, self.outside, override=self.override)

    def candidates(self, budget: Budget) -> Candidates:
        """The candidates for a budget: for a peak, blocks save their outputs; for bytes saved they need not."""
        by_peak = budget.figure != "saved"
        if by_peak not in self._candidates:
            self._candidates[by_peak] = self._made(by_peak=by_peak)
        return self._candidates[by_peak]

    def _made(self, *, by_peak: bool) -> Candidates:
        classes, composition = self.classes, self.composition
        # a checkpoint holds what the block before returns
        outputs = classes.crossing if by_peak and not self.capabilities.block_by_block else frozenset[int]()
        self._say("solving for the candidates")
        count = max(min(_PROGRAMS, _NODES // max(len(self.facts), 1)), _LEAST_PROGRAMS)
        choices = self.choices([row for number in sorted(outputs) for row in classes.rows[number]])
        best = patterns_of(choices, classes, count)
        if outputs:  # of blocks that need not save their outputs, in all of them alone
            best += patterns_of(self.choices(()), classes, 0)
        found = [tuple(int(Option.SAVE) for _ in classes.all), *best]
        found += patterns_by_hand(self.facts, classes, self.inside, outputs) if by_peak else ()
        if self.capabilities.block_by_block:
            saved = int(Option.SAVE)
            found = [
                tuple(option if each.inside else saved for option, each in zip(pattern, classes.all, strict=True))
                for pattern in found
            ]
        self._say("simulating patterns")
        simulated: dict[Pattern, SegmentProfile] = {}
        with collector_paused():
            on_host = tuple(host_patterns(classes, choices)) if self.offload else ()
            for number, pattern in enumerate((*found, *on_host)):
                profile = composition.profile(pattern, with_peak=by_peak, known=simulated)
                if profile is not None and (number < len(found) or profile.offloads):
                    simulated[profile.asked] = profile
        profiles, words = tuple(simulated.values()), (self.inside, self.outside)
        return Candidates(
            composition, profiles, *words, self.besides, by_peak=by_peak, head=self.head, override=self.override
        )
