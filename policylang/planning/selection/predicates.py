"""``where`` clauses: a predicate tree becomes one function from a row to a truth value.

A comparison with something a node does not have (the ``ndim`` of a tuple, the ``group_size`` of a matmul) is false,
whatever the operator; ``not`` turns it into true.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import accumulate
from math import sqrt
from typing import assert_never

from attrs import frozen

from policylang.graph.blocks import BlockTable, is_one_block
from policylang.graph.chains import Chains
from policylang.graph.facts import Facts, Flag, InputKind, forward_users
from policylang.graph.storage import storage_roots
from policylang.language.globs import NameGlob, PathGlob
from policylang.language.syntax import (
    COMPARISONS,
    TIMES,
    And,
    Annotated,
    Compare,
    CrossesCut,
    Is,
    Match,
    Not,
    Or,
    Predicate,
)
from policylang.operators.names import GETITEM
from policylang.simulation.node_times import NodeTimes

_GIB = 2.0**30


@frozen(eq=False, slots=False)
class OperatorPrices:
    """``time`` and ``time_per_gib`` of one graph on one device. The pieces of a tuple and the wait for a collective
    share the decision of their operator, and so its time and its price."""

    facts: Facts
    times: NodeTimes

    def time(self, row: int) -> float:
        """Seconds; 0 of what does nothing on the device, as views."""
        return self.times.seconds[self.facts.owners[row]]

    def time_per_gib(self, row: int) -> float | None:
        """Seconds to make the value again, per GiB that it takes to keep; None of what has no memory of its own."""
        facts, owner = self.facts, self.facts.owners[row]
        size = facts.bytes[owner]
        if not size or self._roots[owner] != owner:
            return None
        return self.times.seconds[owner] * _GIB / size

    def of(self, measure: str, row: int) -> float | None:
        """A measure by its word in the language."""
        return self.time(row) if measure == "time" else self.time_per_gib(row)

    @cached_property
    def _roots(self) -> Sequence[int]:
        return storage_roots(self.facts)


_NEVER = -1


class Cuts:
    """``crosses cut per 2 GiB``: the forward cut into stages, each cut where the least is alive.

    A *value* here is memory that the forward makes: views, ``wait_tensor`` and in-place results share that of the value
    that allocated it; each output of a multi-output operator is a value, made when the operator runs. Sizes are none,
    and neither is what is made of one parameter alone (a weight cast or gathered).

    A *cut* lies between two nodes of the forward, in graph order. A value is alive at it if it was made before and a
    forward node after it reads it, itself or through a view. While what is left of the forward makes more than ``size``
    bytes, the stage ends at the cut where the fewest bytes are alive, among those at which it would have made at least
    half of ``size`` and at most ``size``; of several such at the latest. Where there is no cut in that range, because
    one node makes too much, the stage ends behind that node, before the next one that makes anything, where the fewest
    bytes are alive. ``auto`` is the square root of what the forward makes, both in GiB: as many stages as GiB in each,
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
        """By row, 1 for the nodes whose decision saves a value that is alive at a cut.

        These are the nodes whose memory the value is and that share the decision of the node that allocated it, a
        ``wait_tensor`` for instance, and the owner of that decision. A mere view is none of them.
        """
        cuts, mask = self.positions(self.stage(size)), bytearray(len(self.facts))
        roots, owners = self._roots, self.facts.owners
        for row in self.facts.forward if cuts else ():
            value = roots[row]
            if owners[row] == owners[value] and self._crosses(value, cuts):
                mask[row] = mask[owners[row]] = 1
        return mask

    def _crosses(self, value: int, cuts: Sequence[int]) -> bool:
        born, last = self._lifetimes[0][value], self._lifetimes[1][value]
        return born != _NEVER and bisect_right(cuts, born) < bisect_right(cuts, last)

    @cached_property
    def _roots(self) -> Sequence[int]:
        return storage_roots(self.facts)

    @cached_property
    def _lifetimes(self) -> tuple[array[int], array[int]]:
        """By row of a value, the places in the forward at which it is made and read last; -1 for what is no value."""
        facts, roots = self.facts, self._roots
        inputs, targets, flags = facts.inputs, facts.targets, facts.flags
        of_parameter = self._chains.from_parameter_mask
        born = array("i", [_NEVER]) * len(facts)
        last = array("i", [_NEVER]) * len(facts)
        place = array("i", [_NEVER]) * len(facts)
        for at, row in enumerate(facts.forward):
            place[row] = at
            if roots[row] == row and not flags[row] & Flag.SYMBOLIC and not of_parameter[row]:
                born[row] = at
                if targets[row] == GETITEM:  # one of several results, which the operator made at its own place
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


Test = Callable[[int], bool]
Amount = Callable[[int], float | None]

_FLAGS = {
    "feeds backward": Flag.FEEDS_BACKWARD,
    "is random": Flag.RANDOM,
    "is multi_output": Flag.MULTI_OUTPUT,
    "recorded saved": Flag.RECORDED_SAVED,
}
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


def compile_predicate(
    predicate: Predicate,
    facts: Facts,
    blocks: BlockTable,
    chains: Chains,
    cuts: Cuts,
    prices: OperatorPrices | None = None,
) -> Test:
    """The predicate as a function of a forward row. Recursion is as deep as the parser lets parentheses nest. Without
    ``prices`` no comparison with a time holds."""
    match predicate:
        case Not():
            inner = compile_predicate(predicate.predicate, facts, blocks, chains, cuts, prices)
            return lambda row: not inner(row)
        case And() | Or():
            tests = [compile_predicate(part, facts, blocks, chains, cuts, prices) for part in predicate.parts]
            hold = all if isinstance(predicate, And) else any
            return lambda row: hold(test(row) for test in tests)
        case Compare():
            return _compare(predicate, facts, prices)
        case Match():
            return _match(predicate, facts)
        case CrossesCut():
            crossing = cuts.crossing(predicate.bytes)
            return lambda row: bool(crossing[row])
        case Annotated():
            return _annotated(predicate.name, facts)
        case Is():
            return _is(predicate, facts, blocks, chains)
        case _:
            assert_never(predicate)


def _compare(predicate: Compare, facts: Facts, prices: OperatorPrices | None) -> Test:
    amount = amount_of(predicate, facts, prices)
    compare = COMPARISONS[predicate.op]
    limit = predicate.value.value

    def test(row: int) -> bool:
        value = amount(row)
        return value is not None and compare(value, limit)

    return test


COLUMNS = {"bytes": "bytes", "numel": "numel", "flops": "flops"}
"""Quantity to the column that says it."""


def column_of(test: Predicate) -> str:
    """The column that alone answers a test; empty where none does."""
    return "annotations" if isinstance(test, Annotated) else COLUMNS.get(getattr(test, "quantity", ""), "")


def amount_of(predicate: Compare, facts: Facts, prices: OperatorPrices | None) -> Amount:
    """The quantity of a comparison as a function of a forward row; None where the graph does not say it."""
    quantity = predicate.quantity
    if quantity in TIMES:
        return lambda row: None if prices is None else prices.of(quantity, row)
    if quantity in COLUMNS:
        column: Sequence[int] = getattr(facts, COLUMNS[quantity])
        return column.__getitem__ if len(column) == len(facts) else lambda row: None
    if quantity == "inputs":
        return lambda row: len(facts.inputs[row])
    if quantity == "users":
        return lambda row: len(forward_users(facts, row))
    if quantity == "group_size":
        return lambda row: _group_size(facts, row)
    if quantity == "ndim":
        return lambda row: None if (shape := facts.shapes[row]) is None else len(shape)
    index = predicate.index or 0
    return lambda row: None if (place := dimension_at(facts, row, index)) is None else (facts.shapes[row] or ())[place]


def dimension_at(facts: Facts, row: int, index: int) -> int | None:
    """The dimension that an index, which may count from the end, means of a value; None where it has none there."""
    rank = len(facts.shapes[row] or ())
    return index % rank if -rank <= index < rank else None


def _group_size(facts: Facts, row: int) -> int | None:
    """The group size of a collective and of the wait that follows it."""
    group = facts.groups.get(facts.group_names[facts.owners[row]])
    return None if group is None else group.size


def _match(predicate: Match, facts: Facts) -> Test:
    """Each distinct value is matched once: a graph has many nodes and few dtypes, devices and modules."""
    wanted = predicate.op == "=="
    matches = _matcher(predicate)
    column_name, present = _TEXTS[predicate.property]
    column: Sequence[str] = getattr(facts, column_name)
    answer = cache(lambda value: present(value) and matches(value) == wanted)
    return lambda row: answer(column[row])


_TEXTS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "dtype": ("dtypes", bool),
    "device": ("devices", bool),
    "overload": ("targets", lambda target: bool(split_target(target)[2])),
    "module": ("modules", lambda path: True),  # the empty path is the root module
}
"""By property, its column and whether a node has one."""


def _matcher(predicate: Match) -> Callable[[str], bool]:
    if predicate.property == "module":
        return PathGlob(predicate.pattern).matches
    name = NameGlob(predicate.pattern).matches
    if predicate.property == "device":
        return lambda device: name(device) or name(device.partition(":")[0])
    if predicate.property == "overload":
        return lambda target: name(split_target(target)[2])
    return name


def split_target(target: str) -> tuple[str, str, str]:
    """``aten.mm.default`` as namespace, name and overload; the overload is empty where there is none."""
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    return namespace, name, overload


def _annotated(name: str, facts: Facts) -> Test:
    """Tracing loses what is set on a piece of a tuple, and keeps what is set on the operator that returns it."""
    annotations, owners = facts.annotations, facts.owners
    if not annotations:
        return lambda row: False
    return lambda row: name in annotations[row] or name in annotations[owners[row]]


def _is(predicate: Is, facts: Facts, blocks: BlockTable, chains: Chains) -> Test:
    name = predicate.name
    kind = ORIGINS.get(name)
    if kind is not None:
        made, gathered = chains.made_of(kind), chains.gathered_mask if name in GATHERED else None
        return lambda row: bool(made[row]) and (gathered is None or bool(gathered[row]))
    if name == "crosses block":
        block_of = blocks.block_of
        if blocks.alone is not None or is_one_block(blocks, facts):  # what the graph returns, other blocks read
            return lambda row: bool(facts.flags[row] & Flag.FORWARD_OUTPUT)
        return lambda row: any(block_of[user] != block_of[row] for user in forward_users(facts, row))
    if name == "is view":
        return lambda row: _is_view(facts, row)
    if name == "user tagged":
        tags, owners = facts.user_tags, facts.owners
        return lambda row: tags[row] is not None or tags[owners[row]] is not None
    if name == "is mutated":
        flags = facts.flags
        return lambda row: bool(flags[row] & Flag.READS_MUTATED) or flags[row] & _WRITTEN == Flag.WRITES
    flag, flags = _FLAGS[name], facts.flags
    return lambda row: bool(flags[row] & flag)


def _is_view(facts: Facts, row: int) -> bool:
    """A piece of a view, such as of a split, is one too."""
    piece = facts.targets[row] == GETITEM and bool(facts.inputs[row])
    return bool(facts.flags[facts.inputs[row][0] if piece else row] & Flag.VIEW)
