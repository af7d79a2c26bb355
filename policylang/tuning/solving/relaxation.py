"""The choices as a linear program, and its optimum for any price of a byte.

Minimise seconds + price × bytes with every column between 0 and 1. Each memory stands between the one operator that
makes it and those that read it: the matrix is that of a minimum cut (Picard, "Maximal closure of a graph and
applications to combinatorial problems", Management Science 1976), totally unimodular, so that every vertex is 0 or 1.
The exception are views that run again from more than the memory they look into: halves are then made whole by branch
and bound.

Costs are scaled to whole numbers that add up to less than 2**50. All that the simplex method then works out of them, by
pivots of 1 and -1, is whole and exact in a double, and comes out alike on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policylang.errors import PolicyError
from policylang.language.diagnostics import diagnose
from policylang.tuning.solving.choices import Choices
from policylang.tuning.solving.second_runs import NONE

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
    # What keeps whole numbers whole.
    "simplex_scale_strategy": 0,
    "dual_simplex_cost_perturbation_multiplier": 0.0,
    "primal_simplex_bound_perturbation_multiplier": 0.0,
    "mip_rel_gap": 0.0,
    "mip_max_nodes": 1000,
}


class Relaxation:
    """The linear program. It keeps the last basis: the next objective starts from there."""

    def __init__(self, choices: Choices) -> None:
        import numpy

        highspy = solver()
        self.numpy, self.highspy = numpy, highspy
        self.is_cut = True
        """Whether the last choice came out of the relaxation alone."""
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
        """The best of all whole choices, where views that need more than the memory they look into have the relaxation
        choose halves: by branch and bound, from what rounding up comes to. A clause that holds, holds rounded up."""
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
        """Choose among everything again."""
        self.lower, self.upper, self.most = self.zeros, self.ones, self.no_limit
        self._limit()

    def _limit(self) -> None:
        self.highs.changeColsBounds(len(self.lower), self.every_column, self.lower, self.upper)
        self.highs.changeRowsBounds(len(self.most), self.every_row, self.least, self.most)
