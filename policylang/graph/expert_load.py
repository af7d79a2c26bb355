"""The sizes that come from data under a stated load: so many tokens for each expert, or each rank with experts.

Routing counts the tokens that choose each expert. Counts become sizes (``item``, ``nonzero``), and a sum of such sizes
is the size of a tensor. Going back from a size to its count gives the even share: the average element of the count. A
rank sends or keeps all tokens that it routes itself, whatever the load; of what others route, it receives its share
times the load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from math import ceil, floor, gcd
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from attrs import evolve

from policylang.graph.facts import Facts

_loaded: WeakKeyDictionary[Facts, dict[tuple[float, bool], Facts]] = WeakKeyDictionary()


def under_load(facts: Facts, factor: float, is_limit: bool) -> Facts:
    """The facts where each expert receives ``factor`` times its share of every rank's tokens: bytes, elements, shapes
    and FLOPs of the largest such load.

    ``is_limit``: it receives at most so many, so that sizes have a range. Sizes that do not come from a count of tokens
    stay as they are, and keep their :attr:`Facts.data_terms`.
    """
    known = _loaded.setdefault(facts, {})
    if (factor, is_limit) not in known:
        known[factor, is_limit] = _under_load(facts, Fraction(repr(factor)), is_limit)
    return known[factor, is_limit]


def untold(facts: Facts) -> list[int]:
    """The nodes whose bytes come from data, and no stated load tells them."""
    if not facts.data_terms:
        return []
    return [row for row, terms in enumerate(facts.data_terms) if terms and facts.data_sizes[row] and facts.bytes[row]]


def makers_of(facts: Facts, rows: Sequence[int]) -> list[int]:
    """The nodes that make the symbols in the sizes of some nodes; those nodes themselves where a size is no sum."""
    made = dict(_makers(facts))
    found = ((made[symbol] for symbol, _ in terms) if (terms := facts.data_terms[row][2]) else (row,) for row in rows)
    return sorted({maker for each in found for maker in each})


def _makers(facts: Facts) -> Iterator[tuple[str, int]]:
    seen = set[str]()
    for row, terms in enumerate(facts.data_terms):
        for symbol, _ in terms[2] if terms else ():
            if symbol not in seen:
                seen.add(symbol)
                yield symbol, row


class _Size(NamedTuple):
    """A symbol: one element of a count, or how many elements of a mask are true."""

    share: Fraction
    """Its value under an even load."""
    is_sent: bool
    """True if this rank's own tokens are counted, all of which go to some expert."""
    source: tuple[int, int]
    """The node whose elements are counted, and 0, or 1 for elements of a mask."""
    parts: int
    """How many elements, or experts, share out the tokens."""


class _Count(NamedTuple):
    average: Fraction
    is_sent: bool
    choices: int
    """The node with the number of an expert for each choice."""
    experts: int


def _under_load(facts: Facts, factor: Fraction, is_limit: bool) -> Facts:
    if not any(facts.data_terms):
        return facts
    sizes = {symbol: size for symbol, row in _makers(facts) if (size := _size_of(facts, row)) is not None}
    names = ("bytes", "numel", "shapes", "flops", "data_sizes", "data_terms")
    columns: dict[str, Any] = {name: list(getattr(facts, name)) for name in names}
    scales = dict[int, Fraction]()
    for row, terms in enumerate(facts.data_terms):
        if not terms or not facts.bytes[row] or not terms[2] or any(symbol not in sizes for symbol, _ in terms[2]):
            continue
        dim, constant, parts = terms
        least, most = _range(constant, dict(parts), sizes, factor, is_limit)
        _, at_least, at_most = facts.data_sizes[row]
        if at_most >= 0:
            least, most = min(least, at_most), min(most, at_most)
        least = max(least, at_least)
        most = max(most, least)
        scales[row] = scale = Fraction(most, facts.bytes[row])
        shape, rows = facts.shapes[row], facts.data_sizes[row][0]
        if shape is not None and dim >= 0:
            rows = int(shape[dim] * scale)
            columns["shapes"][row] = (*shape[:dim], rows, *shape[dim + 1 :])
        columns["bytes"][row], columns["numel"][row] = most, int(facts.numel[row] * scale)
        columns["data_sizes"][row], columns["data_terms"][row] = (rows, least, most), ()
    for row, flops in enumerate(facts.flops):  # products are linear in the rows that come from data
        if flops:
            scale = next((scales[each] for each in (row, *facts.inputs[row]) if each in scales), Fraction(1))
            columns["flops"][row] = int(flops * scale)
    return evolve(facts, **columns) if scales else facts


def _range(
    constant: int, terms: Mapping[str, int], sizes: Mapping[str, _Size], factor: Fraction, is_limit: bool
) -> tuple[int, int]:
    """The least and the most bytes of a sum."""
    least = most = Fraction(constant)
    counts: dict[tuple[int, int], list[str]] = {}
    for symbol in terms:
        counts.setdefault(sizes[symbol].source, []).append(symbol)
    for symbols in counts.values():
        one = sizes[symbols[0]]
        largest = min(factor, Fraction(one.parts))
        smallest = max(Fraction(0), one.parts - (one.parts - 1) * factor) if is_limit else largest
        if one.is_sent and len(symbols) == one.parts and len({terms[each] for each in symbols}) == 1:
            smallest = largest = Fraction(1)
        for symbol in symbols:
            ends = [terms[symbol] * sizes[symbol].share * load for load in (smallest, largest)]
            least, most = least + min(ends), most + max(ends)
    unit = reduce(gcd, terms.values())
    whole = constant % unit
    return max(0, floor((least - whole) / unit) * unit + whole), max(0, ceil((most - whole) / unit) * unit + whole)


# --- from a size back to the count of tokens --------------------------------------------------------------------------

_PARTS = {"builtin.getitem", "aten.unbind", "aten.select", "aten.slice", "aten.split", "aten.split_with_sizes"}
_ARRANGED = {
    "aten.view", "aten._unsafe_view", "aten.reshape", "aten.transpose", "aten.t", "aten.permute", "aten.squeeze",
    "aten.unsqueeze", "aten.expand", "aten.clone", "aten.alias", "aten.detach", "aten._to_copy", "aten.to", "aten.copy",
    "aten.contiguous", "aten.flatten", "_c10d_functional.wait_tensor",
}  # fmt: skip
_RECEIVED = {"_c10d_functional.all_to_all_single", "_c10d_functional.all_gather_into_tensor"}
_COUNTED = {"aten.histc", "aten.bincount", "aten.one_hot"}
_SCATTERED = {"aten.scatter", "aten.scatter_", "aten.scatter_add", "aten.scatter_add_"}
_MASKED = {"aten.nonzero", "aten.masked_select", "aten.index"}


def _size_of(facts: Facts, row: int) -> _Size | None:
    """The size that a node makes; None where it is not known to count tokens."""
    reads, target = facts.inputs[row], _operator(facts, row)
    if target == "aten._local_scalar_dense" and reads:
        of = _behind(facts, reads[0], _PARTS)
        found = _count(facts, of)
        return None if found is None else _Size(found.average, found.is_sent, (of, 0), facts.numel[of])
    mask = next((each for each in reads if facts.dtypes[each] == "bool"), None)
    if target not in _MASKED or mask is None or (found := _count(facts, mask)) is None:
        return None
    return _Size(found.average * facts.numel[mask], found.is_sent, (found.choices, 1), found.experts)


def _count(facts: Facts, row: int) -> _Count | None:
    """The average element of a count of tokens under an even load; None for anything else."""
    times, is_sent = Fraction(1), True
    while (reads := facts.inputs[row]) and facts.numel[row]:
        of, target = reads[0], _operator(facts, row)
        if target in _SCATTERED and len(reads) > 1:
            of = reads[1]
        elif target == "aten.eq":
            of = max(reads, key=lambda each: (_operator(facts, each) != "aten.arange", facts.numel[each]))
            if len(reads) == 1:
                experts = _experts(facts, of)
                return _Count(times / experts, is_sent, of, experts) if experts else None
        elif target == "aten.sum":
            times *= Fraction(facts.numel[of], facts.numel[row])
        elif target in _RECEIVED:
            is_sent = False
        elif target not in _COUNTED and target not in _PARTS and target not in _ARRANGED:
            return None
        if target in _SCATTERED or target in _COUNTED or target == "aten.eq":
            share = Fraction(facts.numel[of], facts.numel[row])
            return _Count(times * share, is_sent, of, facts.numel[row] // max(facts.numel[of], 1))
        row = of
    return None


def _experts(facts: Facts, row: int) -> int:
    """How many experts some choices are among; 0 where that is not known."""
    row = _behind(facts, row, _PARTS | _ARRANGED)
    if _operator(facts, row) not in ("aten.topk", "aten.argmax", "aten.max") or not facts.inputs[row]:
        return 0
    of, users = facts.shapes[facts.inputs[row][0]], [facts.shapes[each] for each in (row, *facts.users[row])]
    shape = next((each for each in users if each is not None), None)
    if of is None or shape is None:
        return 0
    kept = shape if len(shape) == len(of) else (*shape, 1)  # along the last dimension, as routers do
    return next((a for a, b in zip(of, kept, strict=True) if a != b), of[-1]) if len(kept) == len(of) else 0


def _behind(facts: Facts, row: int, passed: Collection[str]) -> int:
    """The first node back along first arguments that is none of some operators."""
    while _operator(facts, row) in passed and facts.inputs[row]:
        row = facts.inputs[row][0]
    return row


def _operator(facts: Facts, row: int) -> str:
    return ".".join(facts.targets[row].split(".", 2)[:2])
