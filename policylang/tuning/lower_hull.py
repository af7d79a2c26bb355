"""The lower hull of seconds of recomputation against bytes kept, over all choices of a graph.

The choices are a linear program: minimise seconds + price × bytes with every column between 0 and 1. Each memory is
between the one operator that makes it and its readers: the matrix is that of a minimum cut (Picard, "Maximal closure of
a graph and applications to combinatorial problems", Management Science 1976), totally unimodular, so that every vertex
is 0 or 1. Views with further inputs break that; fractional solutions are then resolved by branch and bound.

Costs are scaled to whole numbers that add up to less than 2**50. The simplex method, with pivots of 1 and -1, then
computes only whole numbers, exact in a double and equal on every machine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from math import frexp, fsum, inf, ldexp
from typing import Any

from attrs import field, frozen

from policylang.errors import PolicyError
from policylang.graph.blocks import BlockTable
from policylang.graph.facts import Facts, Flag
from policylang.language.diagnostics import diagnose
from policylang.planning.capabilities import Capabilities
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.choices import MUST_RUN, NONE, Choices, choices_of, merged

SCALE = 2.0**50

Weighted = tuple[int, Sequence[int]]
"""A weight, and a cost by column: whole numbers, none negative."""


def solver() -> Any:
    """HiGHS.

    Raises:
        PolicyError: it is not installed.
    """
    try:
        import highspy
    except ImportError:
        raise PolicyError(
            [
                diagnose(
                    "APL619",
                    "a policy is tuned with the solver HiGHS, and `highspy` is not installed",
                    help="install it with `pip install highspy`",
                )
            ]
        ) from None
    return highspy


OPTIONS: dict[str, Any] = {
    "output_flag": False,
    "threads": 1,
    "parallel": "off",
    "random_seed": 0,
    "solver": "simplex",
    "presolve": "off",
    # Keeps whole numbers whole.
    "simplex_scale_strategy": 0,
    "dual_simplex_cost_perturbation_multiplier": 0.0,
    "primal_simplex_bound_perturbation_multiplier": 0.0,
    "mip_rel_gap": 0.0,
    "mip_max_nodes": 1000,
}
_WHOLE = {"presolve": "on", "mip_rel_gap": 0.01, "mip_max_nodes": 5, "mip_allow_restart": False}
_UNITS = 1e6
_LINE = 5e-4
"""The share of all that may be recomputed that a line is worth."""


class Relaxation:
    """The linear program. It keeps the last basis: the next objective starts from there."""

    def __init__(self, choices: Choices) -> None:
        import numpy

        highspy = solver()
        self.numpy, self.highspy = numpy, highspy
        self.is_cut = True
        """True if the last choice is the relaxation's."""
        columns, clauses = len(choices.rows), choices.clauses
        self.every_column = numpy.arange(columns, dtype=numpy.int32)
        self.every_row = numpy.arange(len(clauses), dtype=numpy.int32)
        self.zeros, self.ones = numpy.zeros(columns), numpy.ones(columns)
        self.least = numpy.array([float(asked == NONE) for _, _, asked in clauses])
        self.no_limit = numpy.full(len(clauses), highspy.kHighsInf)
        starts, index, value = [0], list[int](), list[float]()
        for kept, runs, asked in clauses:
            for column, factor in ((kept, 1.0), (runs, 1.0), (asked, -1.0)):
                if column != NONE:
                    index.append(column)
                    value.append(factor)
            starts.append(len(index))
        self.lower, self.upper, self.most = self.zeros, self.ones, self.no_limit
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = columns, len(clauses)
        model.col_cost_, model.col_lower_, model.col_upper_ = self.zeros, self.zeros, self.ones
        model.row_lower_, model.row_upper_ = self.least, self.no_limit
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_, matrix.index_, matrix.value_ = starts, index, value
        model.a_matrix_ = matrix
        self.highs = highspy.Highs()
        for name, setting in OPTIONS.items():
            self.highs.setOptionValue(name, setting)
        self.highs.passModel(model)

    def cheapest(self, costs: Sequence[Weighted]) -> tuple[int, ...]:
        """The columns that are 1 where the sum of the weighted costs is least, in order."""
        numpy = self.numpy
        total = sum(weight * sum(each) for weight, each in costs)
        scale = min(1.0, SCALE / total) if total else 1.0
        objective = self.zeros
        for weight, each in costs:
            objective = objective + numpy.asarray(each, dtype=numpy.float64) * float(weight)
        self.highs.changeColsCost(len(objective), self.every_column, numpy.rint(objective * scale))
        self.highs.run()
        values = numpy.asarray(self.highs.getSolution().col_value)
        self.is_cut = bool((abs(values - numpy.rint(values)) < 1e-6).all())
        if not self.is_cut:
            values = self._whole(numpy.ceil(values))
        return tuple((values > 0.5).nonzero()[0].tolist())

    def _whole(self, rounded: Any) -> Any:
        """The best whole choice by branch and bound, if views with further inputs make the relaxation fractional.
        Starts from rounding up, which keeps every clause satisfied."""
        highs, numpy = self.highs, self.numpy
        kinds = self.highspy.HighsVarType
        for kind in (kinds.kInteger, kinds.kContinuous):
            highs.changeColsIntegrality(
                len(rounded), self.every_column, numpy.full(len(rounded), int(kind), numpy.uint8)
            )
            if kind == kinds.kInteger:
                start = self.highspy.HighsSolution()
                start.col_value = rounded
                highs.setSolution(start)
                highs.run()
                rounded = numpy.rint(numpy.asarray(highs.getSolution().col_value))
        highs.clearSolver()
        return rounded

    def within(
        self,
        ticks: Sequence[int],
        sizes: Sequence[int],
        limits: Sequence[int],
        unlike: Sequence[tuple[int, int]],
    ) -> Iterator[tuple[int, ...]]:
        """The whole choices of least cost in so many bytes, by branch and bound. A pair of columns that are both 1 is
        one line more, which costs a little too. After it no other objective is asked for."""
        highs, numpy, count, infinite = self.highs, self.numpy, len(self.every_column), self.highspy.kHighsInf
        seconds, size = _UNITS / max(sum(ticks), 1), _UNITS / max(sum(sizes), 1)
        costs = numpy.rint(numpy.asarray(ticks, dtype=numpy.float64) * seconds)
        highs.changeColsCost(count, self.every_column, costs)
        kind = int(self.highspy.HighsVarType.kInteger)
        highs.changeColsIntegrality(count, self.every_column, numpy.full(count, kind, numpy.uint8))
        for at, pair in enumerate(unlike, count):
            highs.addCol(_LINE * _UNITS, 0.0, 1.0, 0, [], [])
            highs.addRow(-infinite, 1.0, 3, numpy.array([*pair, at]), numpy.array([1.0, 1.0, -1.0]))
        for name, setting in _WHOLE.items():
            highs.setOptionValue(name, setting)
        budget = len(self.every_row) + len(unlike)
        highs.addRow(-infinite, 0.0, count, self.every_column, numpy.ceil(numpy.asarray(sizes) * size))
        for limit in limits:
            highs.changeRowBounds(budget, -infinite, limit * size)
            highs.run()
            values = numpy.asarray(highs.getSolution().col_value)[:count]
            if len(values) and highs.getInfo().primal_solution_status == 2:
                yield tuple((values > 0.5).nonzero()[0].tolist())

    def narrow(self) -> None:
        """From now on choose only among what is as cheap as the last choice: what has a reduced cost stays at its
        bound, a clause that has a price stays an equation (complementary slackness)."""
        numpy, found = self.numpy, self.highs.getSolution()
        priced = abs(numpy.asarray(found.col_dual)) > 0.5
        values = numpy.rint(numpy.asarray(found.col_value))
        tight = abs(numpy.asarray(found.row_dual)) > 0.5
        self.lower, self.upper = numpy.where(priced, values, self.lower), numpy.where(priced, values, self.upper)
        self.most = numpy.where(tight, self.least, self.most)
        self._limit()

    def widen(self) -> None:
        """Allow all choices again."""
        self.lower, self.upper, self.most = self.zeros, self.ones, self.no_limit
        self._limit()

    def _limit(self) -> None:
        self.highs.changeColsBounds(len(self.lower), self.every_column, self.lower, self.upper)
        self.highs.changeRowsBounds(len(self.most), self.every_row, self.least, self.most)


TICKS = 45
"""Times are counted in ticks, 2**45 or 2**44 of them in the time of all that may be recomputed."""
STRAIGHT = 10**9
"""A point less than this share below the line between its neighbours is on it."""


@frozen
class Vertex:
    """A choice. Its bytes and its time, in ticks, are those of the columns that are 1."""

    bytes: int
    ticks: int
    columns: tuple[int, ...]


class Hull:
    """Between two points of the hull the price of a byte at which both are worth the same finds one below the line that
    joins them, or shows that there is none (Eisner and Severance, "Mathematical techniques for efficient record
    segmentation in large shared databases", Journal of the ACM 1976)."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.sizes: Sequence[int] = choices.sizes
        _, exponent = frexp(fsum(choices.seconds))
        self.ticks = [round(ldexp(each, TICKS - exponent)) for each in choices.seconds]
        rows = len(choices.facts)
        self.few = [2 * rows * (1 + (not size)) + row for row, size in zip(choices.rows, choices.sizes, strict=True)]
        self.relaxation = Relaxation(choices)

    def vertices(self) -> list[Vertex]:
        """From the most bytes to the fewest."""
        found = [self._best([(1, self.ticks)], [(1, self.sizes)])]
        ahead = [self._best([(1, self.sizes)], [(1, self.ticks)])]
        while ahead:
            here, there = found[-1], ahead[-1]
            freed, paid = here.bytes - there.bytes, there.ticks - here.ticks
            if freed <= 0:
                ahead.pop()
                continue
            if paid <= 0:
                found[-1] = ahead.pop()
                continue
            price = [(freed, self.ticks), (paid, self.sizes)]
            between = self._vertex(self.relaxation.cheapest(price))
            if not self._is_below(here, between, there):
                found.append(ahead.pop())
                continue
            best = self._best(price, [(1, self.sizes)])
            ahead.append(best if self._is_below(here, best, there) else between)
        return found

    def _is_below(self, here: Vertex, between: Vertex, there: Vertex) -> bool:
        freed, paid = here.bytes - there.bytes, there.ticks - here.ticks
        below = freed * (here.ticks - between.ticks) + paid * (here.bytes - between.bytes)
        return there.bytes <= between.bytes <= here.bytes and below * STRAIGHT > freed * paid

    def _vertex(self, columns: tuple[int, ...]) -> Vertex:
        return Vertex(sum(self.sizes[each] for each in columns), sum(self.ticks[each] for each in columns), columns)

    def _best(self, *costs: list[Weighted]) -> Vertex:
        """The least of the first costs, of those the least of the next; of equals the one with few and early parts."""
        relaxation = self.relaxation
        columns: tuple[int, ...] = ()
        few: list[Weighted] = [(1, self.few)]
        for each in (*costs, few):
            columns = relaxation.cheapest(each)
            if not relaxation.is_cut:
                break
            relaxation.narrow()
        relaxation.widen()
        return self._vertex(columns)


@frozen(eq=False)
class HullPoint:
    """From the most bytes, where nothing is recomputed that takes time, to the fewest."""

    saved: int
    """Bytes kept on the device for the backward, as planning counts them."""
    seconds: float
    """Seconds of recomputation."""
    kept: frozenset[int] = field(repr=False)
    """Producers whose value is saved."""
    recomputed: frozenset[int] = field(repr=False)
    """Producers that are recomputed, views of recomputed values among them."""


def lower_hull(
    facts: Facts,
    times: NodeTimes,
    capabilities: Capabilities,
    *,
    keep: Collection[int] = (),
    override: bool = False,
    blocks: BlockTable | None = None,
) -> tuple[HullPoint, ...]:
    """The lower hull over all choices that planning accepts: no safe choice is below it.

    ``keep``: nodes whose values are kept if the backward needs them, as by a rule that saves them. ``override``: the
    user's tags may be overridden. ``blocks``: of a path that runs one block at a time; it decides nothing outside them.

    Raises:
        PolicyError: the solver is not installed.
    """
    return hull_of(choices_of(facts, times, capabilities, keep=keep, override=override, blocks=blocks))


def hull_of(choices: Choices) -> tuple[HullPoint, ...]:
    """The lower hull of a problem."""
    if not choices.rows:
        return (_point(choices, ()),)
    return tuple(_point(choices, vertex.columns) for vertex in Hull(choices).vertices())


def written_points(
    choices: Choices, classes: Sequence[int], count: int, beside: Sequence[tuple[int, int]] = ()
) -> tuple[list[HullPoint], list[HullPoint]]:
    """The points of the lower hull over choices of whole classes, and the best such choices at so many numbers of bytes
    in between. They are what rules can say; of classes ``beside`` each other, one rule says both that are alike."""
    together, column_of = merged(choices, classes)
    if not together.rows:
        return [_point(choices, ())], []
    hull = Hull(together)
    found = hull.vertices()
    low, high = found[-1].bytes, found[0].bytes
    limits = [low + (high - low) * (step + 1) // (count + 1) for step in range(count)]
    columns_of: dict[int, tuple[list[int], list[int]]] = {}
    for column, (row, size) in enumerate(zip(together.rows, together.sizes, strict=True)):
        columns_of.setdefault(classes[row], ([], []))[not size].append(column)
    nothing = list[int](), list[int]()
    unlike = [
        (kept, runs)
        for pair in beside
        for one, other in (pair, pair[::-1])
        for kept in columns_of.get(one, nothing)[0]
        for runs in columns_of.get(other, nothing)[1]
    ]
    between = dict.fromkeys(hull.relaxation.within(hull.ticks, together.sizes, limits, unlike))

    def point(columns: Sequence[int]) -> HullPoint:
        on = set(columns)
        return _point(choices, [column for column, at in enumerate(column_of) if at in on])

    return [point(vertex.columns) for vertex in found], [point(columns) for columns in between]


def bound_at(hull: Sequence[HullPoint], saved: float) -> float:
    """The seconds of recomputation that no choice goes below which keeps at most so many bytes: straight between two
    points of the hull. Infinite below what must be kept."""
    after = bisect_left(hull, -saved, key=lambda point: -point.saved)  # the first that keeps no more
    if after == len(hull):
        return inf
    there = hull[after]
    if after == 0 or there.saved == saved:
        return there.seconds
    here = hull[after - 1]
    return here.seconds + (there.seconds - here.seconds) * (here.saved - saved) / (here.saved - there.saved)


def _point(choices: Choices, columns: Sequence[int]) -> HullPoint:
    """A choice, and what planning makes of it: the walk of :func:`policylang.planning.liveness.backward_needs`."""
    facts = choices.facts
    decided = again_of(choices, columns)
    needed = bytearray(len(facts))
    for row in choices.read:
        needed[row] = 1
    kept: set[int] = set()
    again: set[int] = set()
    forward, flags, owners, inputs = facts.forward_mask, facts.flags, facts.owners, facts.inputs
    for row in reversed(facts.forward):
        if not needed[row] or flags[row] & Flag.SYMBOLIC:
            continue
        owner = owners[row]
        if decided[owner]:
            again.add(owner)
            for source in inputs[row]:
                needed[source] |= forward[source]
        elif owner not in choices.moved:
            kept.add(owner)
    return HullPoint(
        saved=sum(choices.sizes[column] for column in columns),
        seconds=fsum(choices.seconds[column] for column in columns),
        kept=frozenset(kept),
        recomputed=frozenset(again),
    )


def again_of(choices: Choices, columns: Sequence[int]) -> bytearray:
    """By producer, 1 if the decision is *recompute*; for a view, if its base is not kept."""
    facts, keeps, runs = choices.facts, choices.keeps, choices.runs
    roots = facts.storage_roots
    chosen = bytearray(len(choices.rows))
    for column in columns:
        chosen[column] = 1
    decided = bytearray(len(facts))
    for row in facts.forward:
        owner, fixed = facts.owners[row], choices.fixed[facts.owners[row]]
        if fixed:
            decided[owner] = fixed == MUST_RUN
        elif choices.same_as[row] != row:
            keep = keeps[roots[row]]
            decided[owner] |= keep == NONE or not chosen[keep]
        elif runs[owner] != NONE:
            decided[owner] |= chosen[runs[owner]]
    return decided
