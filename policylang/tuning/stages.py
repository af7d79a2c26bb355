"""Tunes a pipeline: each stage follows the pattern that takes its rank the least time of those that fit there.

What a stage holds depends on its own pattern alone, since what crosses to another stage is held whatever the policy
says. So each pattern is planned once, in all stages. What it costs a microbatch in each stage is then put together: the
memory of each rank over its schedule, and the step. Patterns that hardly shorten the step give way to others, for fewer
lines. The text is planned as a whole, and its own figures count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, islice, product
from math import inf

from attrs import evolve

from policylang.graph.facts import Facts, GraphKind
from policylang.graph.stages import stages_of
from policylang.language.cancellation import collector_paused
from policylang.language.diagnostics import Diagnostic, Source, diagnose
from policylang.language.formatting import format_source
from policylang.language.shown import beside, format_quantity
from policylang.language.syntax import Pipeline
from policylang.planning.capabilities import Capabilities
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.pipelines import StageCosts, rank_peak, timetable, unfit
from policylang.simulation.node_times import NodeTimes, node_times
from policylang.tuning.budgets import INFEASIBLE
from policylang.tuning.candidates import Pattern, SearchSpace, stacks
from policylang.tuning.decision_list import Zone, scripts
from policylang.tuning.evaluation import (
    Allowed,
    Besides,
    Budget,
    Candidate,
    Evaluation,
    Tuned,
    TunedStages,
    edited,
    without_idle,
)
from policylang.tuning.tuner import Tuner

SLICED = "chunk loss into 8\n"
_WHOLE = (GraphKind.FLAT, GraphKind.JOINT)
_WORTH = 0.01
"""The share of the step that slices have to take off, since their sums round otherwise."""
_SAME = (1e-3, 1e-2, 5e-2, inf)
"""The share of the step that fewer lines may cost: the next one where no text of sixteen lines is found."""
_TEXTS = 3
"""Texts of one choice that are planned."""
Choice = tuple[int, ...]
"""The number of a pattern per stage."""


class StageTuner:
    """The policies of a graph of a whole model, on one device, in one pipeline."""

    def __init__(
        self,
        facts: Facts,
        times: NodeTimes,
        capabilities: Capabilities,
        pipeline: Pipeline,
        budget: Budget,
        besides: Besides,
        allowed: Allowed,
        *,
        shared: bool,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """``pipeline``: with its order. ``budget``: the peak of each rank. ``shared``: the optimizer's state in
        ``besides`` is the whole model's, of which each rank has that of its own parameters; else each has as much."""
        self.facts, self.times, self.capabilities, self.pipeline = facts, times, capabilities, pipeline
        self.budget, self.besides, self.allowed, self._shared = budget, besides, allowed, shared
        self._say = progress or (lambda _: None)
        self._evaluation = Evaluation(facts, times, capabilities)

    def best(self) -> Tuned | Diagnostic:
        """The policy of the shortest step whose ranks all fit, or the error where none do."""
        if (problem := unfit(self.pipeline, self.facts, stacks(self.facts)[1])) is not None:
            return problem
        found = self._tuned("")
        if self._may_slice(found) and (sliced := self._tuned(SLICED)) is not None:
            if found is None or not self._fits(found):
                found = min(filter(None, (found, sliced)), key=self._most)
            elif self._fits(sliced) and sliced.step < (1 - _WORTH) * found.step:
                found = sliced
        if found is None or not self._fits(found):
            return self._too_high(found)
        memory = found.memory(self.besides.reserve)
        rank = memory.index(max(memory))
        of_rank = [each for each in found.figures.stages if each.rank == rank]
        chosen = Candidate(
            rules=found.rules,
            peak=of_rank[0].peak,
            peak_at=f"rank {rank}",
            saved=sum(each.saved for each in of_rank),
            offloaded=found.offloaded,
            recompute=sum(each.recomputed_seconds or 0.0 for each in found.figures.stages),
            exposed=found.exposed,
            step=found.step,
        )
        forward = self.pipeline.microbatches * sum(self.times.seconds[row] for row in self.facts.forward)
        besides = evolve(self.besides, optimizer=found.state[rank])
        return Tuned(self.budget, besides, chosen, None, None, (chosen,), None, forward, found)

    def _may_slice(self, found: TunedStages | None) -> bool:
        """The loss can be cut, and there is time of recomputation that slices could spare."""
        if not self.allowed.chunk or not self.capabilities.rewrites or self.facts.kind not in _WHOLE:
            return False
        again = inf if found is None else max(each.recomputed_seconds or 0.0 for each in found.figures.stages)
        spares = found is None or not self._fits(found) or again > _WORTH * found.step
        return spares and edited(self.facts, SLICED, self.capabilities) is not self.facts

    def _too_high(self, found: TunedStages | None) -> Diagnostic:
        limit = format_quantity(int(self.budget.limit), "bytes")
        if found is None:
            return diagnose(INFEASIBLE, "no policy for stages can be written of this graph", help="tune a single step")
        memory = found.memory(self.besides.reserve)
        rank = memory.index(max(memory))
        smallest = beside(memory[rank], int(self.budget.limit), "bytes")
        own = ", ".join(str(each.stage) for each in found.figures.stages if each.rank == rank)
        message = f"no policy keeps rank {rank}, of stage {own}, within {limit}: the smallest takes {smallest}"
        help = "use fewer microbatches in flight, more stages, or shard the parameters over more ranks"
        return diagnose(INFEASIBLE, message, help=help)

    def _fits(self, each: TunedStages) -> bool:
        return self._most(each) <= self.budget.limit

    def _most(self, each: TunedStages) -> int:
        return max(each.memory(self.besides.reserve))

    def _tuned(self, before: str) -> TunedStages | None:
        """The best below these lines."""
        facts = edited(self.facts, before, self.capabilities)
        times = self.times if facts is self.facts else node_times(facts, self.times.device)
        offload, said = self.allowed.offload, self._say
        space = Tuner(facts, times, self.capabilities, besides=self.besides, offload=offload, progress=said).spaces[0]
        patterns, alike = list[Pattern](), list[TunedStages]()
        found = space.candidates(self.budget).patterns
        for number, pattern in enumerate(found, 1):
            self._say(f"planning pattern {number} of {len(found)} in all stages")
            text = next(_texts(space, pattern, (), pattern), None)
            if text is not None and (made := self._exact(before + text)) is not None:
                patterns.append(pattern)
                alike.append(made)
        best = min(filter(self._fits, alike), key=lambda each: each.step, default=None)
        costs = [each.costs for each in alike]
        for share in _SAME if alike else ():
            choice = self._fewer(costs, share)
            if choice is None:
                break
            self._say("writing the policy")
            texts = islice(self._written(space, patterns, choice), _TEXTS)
            exact = (self._exact(before + text) for text in texts)
            if fitting := [each for each in exact if each is not None and self._fits(each)]:
                shortest = min(fitting, key=lambda each: (each.step, each.rules.count("\n"), each.rules))
                made = self._shorter(shortest)
                if best is None or made.step < best.step:
                    return evolve(made, alike=best)
        return min(alike, key=self._most, default=None) if best is None else evolve(best, alike=best)

    def _exact(self, text: str) -> TunedStages | None:
        """The policy of a text, planned as a whole, without lines that change nothing; None if there is anything to say
        against it."""
        if (formatted := format_source(Source("<tuned>", text)).text) is None:
            return None
        with collector_paused():
            made = self._evaluation.planned_or_refused(formatted, self.pipeline)
        if isinstance(made, list):
            kept = without_idle(formatted, made)
            return None if kept is None else self._exact(kept)
        figures, costs = made.pipeline, made.stage_costs
        assert figures is not None
        assert costs is not None
        assert made.step_time is not None
        moved = saved_and_recomputed(made).offloaded_bytes
        exposed = self.pipeline.microbatches * made.step_time.exposed
        return TunedStages(formatted, self.pipeline, figures, costs, self._state(costs), moved, exposed)

    def _state(self, costs: Sequence[StageCosts]) -> tuple[int, ...]:
        size, ranks = self.besides.optimizer, self.pipeline.order
        if not self._shared:
            return (size,) * len(ranks)
        whole = max(sum(each.gradients for each in costs), 1)
        own = ({stage for _, stage, _ in actions} for actions in ranks)
        return tuple(size * sum(costs[stage].gradients for stage in stages) // whole for stages in own)

    # --- which pattern in which stage ---

    def _fewer(self, costs: Sequence[Sequence[StageCosts]], share: float) -> Choice | None:
        """The fastest choice that fits, with as few patterns as cost so much of the step; None where none fits.
        ``costs``: by pattern and stage."""
        choice = self._fastest(costs)
        if choice is None:
            return None
        most = (1 + share) * self._step(costs, choice)
        while True:
            pairs = product(dict.fromkeys(choice), repeat=2)
            others = {tuple(new if each == old else each for each in choice) for old, new in pairs if old != new}
            ways = sorted((self._step(costs, each), each) for each in others if self._each_fits(costs, each))
            if not ways or ways[0][0] > most:
                return choice
            choice = ways[0][1]

    def _fastest(self, costs: Sequence[Sequence[StageCosts]]) -> Choice | None:
        """On each rank what takes it the least time: an action that takes less never makes the step longer."""
        found: dict[int, int] = {}
        for rank, actions in enumerate(self.pipeline.order):
            own = tuple(dict.fromkeys(stage for _, stage, _ in actions))
            ways = []
            for numbers in product(range(len(costs)), repeat=len(own)):
                stages = {stage: costs[number][stage] for stage, number in zip(own, numbers, strict=True)}
                if (memory := self._memory(rank, stages, costs[0])) <= self.budget.limit:
                    busy = sum(stages[stage].taken(kind, stage == 0) for kind, stage, _ in actions)
                    ways.append((busy, memory, numbers))
            if not ways:
                return None
            found.update(zip(own, min(ways)[2], strict=True))
        return tuple(found[stage] for stage in range(self.pipeline.stages))

    def _memory(self, rank: int, stages: Mapping[int, StageCosts], every: Sequence[StageCosts]) -> int:
        actions, said = self.pipeline.order[rank], self.pipeline
        peak, _ = rank_peak(said.schedule, actions, stages, said.microbatches)
        return Besides(self._state(every)[rank], self.besides.reserve).on(peak)

    def _each_fits(self, costs: Sequence[Sequence[StageCosts]], choice: Choice) -> bool:
        stages, ranks = dict(enumerate(_chosen(costs, choice))), range(len(self.pipeline.order))
        return all(self._memory(rank, stages, costs[0]) <= self.budget.limit for rank in ranks)

    def _step(self, costs: Sequence[Sequence[StageCosts]], choice: Choice) -> float:
        return timetable(self.pipeline, _chosen(costs, choice))[0]

    # --- texts ---

    def _written(self, space: SearchSpace, patterns: Sequence[Pattern], choice: Choice) -> Iterator[str]:
        """Texts in which each stage follows its pattern, the shortest first."""
        stage_of = stages_of(space.facts, space.classes.blocks, self.pipeline).of
        where = [stage_of[rows[0]] for rows in space.classes.rows]
        around = tuple(patterns[choice[max(stage, 0)]][number] for number, stage in enumerate(where))
        runs = [[*each] for _, each in groupby(range(len(choice)), choice.__getitem__)]
        last = len(choice) - 1

        def zone(first: int, end: int, stage: int, *, nested: bool) -> Zone:
            return Zone(f"in block {_place(first, end, len(choice))}", patterns[choice[stage]], nested)

        forms = [
            (0, [zone(each[0], last, each[0], nested=True) for each in runs[1:]]),
            (last, [zone(0, each[-1], each[0], nested=True) for each in reversed(runs[:-1])]),
        ]
        for base in dict.fromkeys(each[0] for each in runs):
            apart = [each for each in runs if choice[each[0]] != choice[base]]
            forms.append((base, [zone(each[0], each[-1], each[0], nested=False) for each in apart]))
        texts = {text for base, zones in forms for text in _texts(space, patterns[choice[base]], zones, around)}
        return iter(sorted(texts, key=lambda text: (text.count("\n"), len(text), text)))

    def _shorter(self, found: TunedStages) -> TunedStages:
        """Without `in block` where it says nothing beside the stage."""
        text = found.rules.replace(" in block in ", " in ")
        other = None if text == found.rules else self._exact(text)
        return other if other is not None and self._fits(other) and other.step <= found.step else found


def _chosen(costs: Sequence[Sequence[StageCosts]], choice: Choice) -> list[StageCosts]:
    return [costs[number][stage] for stage, number in enumerate(choice)]


def _texts(space: SearchSpace, base: Pattern, zones: Sequence[Zone], around: Pattern) -> Iterator[str]:
    """The shortest first."""
    undecided = not space.override
    for script in scripts(space.inside, space.outside, base, zones, around, undecided=undecided):
        text = script.text(space.head, override=space.override)
        if text is not None:
            yield text


def _place(first: int, last: int, count: int) -> str:
    """``in stage 0``, ``in last 3 stages``, ``in first half of stages``."""
    number = last - first + 1
    if first and last < count - 1:
        return f"in stage {first}" if number == 1 else f"in stages {first}..{last}"
    end = "last" if first else "first"
    if number == 1:
        return "in last stage" if first else "in stage 0"
    return f"in {end} half of stages" if 2 * number == count else f"in {end} {number} stages"
