"""Bounds of a selector where sizes follow the batch: the nodes it surely denotes, and those it may denote.

A test of a size that changes with the batch is neither true nor false of a node: its outcome *hangs*. Everything else
is known. Sets grow and shrink with what they are made of, but for choices by position and lines cut at a marker: of
these any member is possible, and none is sure, once what they choose from hangs. One pass a selector, as in
:mod:`policylang.planning.selection.selectors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from attrs import frozen

from policylang.graph.facts import Facts, difference, intersection
from policylang.language.syntax import (
    COMPARISONS,
    TIMES,
    And,
    Chain,
    ChainOf,
    Compare,
    CrossesCut,
    Difference,
    Not,
    Or,
    Ordinal,
    Predicate,
    Selector,
    Where,
)
from policylang.language.walk import predicates
from policylang.planning.batch.sizes import REACH, BatchSizes, Range
from policylang.planning.selection.operator_prices import OperatorPrices
from policylang.planning.selection.predicates import compile_predicate, dimension_at
from policylang.planning.selection.selectors import Selections, children, parts_first

SizeTest = Compare | CrossesCut
Answer = Callable[[int], bool | None]
"""From a row to the truth, or None where it hangs on the batch."""

_SIZES = frozenset(("bytes", "numel", "shape", "flops", *TIMES))


@frozen(eq=False)
class Bound:
    """Rows in graph order; the same list twice where nothing hangs."""

    sure: list[int]
    possible: list[int]

    @property
    def hangs(self) -> bool:
        return self.sure is not self.possible


def size_tests(predicate: Predicate) -> Iterator[SizeTest]:
    """The tests in a predicate whose outcome depends on the sizes of values, in the order of the text."""
    for test in predicates(predicate):
        if isinstance(test, CrossesCut) or (isinstance(test, Compare) and test.quantity in _SIZES):
            yield test


class Bounds:
    """The bounds of the selectors of one policy on one graph, each worked out once."""

    def __init__(self, selections: Selections, sizes: BatchSizes) -> None:
        self._selections = selections
        self._sizes = sizes
        self._facts: Facts = selections.facts
        self._known: dict[int, Bound] = {}  # by id: the policy keeps its trees alive
        self._answers: dict[int, Answer] = {}

    def of(self, selector: Selector) -> Bound:
        """The bounds of a resolved selector."""
        lets = self._selections.lets
        for node in parts_first(selector, lets, self._known):
            self._known[id(node)] = self._bound(node, [self._known[id(part)] for part in children(node, lets)])
        return self._known[id(selector)]

    def hanging_test(self, selector: Selector, row: int) -> SizeTest | None:
        """The first test in a selector that hangs, of this row if there is one."""
        tests = [
            (test, self._known[id(node.selector)].possible)
            for node in parts_first(selector, self._selections.lets)
            if isinstance(node, Where)
            for test in size_tests(node.predicate)
        ]
        by_row = [test for test, rows in tests if row in rows and self._answer(test)(row) is None]
        if by_row:
            return by_row[0]
        return next((test for test, rows in tests if any(self._answer(test)(each) is None for each in rows)), None)

    def _bound(self, node: Selector, parts: list[Bound]) -> Bound:
        asks = isinstance(node, Where) and any(size_tests(node.predicate))
        if not asks and not any(part.hangs for part in parts):
            return _exact(self._selections.rows(node))
        if isinstance(node, Where):
            return self._where(node, parts[0])
        if isinstance(node, Difference):
            left, right = parts
            length = len(self._facts)
            return Bound(difference(left.sure, right.possible, length), difference(left.possible, right.sure, length))
        if isinstance(node, Ordinal):
            return Bound([], parts[0].possible)
        if isinstance(node, ChainOf) and node.cut is not None:
            return Bound([], self._cut_lines(node, parts[0].possible, parts[1].possible))
        evaluate = self._selections.evaluate
        return Bound(evaluate(node, [part.sure for part in parts]), evaluate(node, [part.possible for part in parts]))

    def _cut_lines(self, node: ChainOf, rows: list[int], markers: list[int]) -> list[int]:
        """What may lie before or after the first marker: before or after any of those that may be one."""
        evaluate = self._selections.evaluate
        if node.cut == "after":
            return evaluate(node, [rows, markers])
        line = evaluate(ChainOf(node.selector), [rows])
        return intersection(line, evaluate(Chain("before", node.selector), [markers]), len(self._facts))

    def _where(self, node: Where, part: Bound) -> Bound:
        answer = self._answer(node.predicate)
        answers = [(row, answer(row)) for row in part.possible]
        possible = [row for row, each in answers if each is not False]
        if not part.hangs and not any(each is None for _, each in answers):
            return _exact(possible)
        certain = bytearray(len(self._facts))
        for row, each in answers:
            certain[row] = each is True
        return Bound([row for row in part.sure if certain[row]], possible)

    def _answer(self, predicate: Predicate) -> Answer:
        known = self._answers.get(id(predicate))
        if known is None:
            known = self._answers[id(predicate)] = self._compile(predicate)
        return known

    def _compile(self, predicate: Predicate) -> Answer:
        if not any(size_tests(predicate)):
            selections = self._selections
            return compile_predicate(
                *(predicate, self._facts, selections.blocks, selections.chains, selections.cuts, selections.prices)
            )
        if isinstance(predicate, Not):
            inner = self._answer(predicate.predicate)
            return lambda row: None if (found := inner(row)) is None else not found
        if isinstance(predicate, And | Or):
            decisive = isinstance(predicate, Or)
            parts = [self._answer(part) for part in predicate.parts]
            return lambda row: _joined(parts, row, decisive)
        if isinstance(predicate, CrossesCut):
            return self._crosses(predicate)
        assert isinstance(predicate, Compare)
        return self._compare(predicate)

    def _crosses(self, test: CrossesCut) -> Answer:
        """Another batch is cut elsewhere: whatever is alive between two nodes may be alive at a cut, or at none."""
        cuts = self._selections.cuts
        crossing, crossable = cuts.crossing(test.bytes), cuts.crossable
        reached = cuts.produced * REACH > cuts.stage(test.bytes, REACH)
        moves = reached and any(self._sizes.changes(row) for row in self._facts.forward)
        return lambda row: None if moves and crossable[row] else bool(crossing[row])

    def _compare(self, test: Compare) -> Answer:
        facts, sizes = self._facts, self._sizes
        prices = self._selections.prices  # not `self`, which keeps the answer: plans are freed by counting
        index = test.index or 0

        def of(row: int) -> Range | None:
            if test.quantity in ("bytes", "numel"):
                return sizes.of_value(row, getattr(facts, test.quantity))
            if test.quantity == "flops":
                return sizes.of_call(row, facts.flops)
            if test.quantity in TIMES:
                return _range_of_time(prices, sizes, facts, test.quantity, row)
            place = dimension_at(facts, row, index)
            return None if place is None else sizes.of_dimension(row, place, (facts.shapes[row] or ())[place])

        return lambda row: False if (found := of(row)) is None else _compared(test, found)


def _range_of_time(
    prices: OperatorPrices | None, sizes: BatchSizes, facts: Facts, measure: str, row: int
) -> Range | None:
    """Of a call whose sizes change, a time is anything from its launch on, and a price anything at all."""
    found = None if prices is None else prices.of(measure, row)
    if prices is None or found is None:
        return None
    if not found or not sizes.changes_call(facts.owners[row]):
        return found, found
    return (prices.times.device.overhead, found * REACH) if measure == "time" else (0.0, inf)


def _exact(rows: list[int]) -> Bound:
    return Bound(rows, rows)


def _joined(parts: list[Answer], row: int, decisive: bool) -> bool | None:
    """One true part decides an ``or``, one false part an ``and``."""
    answers = [part(row) for part in parts]
    if decisive in answers:
        return decisive
    return None if None in answers else not decisive


def _compared(test: Compare, found: Range) -> bool | None:
    least, most = found
    limit = test.value.value
    compare = COMPARISONS[test.op]
    if test.op in ("==", "!="):
        if least < most and least <= limit <= most and (least < 1 or limit % least == 0):
            return None
        return compare(least, limit) if least == most else test.op == "!="
    low, high = compare(least, limit), compare(most, limit)
    return low if low is high else None
