"""Evaluates selectors on a graph: each denotes a sorted list of forward nodes, worked out once.

Every form costs at most one pass over the nodes and edges it touches. Operators are looked up by name in
``Facts.by_target``: a pattern is matched once per distinct operator, never per node. Equal sub-trees, wherever in a
policy they are, are evaluated once; so is a ``let``.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache, cached_property
from itertools import accumulate
from math import floor, sqrt
from typing import assert_never

from attrs import evolve, fields, frozen

from policylang.graph.blocks import BlockTable, Chains, blocks_of, is_one_block
from policylang.graph.facts import (
    Facts,
    Flag,
    InputKind,
    difference,
    forward_users,
    intersection,
    mask_of,
    members,
    union,
)
from policylang.graph.stages import stages_of
from policylang.language import syntax
from policylang.language.cancellation import check_cancelled
from policylang.language.globs import NameGlob, PathGlob, covering
from policylang.language.operators import PLAIN_FUNCTIONS
from policylang.language.selectors import parts
from policylang.language.syntax import Let, Policy, Predicate, Scope, Selector
from policylang.operators.names import GETITEM
from policylang.planning.schedule import EachBlock
from policylang.simulation.node_times import NodeTimes

_NEVER = -1


class Cuts:
    """The stages of one graph.

    A *value* here is memory that the forward makes: views, ``wait_tensor`` and in-place results share that of the value
    that allocated it; each output of a multi-output operator is a value, made when the operator runs. Sizes are no
    values, nor is what depends on one parameter alone (a cast or gathered weight).

    A *cut* lies between two nodes of the forward, in graph order. A value is alive at it if it was made before and a
    forward node after it reads it, itself or through a view. While what is left of the forward makes more than ``size``
    bytes, the stage ends at the cut where the fewest bytes are alive, among those after it has made between ``size /
    2`` and ``size`` bytes; of several such at the latest. Where there is no cut in that range, because one node makes
    too much, the stage ends behind that node, before the next one that makes anything, where the fewest bytes are
    alive. ``auto`` is the square root of what the forward makes, both in GiB: as many stages as GiB in each,
    AutoParallel's ``ac_stage_size_in_GiB="auto"``. One pass over the nodes and edges, and one over the forward for each
    size that a policy asks for.
    """

    def __init__(self, facts: Facts, chains: Chains) -> None:
        self.facts = facts
        self._chains = chains
        self._known: dict[float, tuple[int, ...]] = {}

    @property
    def produced(self) -> int:
        """The bytes that the whole forward makes."""
        return self._produced[-1]

    def positions(self, size: float) -> tuple[int, ...]:
        """The cuts between stages of ``size`` bytes, each as the number of forward nodes before it."""
        if size not in self._known:
            self._known[size] = tuple(_cut(self._produced, self._alive, size))
        return self._known[size]

    def stage(self, size: float | None) -> float:
        """The bytes of a stage; ``auto`` is None."""
        return sqrt(self.produced * 2**30) if size is None else size

    def crossing(self, size: float | None) -> bytearray:
        """By node, 1 for the nodes whose decision saves a value that is alive at a cut. These are the nodes whose
        memory the value is and that share the decision of the node that allocated it, a ``wait_tensor`` for instance,
        and the producer of that decision. Mere views are excluded."""
        cuts, mask = self.positions(self.stage(size)), bytearray(len(self.facts))
        roots, owners = self.facts.storage_roots, self.facts.owners
        born, last = self._lifetimes
        for row in self.facts.forward if cuts else ():
            value = roots[row]
            is_value = owners[row] == owners[value] and born[value] != _NEVER
            if is_value and bisect_right(cuts, born[value]) < bisect_right(cuts, last[value]):
                mask[row] = mask[owners[row]] = 1
        return mask

    @cached_property
    def _lifetimes(self) -> tuple[array[int], array[int]]:
        """By node of a value, the places in the forward at which it is made and read last; -1 for what is no value."""
        facts, roots = self.facts, self.facts.storage_roots
        inputs, targets, flags = facts.inputs, facts.targets, facts.flags
        of_parameter = self._chains.from_parameter_mask
        born, last, place = (array("i", [_NEVER]) * len(facts) for _ in range(3))
        for at, row in enumerate(facts.forward):
            place[row] = at
            if roots[row] == row and not flags[row] & Flag.SYMBOLIC and not of_parameter[row]:
                born[row] = at
                if targets[row] == GETITEM:  # one of several results, which the operator made when it ran
                    whole = inputs[row][0]
                    born[row] = place[row] = place[whole]
                    born[whole] = _NEVER
            for source in inputs[row]:
                last[roots[source]] = at
        return born, last

    @cached_property
    def _made(self) -> list[tuple[int, int, int]]:
        """Each value's birth, last reader and bytes."""
        born, last = self._lifetimes
        return [(born[row], last[row], self.facts.bytes[row]) for row in self.facts.forward if born[row] != _NEVER]

    @cached_property
    def _produced(self) -> list[int]:
        """By cut, the bytes that the nodes before it make."""
        made = [0] * (len(self.facts.forward) + 1)
        for born, _, size in self._made:
            made[born + 1] += size
        return list(accumulate(made))

    @cached_property
    def _alive(self) -> list[int]:
        """By cut, the bytes alive at it."""
        change = [0] * (len(self.facts.forward) + 2)
        for born, last, size in self._made:
            if last > born:
                change[born + 1] += size
                change[last + 1] -= size
        return list(accumulate(change))


def _cut(produced: Sequence[int], alive: Sequence[int], size: float) -> list[int]:
    """The cuts, from what is produced before and alive at each place. Every place is looked at once."""
    cuts: list[int] = []
    start = 0
    while produced[-1] - produced[start] > size:
        done = produced[start]
        first = bisect_left(produced, done + size / 2, start + 1)
        most = max(done + size, produced[first])
        if most == produced[-1]:
            break  # nothing is made behind that node
        behind = bisect_right(produced, most, first)
        start = min(range(first, behind), key=lambda place: (alive[place], -place))
        cuts.append(start)
    return cuts


def effective_scope(scope: Scope | None, has_blocks: bool) -> Scope:
    """Without ``per``: per block where the graph has blocks, else per graph."""
    if scope is not None:
        return scope
    return Scope.BLOCK if has_blocks else Scope.GRAPH


def group_keys(scope: Scope, rows: Sequence[int], facts: Facts, blocks: BlockTable, chains: Chains) -> list[Hashable]:
    """The key that each node is counted under: a block's number, a module's path, the name of a chain's first node.
    None for a node outside every block under ``per block``: it is not counted."""
    if scope is Scope.GRAPH:
        return [0] * len(rows)
    if scope is Scope.MODULE:
        modules = facts.modules
        return [modules[row] for row in rows]
    if scope is Scope.CHAIN:
        names, first = facts.names, chains.first
        return [names[first[row]] for row in rows]
    return [block if block >= 0 else None for block in map(blocks.block_of.__getitem__, rows)]


def choose(ordinal: syntax.Ordinal, rows: list[int], keys: Sequence[Hashable]) -> list[int]:
    """The nodes at the ordinal's positions, counted from 1 in graph order within each group of equal keys."""
    totals = Counter(keys if ordinal.kind == "last" else ())
    counts: dict[Hashable, int] = {}
    chosen: list[int] = []
    for row, key in zip(rows, keys, strict=True):
        if key is not None:
            position = counts[key] = counts.get(key, 0) + 1
            if _takes(ordinal, position, totals.get(key, 0)):
                chosen.append(row)
    return chosen


def chosen_blocks(which: syntax.BlockSet, count: int) -> list[bool]:
    """For each of ``count`` blocks, whether the block set holds it."""
    if which.kind == "any":
        return [True] * count
    if which.kind == "range":
        return [which.low <= block <= which.high for block in range(count)]
    if which.share is not None:
        which = evolve(which, n=floor(which.share * count), share=None)
    return [_takes(which, position, count) for position in range(1, count + 1)]


def _takes(which: syntax.Ordinal | syntax.BlockSet, position: int, total: int) -> bool:
    """True if a choice takes a position of ``total``, counted from 1."""
    n = which.n
    match which.kind:
        case "first":
            return position <= n
        case "last":
            return position > total - n
        case "nth":
            return position == n
        case "every":
            start = which.start or n
            return n > 0 and position >= start and (position - start) % n == 0
        case "any" | "range":
            raise ValueError(f"`{which.kind}` takes no position")
        case _:
            assert_never(which.kind)


_CHILD_FIELDS = frozenset({"selector", "left", "right", "marker", "parts"})


def operator_matcher(operator: syntax.Operator) -> Callable[[str], bool]:
    """True if a full operator name is one that ``operator`` names. Without a namespace: of any but Python's own
    functions, or ``add`` would count additions of sizes."""
    name = NameGlob(operator.name)
    namespace = None if operator.namespace is None else NameGlob(operator.namespace)
    overload = None if operator.overload is None else NameGlob(operator.overload)

    def matches(target: str) -> bool:
        target_namespace, target_name, target_overload = split_target(target)
        return (
            name.matches(target_name)
            and (target_namespace != PLAIN_FUNCTIONS if namespace is None else namespace.matches(target_namespace))
            and (overload is None or overload.matches(target_overload))
        )

    return matches


def children(selector: Selector, lets: Mapping[str, Let]) -> tuple[Selector, ...]:
    """The selectors a selector is made of; of a reference, the selector of its ``let``."""
    return (lets[selector.name].selector,) if isinstance(selector, syntax.Reference) else parts(selector)


def parts_first(
    selector: Selector,
    lets: Mapping[str, Let],
    known: Container[int] = (),
    is_one_part: Callable[[Selector], bool] = lambda part: False,
) -> Iterator[Selector]:
    """The selector and all that it is made of, parts first, each once; those ``known`` by their id are left out. The
    walk keeps an explicit stack: a policy's ``let`` lines may refer to each other to any depth."""
    seen: set[int] = set()
    stack: list[tuple[Selector, bool]] = [(selector, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen and id(node) not in known:
            seen.add(id(node))
            stack.append((node, True))
            inside = () if is_one_part(node) else children(node, lets)
            stack.extend((part, False) for part in reversed(inside))


class Selections:
    """The sets that the selectors of one policy denote on one graph."""

    def __init__(
        self,
        facts: Facts,
        lets: Mapping[str, Let],
        blocks: BlockTable,
        chains: Chains,
        times: NodeTimes | None = None,
        pipeline: syntax.Pipeline | None = None,
    ) -> None:
        self.facts = facts
        self.pipeline = pipeline
        self.times = times
        self.prices = None if times is None else OperatorPrices(facts, times)
        self.lets = lets
        self.blocks = blocks
        self.each_block = EachBlock(facts, blocks)
        self.chains = chains
        self.cuts = Cuts(facts, chains)
        self._numbers: dict[int, int] = {}  # id of a tree node -> number of its equivalence class
        self._classes: dict[tuple[object, ...], int] = {}
        self._rows: list[list[int]] = []  # by class
        self._alive: list[Selector] = []  # keeps the ids in _numbers from being reused

    def of(self, lets: Mapping[str, Let]) -> Selections:
        """Those of another policy with the same blocks: what both denote is worked out once."""
        found = copy(self)
        found.lets, found._numbers, found._alive = lets, {}, []
        return found

    @cached_property
    def stage_of(self) -> Sequence[int]:
        """Node → stage of the pipeline; that which the graph is, if it is one."""
        if self.pipeline is None or self.pipeline.stage is not None:
            return array("i", [-1 if self.pipeline is None else self.pipeline.stage or 0]) * len(self.facts)
        return stages_of(self.facts, self.blocks, self.pipeline).of

    def rows(self, selector: Selector) -> list[int]:
        """The forward nodes a resolved selector denotes, in graph order. The list is shared: do not change it."""
        numbers = self._numbers
        for node in parts_first(selector, self.lets, numbers):
            self._evaluate_once(node, [numbers[id(part)] for part in children(node, self.lets)])
        return self._rows[numbers[id(selector)]]

    def _evaluate_once(self, node: Selector, parts: list[int]) -> None:
        check_cancelled()
        own = (getattr(node, f.name) for f in fields(type(node)) if f.eq and f.name not in _CHILD_FIELDS)
        key = (type(node), *own, *parts)
        number = self._classes.get(key)
        if number is None:
            found = self.evaluate(node, [self._rows[part] for part in parts])  # raises: then nothing is remembered
            number = self._classes[key] = len(self._rows)
            self._rows.append(found)
        self._numbers[id(node)] = number
        self._alive.append(node)

    def evaluate(self, node: Selector, parts: list[list[int]]) -> list[int]:
        """The nodes of one node of a tree, given those of its parts: one pass, and nothing is remembered."""
        facts, length = self.facts, len(self.facts)
        match node:
            case syntax.Everything():
                return facts.forward
            case syntax.Operator():
                matches, named = operator_matcher(node), (facts.by_target, facts.by_functional_form)
                found = [rows for each in named for name, rows in each.items() if matches(name)]
                return union(found, facts.forward, length)
            case syntax.Reference():
                return parts[0]
            case syntax.InModule():
                covers = covering(node.glob)
                return [row for row in parts[0] if covers(facts.modules[row]) is not node.outside]
            case syntax.InBlock():
                # The extra last entry answers for -1, "outside every block".
                of, count = self.blocks.block_of, len(self.blocks.names)
                if node.which.of == "stage":
                    of, count = self.stage_of, 0 if self.pipeline is None else self.pipeline.stages
                    if not count:
                        return []
                chosen = [*chosen_blocks(node.which, count), False]
                return [row for row in parts[0] if chosen[of[row]] is not node.outside]
            case syntax.Ordinal():
                scope = effective_scope(node.scope, bool(self.blocks.names))
                return choose(node, parts[0], group_keys(scope, parts[0], facts, self.blocks, self.chains))
            case syntax.Where():
                test = compile_predicate(node.predicate, self)
                return [row for row in parts[0] if test(row)]
            case syntax.Union():
                return union(parts, facts.forward, length)
            case syntax.Intersection():
                return intersection(parts[0], parts[1], length)
            case syntax.Difference():
                return difference(parts[0], parts[1], length)
            case syntax.Feeding():
                neighbours, mask = facts.inputs if node.reverse else facts.users, mask_of(parts[1], length)
                return [row for row in parts[0] if any(mask[other] for other in neighbours[row])]
            case syntax.Step():
                neighbours = {"users": facts.users, "inputs": facts.inputs}[node.direction]
                return members(mask_of((each for row in parts[0] for each in neighbours[row]), length), facts.forward)
            case syntax.Chain():
                before = self.chains.before(parts[0]) if node.direction != "after" else []
                after = self.chains.after(parts[0]) if node.direction != "before" else []
                return union([before, parts[0] if node.direction == "through" else [], after], facts.forward, length)
            case syntax.ChainOf(cut="after"):
                return self.chains.after_marker(parts[0], parts[1])
            case syntax.ChainOf(cut="before"):
                return self.chains.before_marker(parts[0], parts[1])
            case syntax.ChainOf():
                return union([parts[0], self.chains.after(parts[0])], facts.forward, length)
            case syntax.Word():
                raise TypeError(f"`{node.text}` has not been resolved")
            case _:
                assert_never(node)


def selections_for(
    policy: Policy, facts: Facts, blocks: BlockTable | None = None, *, times: NodeTimes | None = None
) -> Selections:
    """The selections of a policy on a graph, whose blocks are as the policy names them unless given.
    ``times``: of the graph's nodes, where there is a device."""
    if blocks is None:
        blocks = blocks_of(facts, None if policy.blocks is None else PathGlob(policy.blocks.glob))
    return Selections(facts, policy.lets, blocks, Chains(facts), times, policy.pipeline)


# --- predicates -------------------------------------------------------------------------------------------------------


Test = Callable[[int], bool]
Amount = Callable[[int], float | None]

ORIGINS = {
    "from parameter": InputKind.PARAMETER,
    "from buffer": InputKind.BUFFER,
    "from input": InputKind.USER,
    "gathered parameter": InputKind.PARAMETER,
    "gathered buffer": InputKind.BUFFER,
    "gathered input": InputKind.USER,
}
"""Predicates about the one graph input that a value is made of, and its kind."""
GATHERED = frozenset(name for name in ORIGINS if name.startswith("gathered"))
# Memory that a flat graph makes, writes and finishes within the forward is recomputed as a whole: in-place dropout.
_WRITTEN = Flag.WRITES | Flag.REPEATABLE


def compile_predicate(predicate: Predicate, on: Selections) -> Test:
    """The predicate as a function of a forward node. Recursion is as deep as the parser lets parentheses nest. A
    comparison with something a node does not have (the ``ndim`` of a tuple, the ``group_size`` of a matmul, a time
    without a device) is false, whatever the operator; ``not`` makes it true."""
    facts = on.facts
    match predicate:
        case syntax.Not():
            inner = compile_predicate(predicate.predicate, on)
            return lambda row: not inner(row)
        case syntax.And() | syntax.Or():
            tests = [compile_predicate(part, on) for part in predicate.parts]
            hold = all if isinstance(predicate, syntax.And) else any
            return lambda row: hold(test(row) for test in tests)
        case syntax.Compare():
            amount = amount_of(predicate, facts, on.prices)
            compare, limit = syntax.COMPARISONS[predicate.op], predicate.value.value
            return lambda row: (value := amount(row)) is not None and compare(value, limit)
        case syntax.Match():
            return _match(predicate, facts)
        case syntax.CrossesCut():
            crossing = on.cuts.crossing(predicate.bytes)
            return lambda row: bool(crossing[row])
        case syntax.Annotated():
            # tracing loses what is set on a piece of a tuple, and keeps what is set on the operator that returns it
            noted, owners, name = facts.annotations, facts.owners, predicate.name
            return lambda row: bool(noted) and (name in noted[row] or name in noted[owners[row]])
        case syntax.Is():
            return _is(predicate, facts, on.blocks, on.chains)
        case _:
            assert_never(predicate)


def column_of(test: Predicate) -> str:
    """The column that alone answers a test; empty where none does."""
    if isinstance(test, syntax.Annotated):
        return "annotations"
    return test.quantity if isinstance(test, syntax.Compare) and test.quantity in _COLUMNS else ""


_COLUMNS = frozenset(("bytes", "numel", "flops"))  # the quantities that are columns of the facts


def amount_of(predicate: syntax.Compare, facts: Facts, prices: OperatorPrices | None) -> Amount:
    """The quantity of a comparison as a function of a forward node; None if the graph lacks it."""
    match quantity := predicate.quantity:
        case "time" | "time_per_gib":
            return lambda row: None if prices is None else prices.of(quantity, row)
        case "bytes" | "numel" | "flops":
            column: Sequence[int] = getattr(facts, quantity)
            return column.__getitem__ if len(column) == len(facts) else lambda row: None
        case "inputs":
            return lambda row: len(facts.inputs[row])
        case "users":
            return lambda row: len(forward_users(facts, row))
        case "group_size":  # of a collective and of the wait that follows it
            groups, names = facts.groups, facts.group_names
            return lambda row: None if (found := groups.get(names[facts.owners[row]])) is None else found.size
        case "ndim":
            return lambda row: None if (shape := facts.shapes[row]) is None else len(shape)
        case "shape":  # counted from the end if negative
            index = predicate.index or 0
            return lambda row: shape[index] if -len(shape := facts.shapes[row] or ()) <= index < len(shape) else None
        case _:
            assert_never(quantity)


def _match(predicate: syntax.Match, facts: Facts) -> Test:
    """Each distinct value is matched once: a graph has many nodes and few dtypes, devices and modules."""
    wanted, name = predicate.op == "==", NameGlob(predicate.pattern).matches
    column: Sequence[str]
    holds: Callable[[str], bool | None]  # None for a node without the quantity
    match predicate.property:
        case "dtype":
            column, holds = facts.dtypes, lambda dtype: name(dtype) if dtype else None
        case "device":
            column, holds = facts.devices, lambda full: name(full) or name(full.partition(":")[0]) if full else None
        case "overload":
            column, holds = facts.targets, lambda target: name(own) if (own := split_target(target)[2]) else None
        case "module":  # the empty path is the root module
            column, holds = facts.modules, PathGlob(predicate.pattern).matches
        case _:
            assert_never(predicate.property)
    answer = cache(lambda value: holds(value) is wanted)
    return lambda row: answer(column[row])


def split_target(target: str) -> tuple[str, str, str]:
    """``aten.mm.default`` as namespace, name and overload; the overload is empty where there is none."""
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    return namespace, name, overload


def _is(predicate: syntax.Is, facts: Facts, blocks: BlockTable, chains: Chains) -> Test:
    flags = facts.flags
    match name := predicate.name:
        case "from parameter" | "from buffer" | "from input":
            made = chains.made_of(ORIGINS[name])
            return lambda row: bool(made[row])
        case "gathered parameter" | "gathered buffer" | "gathered input":
            made, gathered = chains.made_of(ORIGINS[name]), chains.gathered_mask
            return lambda row: bool(made[row] and gathered[row])
        case "crosses block":
            block_of = blocks.block_of
            if blocks.alone is not None or is_one_block(blocks, facts):  # what the graph returns, other blocks read
                return lambda row: bool(flags[row] & Flag.FORWARD_OUTPUT)
            return lambda row: any(block_of[user] != block_of[row] for user in forward_users(facts, row))
        case "is view":
            targets, inputs = facts.targets, facts.inputs  # a piece of a view, such as of a split, is one too
            return lambda row: bool(
                flags[inputs[row][0] if targets[row] == GETITEM and inputs[row] else row] & Flag.VIEW
            )
        case "user tagged":
            tags, owners = facts.user_tags, facts.owners
            return lambda row: tags[row] is not None or tags[owners[row]] is not None
        case "is mutated":
            return lambda row: bool(flags[row] & Flag.READS_MUTATED) or flags[row] & _WRITTEN == Flag.WRITES
        case "feeds backward":
            # what a block returns is read by the backward of what follows
            feeds = Flag.FEEDS_BACKWARD if blocks.alone is None else Flag.FEEDS_BACKWARD | Flag.FORWARD_OUTPUT
            return lambda row: bool(flags[row] & feeds)
        case "is random":
            return lambda row: bool(flags[row] & Flag.RANDOM)
        case "is multi_output":
            return lambda row: bool(flags[row] & Flag.MULTI_OUTPUT)
        case "recorded saved":
            return lambda row: bool(flags[row] & Flag.RECORDED_SAVED)
        case "recorded offloaded":
            return lambda row: bool(flags[row] & Flag.RECORDED_OFFLOADED)
        case _:
            assert_never(name)


@frozen(eq=False)
class OperatorPrices:
    """``time`` and ``time_per_gib`` of one graph on one device. The pieces of a tuple and the wait for a collective
    share the decision of their operator, and so its time and its price."""

    facts: Facts
    times: NodeTimes

    def of(self, measure: str, row: int) -> float | None:
        """A measure by its word in the language: seconds, 0 for nodes that do nothing on the device, as views; or the
        seconds of recomputation per GiB kept, None for a value without separate memory."""
        facts, owner = self.facts, self.facts.owners[row]
        seconds, size = self.times.seconds[owner], facts.bytes[owner]
        if measure == "time":
            return seconds
        return seconds * 2.0**30 / size if size and facts.storage_roots[owner] == owner else None
