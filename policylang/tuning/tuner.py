"""From a budget to a policy. The set of candidates is fixed for a graph and a device, and the budget only picks.

So more memory never costs time: what fits a budget fits every larger one. A candidate counts with what its text comes
to when it is planned and simulated, and with what was composed for it where that is more; it is planned when it is its
turn, the fastest first, so that few are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from policylang.graph.blocks import blocks_of
from policylang.graph.facts import Facts
from policylang.planning.capabilities import Capabilities
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.composition import Composition, Floats, Ints, Pieces
from policylang.tuning.evaluation import Evaluation
from policylang.tuning.lower_hull import HullPoint, bound_at, lower_hull
from policylang.tuning.patterns import Fates, by_hand, of_choice
from policylang.tuning.phrases import Vocabulary
from policylang.tuning.prospects import Writer, prospects
from policylang.tuning.trade_off import Besides, Budget, Candidate, Infeasible, Tuned
from policylang.tuning.value_classes import value_classes

Progress = Callable[[str], None]
_ROWS = 48
_SAME = 1e-9
"""The share of the forward's time by which two sums of the same times may differ."""


def tune(
    facts: Facts,
    times: NodeTimes,
    budget: Budget,
    capabilities: Capabilities,
    *,
    besides: Besides = Besides(),
    offload: bool = False,
    table: bool = False,
    progress: Progress | None = None,
) -> Tuned | Infeasible:
    """The fastest candidate within the budget; of a budget of time the one that takes the least memory.

    With ``table`` the table has about fifty rows over the whole range; else what was planned on the way.
    """
    tuner = Tuner(facts, times, capabilities, besides=besides, offload=offload, progress=progress)
    return tuner.tuned(budget, table=table)


class Tuner:
    """The candidates of one graph on one device, for any number of budgets."""

    def __init__(
        self,
        facts: Facts,
        times: NodeTimes,
        capabilities: Capabilities,
        *,
        besides: Besides = Besides(),
        offload: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.besides = besides
        self.evaluation = Evaluation(facts, times, capabilities)
        self.forward = sum(times.seconds[row] for row in facts.forward)
        say = progress or (lambda _: None)
        classes = value_classes(facts, blocks_of(facts), capabilities)
        override = any(facts.user_tags)
        operators = self.evaluation.operators
        inside = Vocabulary(facts, classes, operators, inside=True)
        outside = Vocabulary(facts, classes, operators, inside=False)
        composition = Composition(facts, times, classes)
        say("solving for the bound")
        crossing = [row for number in sorted(classes.crossing) for row in classes.rows[number]]
        self.hull: tuple[HullPoint, ...] = lower_hull(facts, times, capabilities, override=override)
        hulls = [self.hull]
        if crossing:
            hulls.append(lower_hull(facts, times, capabilities, keep=crossing, override=override))
        found = [of_choice(facts, classes, point.kept, point.again) for hull in hulls for point in hull]
        found += by_hand(classes, inside, outside)
        say("simulating patterns")
        simulated: dict[Fates, Pieces] = {}
        for fates in dict.fromkeys(found):
            pieces = composition.pieces(fates)
            simulated.setdefault(pieces.asked, pieces)
        self.blocks = composition.count
        self.prospects = prospects(composition, tuple(simulated.values()))
        self.writer = Writer(tuple(simulated), inside, outside, override=override)
        self.save_all = self.evaluation.of("override save everything\n" if override else "save everything\n")

    def tuned(self, budget: Budget, *, table: bool = False) -> Tuned | Infeasible:
        """The choice for one budget."""
        chosen = self._picked(budget)
        if chosen is None:
            return Infeasible(budget, self.besides, self.smallest(budget))
        memory = self.memory(chosen, budget)
        less = self._at(budget, 0.92 * memory)
        more = self._at(budget, 1.08 * memory) if chosen is not self.save_all else None
        if more is not None and more.recompute >= chosen.recompute:
            more = None
        if table:
            self._fill(budget)
        rows = undominated(self.evaluation.evaluated, lambda each: self.memory(each, budget))
        return Tuned(
            budget=budget,
            besides=self.besides,
            chosen=chosen,
            less=less,
            more=more,
            table=tuple(rows),
            bound=bound_at(self.hull, chosen.saved),
            forward=self.forward,
        )

    def memory(self, each: Candidate, budget: Budget) -> int:
        """The memory that a budget is about."""
        return each.saved if budget.figure == "saved" else self.besides.on(each.peak)

    def smallest(self, budget: Budget) -> Candidate:
        """The candidate that takes the least memory."""
        found = self._cheapest(self._composed(budget), self.prospects.figures.recompute, budget, float("inf"))
        assert found is not None
        return found

    def _picked(self, budget: Budget) -> Candidate | None:
        if budget.figure == "recompute time":
            return self._cheapest(
                self._composed(budget), self.prospects.figures.recompute, budget, budget.limit * self.forward
            )
        return self._at(budget, budget.limit)

    def _composed(self, budget: Budget) -> Ints:
        figures = self.prospects.figures
        if budget.figure == "saved":
            return figures.saved
        return np.array([self.besides.on(int(each)) for each in figures.peak], dtype=np.int64)

    def _at(self, budget: Budget, limit: float) -> Candidate | None:
        """The fastest candidate in so much memory."""
        memory, seconds = self._composed(budget), self.prospects.figures.recompute
        same = _SAME * self.forward
        best: Candidate | None = None
        if self.save_all is not None and self.memory(self.save_all, budget) <= limit:
            return self.save_all
        for at in np.lexsort((memory, seconds)):
            if best is not None and seconds[at] >= best.recompute - same:
                break
            if memory[at] > limit:
                continue
            made = self._candidate(int(at))
            if made is None or made.recompute < seconds[at] - same or self.memory(made, budget) > limit:
                continue
            if best is None or made.recompute < best.recompute:
                best = made
        return best

    def _cheapest(self, memory: Ints, seconds: Floats, budget: Budget, limit: float) -> Candidate | None:
        """The candidate that takes the least memory in so much time."""
        best: Candidate | None = None
        for at in np.lexsort((seconds, memory)):
            if best is not None and memory[at] >= self.memory(best, budget):
                break
            if seconds[at] > limit:
                continue
            made = self._candidate(int(at))
            if made is None or made.recompute > limit:
                continue
            if best is None or self.memory(made, budget) < self.memory(best, budget):
                best = made
        return best

    def _candidate(self, at: int) -> Candidate | None:
        text = self.writer.text(self.prospects, at, self.blocks)
        return None if text is None else self.evaluation.of(text)

    def _fill(self, budget: Budget) -> None:
        """Plan candidates over the whole range of memory."""
        memory = self._composed(budget)
        low, high = int(memory.min()), int(memory.max())
        for step in range(_ROWS):
            self._at(budget, low + (high - low) * step / (_ROWS - 1))


def undominated(found: Iterable[Candidate], memory: Callable[[Candidate], int]) -> list[Candidate]:
    """Those that no other beats in both memory and time, by rising memory."""
    kept: list[Candidate] = []
    for each in sorted(found, key=lambda each: (memory(each), each.recompute, len(each.rules), each.rules)):
        if not kept or each.recompute < kept[-1].recompute:
            kept.append(each)
    return kept
