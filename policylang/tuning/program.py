"""The integer program of a graph's choices: the least seconds of recomputation in so many bytes kept.

One row of bytes joins the clauses of :mod:`policylang.tuning.choices`. Without that row the matrix is that of a minimum
cut (Picard, "Maximal closure of a graph and applications to combinatorial problems", Management Science 1976), which a
linear program solves in whole numbers: so branch and bound ends after few branches.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from math import inf
from typing import Any

from attrs import evolve

from policylang.errors import PolicyError
from policylang.language.diagnostics import diagnose
from policylang.tuning.choices import NONE, Choices, merged

_OPTIONS: dict[str, Any] = {
    "output_flag": False,
    "threads": 1,
    "parallel": "off",
    "random_seed": 0,
    "mip_allow_restart": False,
    "mip_max_nodes": 5,
    "mip_rel_gap": 1e-3,
}
_UNITS = 1e6
"""All seconds, and all bytes, are so many: the solver's tolerances are absolute."""
_LINE = 5e-4
"""The share of all that may be recomputed that a line is worth."""
_STRAIGHT = 1e-6
"""A point less than this share below the line between its neighbours is on it."""
_PROBED = 10_000
"""Columns up to which the bound is solved after a presolve, which probes each of them, in time that grows faster than
their number, and with a search for a choice."""
_AT_ONCE: dict[str, Any] = {
    "mip_max_nodes": 1,
    "presolve": "off",
    "mip_detect_symmetry": False,
    "mip_heuristic_run_feasibility_jump": False,
}
"""The options of larger programs."""
_TIE = 1e-7
"""The price of what costs nothing, beside that of what does."""


def solver() -> Any:
    """HiGHS.

    Raises:
        PolicyError: it is not installed.
    """
    try:
        import highspy
    except ImportError:
        message = "a policy is tuned with the solver HiGHS, and `highspy` is not installed"
        raise PolicyError([diagnose("APL619", message, help="install it with `pip install highspy`")]) from None
    return highspy


class Program:
    """The program for any number of bytes. ``unlike``: pairs of columns that are one more line where both are 1, which
    costs a little too."""

    def __init__(self, choices: Choices, unlike: Sequence[tuple[int, int]] = (), **options: Any) -> None:
        import numpy

        highspy = solver()
        self._numpy, self._highspy, self.choices = numpy, highspy, choices
        columns = len(choices.rows)
        self._seconds = max(sum(choices.seconds), 1e-300) / _UNITS
        self._bytes = max(sum(choices.sizes), 1) / _UNITS
        self._sizes = numpy.asarray(choices.sizes, dtype=numpy.float64) / self._bytes
        self._costs = numpy.asarray([*choices.seconds, *([0.0] * len(unlike))], dtype=numpy.float64) / self._seconds
        self._costs[columns:] = _LINE * _UNITS
        pairs = [(one, other, at) for at, (one, other) in enumerate(unlike, columns)]
        rows = numpy.array([*choices.clauses, *pairs], dtype=numpy.int64).reshape(-1, 3)
        there, is_clause = rows != NONE, numpy.arange(len(rows)) < len(choices.clauses)
        least = numpy.where(is_clause, rows[:, 2] == NONE, -inf)
        sized = self._sizes.nonzero()[0]
        model, count = highspy.HighsLp(), len(self._costs)
        model.num_col_, model.num_row_ = count, len(rows) + 1
        model.col_cost_, model.col_lower_, model.col_upper_ = self._costs, numpy.zeros(count), numpy.ones(count)
        model.row_lower_, model.row_upper_ = [*least, -inf], [*numpy.where(is_clause, inf, 1.0), inf]
        matrix = model.a_matrix_
        matrix.format_ = highspy.MatrixFormat.kRowwise
        matrix.start_ = numpy.cumsum([0, *there.sum(axis=1), len(sized)])
        matrix.index_ = [*rows[there], *sized]
        matrix.value_ = [*numpy.broadcast_to([1.0, 1.0, -1.0], rows.shape)[there], *self._sizes[sized]]
        model.a_matrix_, model.integrality_ = matrix, [highspy.HighsVarType.kInteger] * count
        self._limit_row = len(rows)
        self._highs = highspy.Highs()
        for name, setting in {**_OPTIONS, **options}.items():
            self._highs.setOptionValue(name, setting)
        self._highs.passModel(model)

    def within(self, limit: float) -> tuple[int, ...] | None:
        """The columns that are 1 in a choice of least time among those that keep at most so many bytes, without what
        keeps bytes for nothing; None where there is none."""
        return self._cheapest(1.0, 0.0, limit)

    def bound(self, limit: float) -> float:
        """Seconds that no choice goes below that keeps at most so many bytes: the solver's dual bound on the integer
        program, which is the optimum's own time where branch and bound ends; infinite where no choice keeps as few."""
        self._run(self._costs, limit)
        if self._highs.getModelStatus() == self._highspy.HighsModelStatus.kInfeasible:
            return inf
        return max(float(self._highs.getInfo().mip_dual_bound), 0.0) * self._seconds

    def vertices(self) -> list[tuple[int, ...]]:
        """The choices on the lower hull of seconds against bytes, from the fewest bytes to the most. Between two of
        them the price of a byte at which both are worth the same finds one below their line, or shows that there is
        none (Eisner and Severance, "Mathematical techniques for efficient record segmentation in large shared
        databases", Journal of the ACM 1976)."""
        found, ahead = [self._at(0.0, 1.0)], [self._at(1.0, 0.0)]
        while ahead:
            (size, seconds, _), (more, less, _) = here, there = found[-1], ahead[-1]
            between = self._at(more - size, seconds - less)
            freed = (more - size) * (seconds - between[1]) - (seconds - less) * (between[0] - size)
            if freed > _STRAIGHT * (more - size) * (seconds - less) and here[0] < between[0] < there[0]:
                ahead.append(between)
            else:
                found.append(ahead.pop())
        return [columns for _, _, columns in found]

    def _at(self, time: float, size: float) -> tuple[float, float, tuple[int, ...]]:
        scale = max(time, size) or 1.0  # there may be nothing between two that are one
        columns = self._cheapest(time / scale, size / scale, inf) or ()
        return float(self._sizes[[*columns]].sum()), float(self._costs[[*columns]].sum()), columns

    def _cheapest(self, time: float, size: float, limit: float) -> tuple[int, ...] | None:
        """The least of seconds and bytes at these prices, of equals the one with less of both."""
        costs, count = self._costs * (time + _TIE), len(self._sizes)
        costs[:count] += self._sizes * (size + _TIE)
        self._run(costs, limit)
        values = self._numpy.asarray(self._highs.getSolution().col_value)[:count]
        if not len(values) or self._highs.getInfo().primal_solution_status != 2:
            return None
        return tuple((values > 0.5).nonzero()[0].tolist())

    def _run(self, costs: Any, limit: float) -> None:
        numpy, highs = self._numpy, self._highs
        highs.changeColsCost(len(costs), numpy.arange(len(costs), dtype=numpy.int32), costs)
        highs.changeRowBounds(self._limit_row, -inf, limit / self._bytes)
        highs.run()


def bound_of(choices: Choices, limit: float) -> float:
    """:meth:`Program.bound` of all single values, from the first nodes of branch and bound: where whole blocks keep an
    attention or none of it, the first node alone may be a tenth too low. No choice has to be found."""
    at_once = {} if len(choices.rows) <= _PROBED else _AT_ONCE
    return Program(choices, mip_heuristic_effort=0.0, **at_once).bound(limit) if choices.rows else 0.0


def whole_classes(
    choices: Choices,
    classes: Sequence[int],
    count: int,
    beside: Sequence[tuple[int, int]] = (),
    free: Set[int] = frozenset(),
) -> list[tuple[Set[int], Set[int]]]:
    """The choices of whole classes, which rules can say: those of the lower hull, then the best in so many numbers of
    bytes between the fewest and the most. Each is two sets of classes, those kept and those recomputed; the backward
    asks for no others. Of classes ``beside`` each other, one rule says both that are alike; those that are ``free``
    take no memory if they are kept."""
    together = merged(choices, classes)
    if not together.rows:
        return [(frozenset(), frozenset())]
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
    sizes = [0 if classes[row] in free else size for row, size in zip(together.rows, together.sizes, strict=True)]
    program = Program(evolve(together, sizes=sizes), unlike)
    hull = program.vertices()
    low, high = (sum(sizes[column] for column in each) for each in (hull[0], hull[-1]))
    between = (program.within(low + (high - low) * step / (count + 1)) for step in range(1, count + 1))
    found = dict.fromkeys((*hull, *(each for each in between if each is not None)))
    at, is_kept = [classes[row] for row in together.rows], list(map(bool, together.sizes))
    return [
        ({at[each] for each in columns if is_kept[each]}, {at[each] for each in columns if not is_kept[each]})
        for columns in found
    ]
