"""From a budget to a policy. The candidates depend on graph and device; the budget only selects one.

Candidates are composed of the figures of patterns, and planned one at a time, the fastest first, so that few are: the
search ends where the next is composed to cost more than the best planned one costs. What candidates alike take more
than composed is learned on the way. The best of all planned ones is chosen by its simulated figures alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain, islice
from math import inf
from typing import Literal

from policylang.graph.blocks import blocks_of
from policylang.graph.facts import Facts
from policylang.planning.capabilities import Capabilities
from policylang.simulation.node_times import NodeTimes
from policylang.tuning.candidates import Candidates, SearchSpace, bundled_texts, stacks, texts_by_hand
from policylang.tuning.evaluation import Besides, Budget, Candidate, Evaluation, Infeasible, Tuned
from policylang.tuning.refinement import WORTH

Progress = Callable[[str], None]
Detail = Literal["all", "rules", "figures", "patterns"]
"""The search works out the neighbours and the bound as well; the rules alone; or their figures, and keeps lines that
change nothing; or the figures without further rules."""
NOTHING_BESIDES = Besides()
_ROWS = 48
_OTHERS = 60_000
"""Nodes that are planned in any case, in whole graphs."""
_FURTHER, _STARTS, _TRIED = 100_000, 3, 3
"""Nodes that are planned to find further rules, in whole graphs; the patterns that they are found for, and how many
texts in a row may be no better."""
_NEIGHBOURS = 12
"""Candidates that are planned for a neighbour of the chosen one."""
_LOW = 1.1
"""Up to so many times the least composed bytes, the smallest candidate counts with its simulated figures."""
_NOTICED = 1e-4
"""The share of the peak, of the step and of the forward's time below which a line changes nothing that counts."""
_MAY_BE_IDLE = 0.01
"""The share of the peak above which no line is tried: much of what it decides may be needed by nobody."""
_MISSES = 4
"""Candidates of hardly differing composed bytes that are planned before the search for the smallest gives up."""
_ALIKE = 3
"""Alike candidates in a row that take more than composed: the next is expected to exceed it by the least of them."""
_SAME = 1e-9
"""The share of the forward's time by which two sums of the same times may differ."""


class Tuner:
    """The candidates of one graph on one device, for any number of budgets."""

    def __init__(
        self,
        facts: Facts,
        times: NodeTimes,
        capabilities: Capabilities,
        *,
        besides: Besides = NOTHING_BESIDES,
        offload: bool = False,
        progress: Progress | None = None,
    ) -> None:
        self.facts = facts
        self.times = times
        self.capabilities = capabilities
        self.besides = besides
        self.offload = offload and capabilities.offloads
        self.override = any(facts.user_tags) and not capabilities.block_by_block
        self.forward = sum(times.seconds[row] for row in facts.forward)
        self._say = progress or (lambda _: None)
        self.evaluation = Evaluation(facts, times, capabilities)
        found = [stacks(facts)]
        if capabilities.block_by_block and found[0][0]:  # blocks are what is checkpointed: larger ones may be better
            found.append(("", blocks_of(facts)))
        self.spaces = tuple(
            SearchSpace(
                *(facts, times, capabilities, self.evaluation.operators, besides, glob, blocks),
                offload=self.offload,
                override=self.override,
                say=self._say,
            )
            for glob, blocks in found
        )
        """One for each ``blocks`` statement, that of the innermost blocks first."""
        saved = self.evaluation.of("override save everything\n" if self.override else "save everything\n")
        self.save_all = saved or (None if facts.forward else self.evaluation.without_rules())
        self._tried: dict[tuple[str, Budget], str] = {}
        """What further rules made of what was chosen before."""

    def bound(self, saved: int) -> float:
        """Seconds of recomputation that no choice of values goes below that keeps at most so many bytes."""
        self._say("solving for the bound")
        return min(each.bound(saved, self.save_all) for each in self.spaces)

    def candidates(self, budget: Budget) -> list[Candidates]:
        """The candidates for a budget, of each space."""
        return [each.candidates(budget) for each in self.spaces]

    @property
    def _others(self) -> tuple[Candidate, ...]:
        """Candidates that are planned in any case: as many as the size of the graph leaves time for."""
        before, found = "override " if self.override else "", []
        for space in self.spaces:
            texts = texts_by_hand(self.facts, space.composition.count, space.head)
            for text in islice(texts, _OTHERS // max(len(self.facts), 1)):
                lines = text.splitlines(keepends=True)
                said = (line if "->" in line or line == space.head else before + line for line in lines)
                found.append(self.evaluation.of("".join(said)))
        return tuple(each for each in found if each is not None)

    def _plan_bundled(self) -> None:
        """Plan the policies that come along: none of them that fits beats what is chosen."""
        for alone, *rests in bundled_texts():
            if self.evaluation.of(alone) is None and alone not in self.evaluation.errors:
                for text in rests:
                    self.evaluation.of(text)

    def tuned(self, budget: Budget, *, table: bool = False, detail: Detail = "all") -> Tuned | Infeasible:
        """The fastest candidate within a budget of memory, or the smallest within one of time: no candidate planned
        before it beats it.

        With ``table``, or without a limit, the table has about fifty rows over the whole range; else the candidates
        planned so far.
        """
        self.evaluation.afresh()
        if table or budget.limit == inf:  # plan candidates over the whole range of memory
            composed = [memory for each in self.candidates(budget) for memory in each.memory]
            low, high = min(composed), max(composed)
            for step in range(_ROWS):
                self._at(budget, low + (high - low) * step / (_ROWS - 1))
        first = self._picked(budget) or self.smallest(budget)
        if first is not self.save_all:
            self._plan_bundled()
        while True:
            chosen, known = self._unbeaten(budget, first), len(self._evaluated)
            if chosen is None:
                smallest = min(
                    (self.smallest(budget), *self._evaluated), key=lambda each: self.besides.memory(each, budget)
                )
                return Infeasible(budget, self.besides, smallest)
            less = more = None
            if detail == "all":
                memory = self.besides.memory(chosen, budget)
                less, more = (self._fastest(budget, share * memory) for share in (0.92, 1.08))
            if known == len(self._evaluated):  # else one of them may cost less than its composed figures, and fit
                break
        if more is not None and more.price >= chosen.price:
            more = None
        chosen = chosen if detail == "patterns" else self._refined(chosen, budget)
        rows = undominated(self._evaluated, lambda each: self.besides.memory(each, budget))
        written = chosen if detail in ("figures", "patterns") else self._without_idle_lines(chosen, budget)
        return Tuned(
            budget=budget,
            besides=self.besides,
            chosen=written,
            less=less,
            more=more,
            table=tuple(written if each is chosen else each for each in rows),
            bound=self.bound(chosen.saved + (chosen.offloaded if self.offload else 0)) if detail == "all" else None,
            forward=self.forward,
        )

    def _refined(self, chosen: Candidate, budget: Budget) -> Candidate:
        """The best of what further rules make of it, and of the patterns nearest the budget in all blocks."""
        if budget.figure == "recompute time" or not chosen.price or self.offload:
            return chosen
        if (key := (chosen.rules, budget)) in self._tried:
            return self.evaluation.of(self._tried[key]) or chosen
        best, counted = chosen, self.evaluation.asked()
        own = next((each for each in self.spaces if chosen.rules.startswith(each.head)), None)
        for space in self.spaces:
            best = self._refined_in(space, chosen if space is own else None, best, budget)
        self.evaluation.afresh(counted)  # rules that are not worth a line beat nothing
        self._tried[key] = best.rules
        return self.evaluation.of(best.rules) or best

    def _refined_in(self, space: SearchSpace, chosen: Candidate | None, best: Candidate, budget: Budget) -> Candidate:
        mixed, left = space.candidates(budget), _FURTHER // max(len(self.facts), 1)
        patterns = sorted(range(len(mixed.patterns)), key=lambda at: abs(mixed.memory[at] - budget.limit))
        for first in chain([chosen], (self._candidate(mixed, at) for at in patterns[:_STARTS] if left > 0)):
            start = first
            while start is not None and left > 0 and "include" not in start.rules:
                made, room = self.evaluation.planned(start.rules), budget.limit - self.besides.memory(start, budget)
                assert made is not None, "a candidate is a policy against which nothing is to be said"
                texts = space.refinement.texts(start.rules, made, room * (1 - self.besides.reserve))
                least, start, left = start.price if room >= 0 else inf, None, left - 1
                for text in texts[:_TRIED]:
                    other, left = self.evaluation.of(text), left - 1
                    if other is not None and self._fits(other, budget) and other.price < least:
                        start, best = other, other if other.price < (1 - WORTH) * best.price else best
                        break
        return best

    def _without_idle_lines(self, chosen: Candidate, budget: Budget) -> Candidate:
        """Fewer lines within the budget: without those that decide little memory and without which the step takes no
        longer, or hardly. The last line first: a line may need the ones above it."""
        if chosen.rules.startswith("include"):
            return chosen
        lines, made = chosen.rules.splitlines(keepends=True), self.evaluation.planned(chosen.rules)
        rules = [line for line in lines if "->" not in line and not line.startswith("blocks ")]
        found, least, facts = chosen, _NOTICED * chosen.peak, self.facts
        for line, outcome in reversed(tuple(zip(rules, made.rules if made is not None else (), strict=False))):
            size = sum(facts.bytes[row] for row in outcome.decided if facts.storage_roots[row] == row)
            if size >= _MAY_BE_IDLE * chosen.peak:
                continue
            other = self.evaluation.of("".join(each for each in found.rules.splitlines(keepends=True) if each != line))
            if other is None or not self._fits(other, budget) or other.step / found.step - 1 >= _NOTICED:
                continue
            more = max(getattr(other, name) - getattr(found, name) for name in ("peak", "saved", "offloaded"))
            if (more < least or other.price <= found.price) and other.price - found.price < _NOTICED * self.forward:
                found = other
        return found

    def _fits(self, each: Candidate, budget: Budget) -> bool:
        if budget.figure == "recompute time":
            return each.price <= budget.limit * self.forward
        return self.besides.memory(each, budget) <= budget.limit

    @property
    def _evaluated(self) -> tuple[Candidate, ...]:
        """The candidates that were planned for a budget."""
        return (*((self.save_all,) if self.save_all is not None else ()), *self.evaluation.evaluated)

    def _unbeaten(self, budget: Budget, first: Candidate) -> Candidate | None:
        """The best planned candidate for the budget: ``first`` unless another beats it."""
        if budget.figure != "recompute time":
            return self._fastest_of((first, *self._evaluated), budget, budget.limit)
        found = [each for each in (first, *self._evaluated) if self._fits(each, budget)]
        return min(found, key=lambda each: (self.besides.memory(each, budget), each.price), default=None)

    def _fastest(self, budget: Budget, limit: float) -> Candidate | None:
        found = self._at(budget, limit, most=_NEIGHBOURS)
        return self._fastest_of(self._evaluated if found is None else (found, *self._evaluated), budget, limit)

    def _fastest_of(self, found: Iterable[Candidate], budget: Budget, limit: float) -> Candidate | None:
        """The fastest candidate within the limit; of equals the one with the least memory."""
        fitting = [each for each in found if self.besides.memory(each, budget) <= limit]
        most = min((each.price for each in fitting), default=0.0) + _SAME * self.forward
        fastest = (each for each in fitting if each.price <= most)
        return min(fastest, key=lambda each: self.besides.memory(each, budget), default=None)

    def smallest(self, budget: Budget) -> Candidate:
        """The candidate that takes the least memory."""
        found = self._cheapest(budget, inf)
        if found is not None:
            return found
        known = self._evaluated or (self.evaluation.without_rules(),)
        return min(known, key=lambda each: self.besides.memory(each, budget))

    def _picked(self, budget: Budget) -> Candidate | None:
        if budget.figure == "recompute time":
            return self._cheapest(budget, budget.limit * self.forward)
        return self._at(budget, budget.limit)

    def _at(self, budget: Budget, limit: float, *, most: float = inf) -> Candidate | None:
        """The fastest candidate in so much memory, of the first ``most`` that are planned."""
        if self.save_all is not None and self.besides.memory(self.save_all, budget) <= limit:
            return self.save_all
        found, known = self.candidates(budget), list(self._others)
        if limit < _LOW * min(min(each.memory) for each in found):  # composed figures may be above simulated ones
            known.append(self.smallest(budget))
        known = [each for each in known if self.besides.memory(each, budget) <= limit]
        best = min(known, key=lambda each: each.price, default=None)
        for chosen in found:
            best = self._faster(chosen, budget, limit, best, most)
        return best

    def _faster(
        self, chosen: Candidates, budget: Budget, limit: float, best: Candidate | None, most: float
    ) -> Candidate | None:
        memory, same = chosen.memory, _SAME * self.forward
        above: dict[tuple[int, ...], deque[int]] = {}  # how much more than composed the last of a kind took
        for at in chosen.by_time:
            if most <= 0 or (best is not None and chosen.seconds[at] >= best.price - same):
                break
            if memory[at] > limit:
                continue
            last = above.setdefault(chosen.likeness(at), deque(maxlen=_ALIKE))
            more = min(last) if len(last) == _ALIKE else 0
            made = self._candidate(chosen, at) if memory[at] + more <= limit else None
            if made is not None:
                last.append(self.besides.memory(made, budget) - memory[at])
                most -= 1
                if self.besides.memory(made, budget) <= limit and (best is None or made.price < best.price):
                    best = made
        return best

    def _cheapest(self, budget: Budget, limit: float) -> Candidate | None:
        """The candidate that takes the least memory in so much time."""
        known = (each for each in (self.save_all, *self._others) if each is not None and each.price <= limit)
        best = min(known, key=lambda each: self.besides.memory(each, budget), default=None)
        for chosen in self.candidates(budget):
            best = self._smaller(chosen, budget, limit, best)
        return best

    def _smaller(self, chosen: Candidates, budget: Budget, limit: float, best: Candidate | None) -> Candidate | None:
        memory, tied, misses = chosen.memory, 0.0, 0
        for at in chosen.by_memory:
            least = inf if best is None else self.besides.memory(best, budget)
            if memory[at] + chosen.slack >= least or (best is not None and self._is_least(best, budget)):
                break
            if memory[at] > tied:
                tied, misses = (1 + _NOTICED) * memory[at], 0
            worth = misses < _MISSES and chosen.seconds[at] <= limit
            made = self._candidate(chosen, at) if worth else None
            if made is not None and made.price <= limit:
                misses += self.besides.memory(made, budget) >= least
                best = made if self.besides.memory(made, budget) < least else best
        return best

    def _is_least(self, each: Candidate, budget: Budget) -> bool:
        """No other takes noticeably less memory."""
        return budget.figure != "saved" and each.peak <= (1 + _NOTICED) * each.least_peak

    def _candidate(self, chosen: Candidates, at: int) -> Candidate | None:
        """A candidate's simulated figures; None if it cannot be written."""
        text = chosen.text(at)
        return None if text is None else self.evaluation.of(text)


def undominated(found: Iterable[Candidate], memory: Callable[[Candidate], int]) -> list[Candidate]:
    """The candidates that no other beats in both memory and time, by rising memory."""
    kept: list[Candidate] = []
    for each in sorted(found, key=lambda each: (memory(each), each.price, len(each.rules), each.rules)):
        if not kept or each.price < kept[-1].price:
            kept.append(each)
    return kept
