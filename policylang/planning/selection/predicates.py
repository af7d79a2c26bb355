"""``where`` clauses: a predicate tree becomes one function from a row to a truth value.

A comparison with something a node does not have (the ``ndim`` of a tuple, the ``group_size`` of a matmul) is false,
whatever the operator; ``not`` turns it into true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import assert_never

from policylang.graph.blocks import BlockTable, is_one_block
from policylang.graph.chains import Chains
from policylang.graph.facts import Facts, Flag, InputKind, forward_users
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
from policylang.planning.selection.cuts import Cuts
from policylang.planning.selection.operator_prices import OperatorPrices

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
# Memory that a flat graph makes, writes and finishes within the forward runs again as a whole: in-place dropout.
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
    """What a comparison compares of a forward row; None of a row of which the graph does not say it."""
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
    """Of a collective and of the wait that follows it."""
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
