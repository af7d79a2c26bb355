"""The classes of values that rules decide, and the phrases that select them.

A class has the values of one operator, one module within a block and one position there. A rule treats the values of a
class alike in every block that it names. Values outside the blocks have separate classes, by their whole module path
with numbers left out. Sets of classes are bit masks: a graph has tens of classes, and phrases are compared by the
thousand.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from enum import IntEnum
from itertools import pairwise, takewhile

from attrs import evolve, field, frozen

from policylang.graph.blocks import OUTSIDE, BlockTable, Chains
from policylang.graph.facts import Facts, Flag
from policylang.language.loader import parse_policy
from policylang.language.operators import OperatorTable, prelude_group
from policylang.language.selectors import nth
from policylang.operators.names import DETACHES
from policylang.planning.capabilities import Capabilities
from policylang.planning.schedule import leaves_block
from policylang.planning.selection.selectors import Selections

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


class Option(IntEnum):
    """A decision about the values of a class."""

    EITHER = -1
    """The backward does not ask for them."""
    RECOMPUTE = 0
    SAVE = 1
    OFFLOAD = 2
    REBUILT = 3
    """Views of memory that waits on the host. They must not be saved: that would hold it."""


@frozen
class ValueClass:
    """The attributes that the values of a class share."""

    inside: bool
    """True if they are in blocks."""
    target: str
    """The operator in full."""
    module: str
    """Within the block; outside of blocks the whole path, a ``*`` for each number."""
    position: int
    """Counted from 1 among the values of this operator in this module."""
    stage: str = ""
    """The list of blocks, where blocks are in several: ``stages.0``."""
    first: bool = False
    """True if the first block of each list is unlike the others, and they are in it."""


@frozen(eq=False)
class ValueClasses:
    """The classes of one graph."""

    of: Sequence[int] = field(repr=False)
    """Node (a producer or a follower) to the number of its class; -1 if no rule decides it."""
    all: tuple[ValueClass, ...] = field(repr=False)
    rows: tuple[tuple[int, ...], ...] = field(repr=False)
    """The producers per class, in graph order."""
    blocks: BlockTable = field(repr=False)
    block_glob: str
    """A glob of the blocks' own modules; empty where they have none in common."""
    crossing: frozenset[int] = field(repr=False)
    """The outputs that blocks pass to each other or to what follows them."""
    views: frozenset[int] = field(repr=False)
    """Views of other values."""
    all_cross: bool
    """True if ``where crosses block`` selects whole classes."""

    def __len__(self) -> int:
        return len(self.all)

    @property
    def beside(self) -> tuple[tuple[int, int], ...]:
        """The pairs of classes that differ in their stages alone, each with the next."""
        alike: dict[ValueClass, list[tuple[bool, int]]] = {}
        for number, each in enumerate(self.all if any(each.stage for each in self.all) else ()):
            alike.setdefault(evolve(each, stage="", first=False), []).append((each.first, number))
        return tuple((one, other) for each in alike.values() for (_, one), (_, other) in pairwise(sorted(each)))


def value_classes(facts: Facts, blocks: BlockTable, capabilities: Capabilities, glob: str = "") -> ValueClasses:
    """The classes in graph order. ``glob`` is of the blocks. A number in a block's path is left out but where values
    differ by it: a convolution of 1×1 and one of 3×3 are two classes."""
    owners, flags, block_of = facts.owners, facts.flags, blocks.block_of
    prefixes = _prefixes(facts, blocks)
    of = array("i", [-1]) * len(facts)
    numbers: dict[ValueClass, int] = {}
    rows: list[list[int]] = []
    seen: Counter[tuple[int, str, str]] = Counter()
    shortened: dict[tuple[int, str], str] = {}
    sizes: dict[tuple[int, str, str, int], tuple[object, ...]] = {}
    kinds: list[list[tuple[str, int, int]]] = [[] for _ in blocks.names]
    unlike: set[str] = set()  # paths of which numbers tell values apart
    for row in facts.forward:
        block, path = block_of[row], facts.modules[row]
        if block != OUTSIDE and owners[row] == row:
            kinds[block].append((facts.targets[row], facts.bytes[row], facts.flops[row]))
            module = shortened.get((block, path))
            if module is None:
                module = shortened[block, path] = _NUMBER.sub("*", _within(path, prefixes[block]))
            if "*" in module:
                counted = (block, facts.targets[row], path)
                seen[counted] += 1
                size = facts.shapes[row], facts.bytes[row], facts.flops[row]
                if sizes.setdefault((block, facts.targets[row], module, seen[counted]), size) != size:
                    unlike.add(module)
    seen.clear()
    stages = _stages(prefixes, kinds)
    shortened = {
        key: _within(key[1], prefixes[key[0]]) if module in unlike else module for key, module in shortened.items()
    }
    for row in facts.forward:
        if owners[row] != row or flags[row] & (Flag.SYMBOLIC | Flag.SEED):
            continue
        if capabilities.block_by_block and facts.targets[row] in DETACHES and facts.inputs[row]:
            of[row] = of[owners[facts.inputs[row][0]]]  # it is decided as what it reads is
            continue
        block, path = block_of[row], facts.modules[row]
        module = shortened.get((block, path))
        if module is None:
            module = shortened[block, path] = _NUMBER.sub("*", _within(path, prefixes[block]))
        counted = (block, facts.targets[row], path)
        seen[counted] += 1
        each = ValueClass(block != OUTSIDE, facts.targets[row], module, seen[counted], *stages[block])
        number = numbers.setdefault(each, len(numbers))
        if number == len(rows):
            rows.append([])
        rows[number].append(row)
        of[row] = number
    for row in facts.forward:
        if owners[row] != row and not flags[row] & Flag.SYMBOLIC:
            of[row] = of[owners[row]]
    handed_on = [row for row in facts.forward if block_of[row] != OUTSIDE and leaves_block(facts, row, block_of)]
    crossing = {of[row] for row in handed_on}
    count = Counter(of[row] for row in {owners[row] for row in handed_on})
    roots = facts.storage_roots
    views = {of[row] for row in facts.forward if owners[row] == row and roots[row] != row}
    return ValueClasses(
        of=of,
        all=tuple(numbers),
        rows=tuple(map(tuple, rows)),
        blocks=blocks,
        block_glob=glob or _glob(prefixes),
        crossing=frozenset(crossing - {-1}),
        views=frozenset(views - {-1}),
        all_cross=all(count[each] == len(rows[each]) for each in crossing - {-1}),
    )


def _prefixes(facts: Facts, blocks: BlockTable) -> list[tuple[str, ...]]:
    """By block, the path that its modules have in common, up to a number; last, for the rest of the graph, none."""
    paths: list[dict[str, None]] = [{} for _ in blocks.names]
    for row in facts.forward:
        if blocks.block_of[row] != OUTSIDE and facts.modules[row]:
            paths[blocks.block_of[row]][facts.modules[row]] = None
    found: list[tuple[str, ...]] = []
    for each in paths:
        columns = zip(*(path.split(".") for path in each), strict=False)
        parts = tuple(first for first, *_ in takewhile(lambda column: len(set(column)) == 1, columns))
        last = max((at for at, part in enumerate(parts) if part.isdigit()), default=len(parts))
        found.append(parts[: last + 1])
    return [*found, ()]


def _stages(prefixes: Sequence[tuple[str, ...]], kinds: Sequence[object]) -> list[tuple[str, bool]]:
    """By block its stage, and whether it is the first there and none is like it; last, for the rest of the graph,
    none. Blocks in one list have no stages."""
    lists: dict[tuple[str, ...], list[int]] = {}
    for block, prefix in enumerate(prefixes[:-1]):
        lists.setdefault(prefix[:-2], []).append(block)
    none = [("", False)] * len(prefixes)
    if (
        len(lists) < 2
        or len({each[:-1] for each in lists}) > 1
        or not all(each[-1:] and each[-1].isdigit() for each in lists)
    ):
        return none
    apart = all(kinds[first] != kinds[other] for first, *others in lists.values() for other in others)
    found = list(none)
    for each, (first, *others) in lists.items():
        for block in (first, *others):
            found[block] = ".".join(each[-2:]), apart and block == first
    return found


def _within(path: str, prefix: tuple[str, ...]) -> str:
    parts = tuple(path.split("."))
    return ".".join(parts[len(prefix) :]) if prefix and parts[: len(prefix)] == prefix else path


def _glob(prefixes: Sequence[tuple[str, ...]]) -> str:
    """``layers.*``, where all blocks are children of one module."""
    found = {_NUMBER.sub("*", ".".join(prefix)) for prefix in prefixes[:-1]}
    glob = found.pop() if len(found) == 1 else ""
    parts = glob.split(".")
    return ".".join(parts[-2:]) if len(parts) > 1 and parts[-1] == "*" else ""


_GROUPS = (
    *("matmul", "attention", "activation", "norm", "collective", "all_gather", "reduce_scatter", "all_reduce"),
    *("cast", "view", "pointwise", "reduction"),
)
_SWEEPING = frozenset({"norm", "collective", "view", "pointwise", "reduction"})
"""Groups of operators that have little in common: nobody counts them."""
EVERYTHING = "everything"
_GATHERS = ("all_gather", "from parameter"), ("everything", "gathered parameter"), ("all_gather", "not from parameter")
"""FSDP's gathers, all that is made of gathered weights alone, and the gathers of activations: a position among gathers
would not say which are meant. Where a weight is gathered along two dimensions of a mesh, the number of ranks does."""


@frozen
class Phrase:
    """An operator, a group or everything, narrowed by position and module. Its blocks, or the outside of all, are added
    when it is written."""

    subject: str
    """``mm``, ``attention``, ``everything``."""
    mask: int = field(repr=False)
    """A bit for each class that it denotes."""
    cost: float
    """The length for a reader."""
    position: str = ""
    """``first``, ``every 2nd``."""
    module: str = ""
    """A glob: in it or deeper."""
    predicate: str = ""
    """``crosses block``."""
    stages: str = ""
    """A glob of the lists of blocks, or of some blocks of them, that it is narrowed to."""

    def text(self, place: str, *, inside: bool) -> str:
        """The selector; ``place``: ``in first 3 blocks``, ``outside block`` or nothing."""
        parts = [
            self.position,
            self.subject,
            f"in {self.module}" if self.module else "",
            f"in {self.stages}" if self.stages else "",
            "" if self.stages and place == "in block" else place,
            f"where {self.predicate}" if self.predicate else "",
            ("per block" if inside and not self.predicate else "per module") if self.position else "",
        ]
        return " ".join(filter(None, parts))

    @property
    def is_plain(self) -> bool:
        """True if it may be in a list with others."""
        return not self.position and not self.predicate


class Vocabulary:
    """The phrases about the classes inside of blocks, or about those outside."""

    def __init__(self, facts: Facts, classes: ValueClasses, operators: OperatorTable, *, inside: bool) -> None:
        self._facts = facts
        self._classes = classes
        self._operators = operators
        self._selections = Selections(facts, {}, classes.blocks, Chains(facts))
        self.inside = inside
        self.numbers = [number for number, each in enumerate(classes.all) if each.inside is inside]
        self.mask = bits(self.numbers)
        self.views = bits(number for number in self.numbers if number in classes.views)
        self._orders = self._in_blocks()
        found: dict[int, Phrase] = {}  # of those that denote the same the shortest
        stages = self._stages()
        for phrase in self._all():
            for glob, mask, cost in (("", self.mask, 0.0), *stages):
                within, length = phrase.mask & mask & self.mask, phrase.cost + cost
                if within and (within not in found or length < found[within].cost):
                    found.pop(within, None)
                    found[within] = evolve(phrase, mask=within, cost=length, stages=glob)
        self.phrases: tuple[Phrase, ...] = tuple(found.values())

    def _stages(self) -> list[tuple[str, int, float]]:
        """Globs of some stages, of their first blocks and of the others, with their classes and what they cost a
        reader."""
        every = [self._classes.all[number] for number in self.numbers]
        names = list(dict.fromkeys(each.stage for each in every if each.stage))
        some = [names] + [names[start:end] for start in range(len(names)) for end in range(start + 1, len(names) + 1)]
        parts = [({False, True}, "", 0.4)]
        if any(each.first for each in every):
            child = self._classes.block_glob.split(".")[-2]
            parts += [({True}, f".{child}.0", 0.5), ({False}, f".{child}.[!0]*", 0.6)]
        found = []
        for those in some if names else ():
            glob = _braces(those) if those != names else names[0].split(".")[0] + ".*"
            for firsts, end, cost in parts:
                numbered = zip(self.numbers, every, strict=True)
                mask = bits(n for n, each in numbered if each.stage in those and each.first in firsts)
                found.append((glob + end, mask, cost))
        return found

    def _all(self) -> Iterator[Phrase]:
        classes = self._classes
        by_name: dict[str, list[int]] = {}
        for number in self.numbers:
            by_name.setdefault(classes.all[number].target.split(".")[:2][-1], []).append(number)
        paths = self._paths(self.numbers)
        yield Phrase(EVERYTHING, self.mask, 1.0)
        for path in paths:
            mask = bits(number for number in self.numbers if self._is_in(number, path))
            yield Phrase(EVERYTHING, mask, 1.2, module=path)
        if self.inside and classes.crossing and classes.all_cross:
            yield Phrase(EVERYTHING, bits(classes.crossing), 1.1, predicate="crosses block")
        for each in _GROUPS:
            numbers = self.of_selector(each)
            yield from self._narrowed(each, numbers)
            if each not in _SWEEPING:
                yield from self._by_own_module(each, numbers)
        rows = [row for each in self.of_selector("all_gather") for row in classes.rows[each]]
        groups = filter(None, map(self._facts.groups.get, {self._facts.group_names[row] for row in rows}))
        sizes = sorted({each.size for each in groups} - {0})
        among = [f"from parameter and group_size == {size}" for size in sizes if len(sizes) > 1]
        for subject, predicate in (*_GATHERS, *(("all_gather", each) for each in among)) if rows else ():
            gathers = self.of_selector(f"{subject} where {predicate}")
            for path in ("", *self._paths(gathers)) if gathers else ():
                within = [number for number in gathers if not path or self._is_in(number, path)]
                cost = 1.1 + 0.3 * bool(path) + 0.2 * (predicate in among)
                yield Phrase(subject, bits(within), cost, module=path, predicate=predicate)
        for name, numbers in by_name.items():
            full = ".".join(classes.all[numbers[0]].target.split(".")[:2])
            subject = name if self._is_clean(name) else full
            yield from self._narrowed(subject, numbers)
            yield from self._by_own_module(subject, numbers)

    def _narrowed(self, subject: str, numbers: Sequence[int]) -> Iterator[Phrase]:
        """By module and by position."""
        if not numbers:
            return
        yield Phrase(subject, bits(numbers), 1.0)
        counted = subject not in _SWEEPING
        paths = self._paths(numbers)
        for path in paths:
            within = [number for number in numbers if self._is_in(number, path)]
            yield Phrase(subject, bits(within), 1.3, module=path)
            if counted:
                yield from self._positions(subject, within, 1.3, path)
        if counted:
            yield from self._positions(subject, numbers, 1.0, "")

    def _positions(self, subject: str, numbers: Sequence[int], cost: float, path: str) -> Iterator[Phrase]:
        """The positions by which every block means the same classes."""
        if not self.inside:
            return
        wanted = set(numbers)
        orders = list(dict.fromkeys(tuple(filter(wanted.__contains__, order)) for order in self._orders))
        longest = max(map(len, orders), default=0)
        if longest < 2:
            return
        for at in range(longest - 1):
            more = 0.4 if not at else 0.3 + 0.2 * at
            yield from self._counted(subject, orders, _position(at, longest), slice(at, at + 1), cost + more, path)
        yield from self._counted(subject, orders, "last", slice(-1, None), cost + 0.4, path)
        if longest > 2:
            yield from self._counted(subject, orders, "every 2nd", slice(1, None, 2), cost + 0.5, path)

    def _counted(
        self, subject: str, orders: Sequence[tuple[int, ...]], position: str, part: slice, cost: float, path: str
    ) -> Iterator[Phrase]:
        union = frozenset(number for order in orders for number in order[part])
        if all(tuple(filter(union.__contains__, order)) == order[part] for order in orders):
            yield Phrase(subject, bits(union), cost, position, path)

    def _by_own_module(self, subject: str, numbers: Sequence[int]) -> Iterator[Phrase]:
        """The classes of a module itself, without those of its submodules."""
        classes = self._classes
        modules: dict[str, list[int]] = {}
        for number in numbers:
            modules.setdefault(classes.all[number].module, []).append(number)
        if len(modules) < 2 and len(numbers) < 2:
            return
        for module, within in modules.items():
            glob = module or (classes.block_glob if self.inside else "")
            if not glob:
                continue
            # it has no submodule with such a class: `in` says the same
            others = (number for number in numbers if number not in within)
            alone = not (self.inside or glob.endswith("*")) and not any(self._is_in(each, glob) for each in others)
            place = {"module": glob} if alone else {"predicate": f"module == {glob}"}
            yield Phrase(subject, bits(within), 1.8, **place)
            positions = sorted({classes.all[number].position for number in within})
            for at, each in enumerate(positions if len(positions) > 1 else ()):
                mask = bits(number for number in within if classes.all[number].position == each)
                yield Phrase(subject, mask, 2.3 if alone else 2.4, _position(at, len(positions)), **place)

    def _in_blocks(self) -> tuple[tuple[int, ...], ...]:
        """The classes in the order of a block, each order once: blocks of a kind have the same."""
        block_of, rows = self._classes.blocks.block_of, self._classes.rows
        orders: list[list[tuple[int, int]]] = [[] for _ in self._classes.blocks.names if self.inside]
        for number in self.numbers if self.inside else ():
            for row in rows[number]:
                orders[block_of[row]].append((row, number))
        return tuple(dict.fromkeys(tuple(number for _, number in sorted(order)) for order in orders))

    def _paths(self, numbers: Iterable[int]) -> list[str]:
        """The modules that some of the classes are in, at any depth, in the order of the graph; none that has values
        of a class in part: ``layers.0``, where ``layers.*.norm`` is a class."""
        found: dict[str, None] = {}
        for number in numbers:
            parts = self._classes.all[number].module.split(".")
            for end in range(1, len(parts) + 1):
                if parts[0]:
                    found[".".join(parts[:end])] = None
        modules = {self._classes.all[number].module for number in self.numbers}
        starred = [each.split(".") for each in modules if "*" in each]
        return [
            path
            for path in found
            if path.split(".")[-1] != "*"
            and not (_NUMBER.search(path) and any(_is_within(each, path.split("."), {"*"}) for each in starred))
        ]

    def _is_in(self, number: int, path: str) -> bool:
        return _is_within(self._classes.all[number].module.split("."), path.split("."))

    def of_selector(self, text: str) -> list[int]:
        """The classes of which a selector takes all values, if it takes no class in part."""
        policy = parse_policy(f"save {text}\n", operators=self._operators).policy
        assert policy is not None
        selections = self._selections.of(policy.lets)
        found = [0] * len(self._classes)
        for row in {self._facts.owners[row] for row in selections.rows(policy.rules[0].selector)}:
            found[self._classes.of[row]] += self._classes.of[row] >= 0
        return [number for number in self.numbers if found[number] == len(self._classes.rows[number])]

    def _is_clean(self, subject: str) -> bool:
        """True if the language reads a name as an operator's, without a diagnostic."""
        if prelude_group(subject) is not None:
            return False
        loaded = parse_policy(f"save {subject}\n", operators=self._operators)
        return loaded.policy is not None and not loaded.diagnostics


def _is_within(module: Sequence[str], path: Sequence[str], some: Set[str] = frozenset()) -> bool:
    """A ``*`` of the path stands for any name, and a name in ``some`` for any number of the path."""
    return any(
        all(
            one in ("*", name) or (name in some and one.isdigit()) for one, name in zip(path, module[at:], strict=False)
        )
        for at in range(len(module) - len(path) + 1)
    )


def _position(at: int, length: int) -> str:
    return "first" if not at else "last" if at == length - 1 else nth(at + 1)


def _braces(names: Sequence[str]) -> str:
    """``stages.{0,1}``."""
    head, _, _ = names[0].rpartition(".")
    return names[0] if len(names) == 1 else f"{head}.{{{','.join(each.rpartition('.')[2] for each in names)}}}"


def bits(numbers: Iterable[int]) -> int:
    """A bit for each of these numbers."""
    return sum(1 << number for number in set(numbers))
