"""The trade-off between memory and time: budgets, candidates, and the exact figures of a candidate's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Literal

from attrs import evolve, frozen

from policylang.graph.facts import Facts, Phase, Schedule, mask_of
from policylang.language.cancellation import collector_paused
from policylang.language.diagnostics import Diagnostic, Severity, Source, is_error
from policylang.language.formatting import format_source
from policylang.language.loader import parse_policy
from policylang.language.operators import OperatorTable
from policylang.language.syntax import Action, Pipeline
from policylang.planning import refusals
from policylang.planning.capabilities import Capabilities
from policylang.planning.edits.statement_edits import plan_edits
from policylang.planning.liveness import BackwardCost, SavedForBackward, saved_and_recomputed
from policylang.planning.pipelines import PipelineFigures, StageCosts
from policylang.planning.plan import Plan, schedule_of
from policylang.planning.planner import plan
from policylang.planning.selection.selectors import Selections, selections_for
from policylang.planning.value_outcome import Why
from policylang.simulation.memory import Origin, Timeline, highest_moment, peak_of, simulate
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import step_time

BudgetFigure = Literal["peak", "saved", "recompute time"]


@frozen
class Budget:
    """A limit on memory or time; the other of the two is minimised."""

    figure: BudgetFigure
    limit: float
    """Bytes of one rank; of ``recompute time`` a fraction of the forward's time."""


@frozen
class Candidate:
    """A policy with its plan and its simulated figures on the tuned graph."""

    rules: str
    """The statements that decide, a line each, without a comment and without expectations."""
    peak: int
    """Bytes, simulated, of the graph alone: without what :class:`Besides` adds."""
    peak_at: str
    """The node at which the peak is."""
    saved: int
    """Bytes kept on the device for the backward."""
    offloaded: int
    recompute: float
    """Seconds of recomputation."""
    exposed: float
    """Seconds in which computation waits for a collective or a copy."""
    step: float
    """Seconds of the whole step."""
    copies: float = 0.0
    """The part of ``exposed`` that copies to the host and back add: zero where computation hides them."""
    least_peak: int = 0
    """Bytes that are alive at the peak whatever is decided: no policy of the graph has a lower peak."""

    @property
    def price(self) -> float:
        """Seconds that fitting it costs: recomputation, and waiting for copies."""
        return self.recompute + self.copies


@frozen
class Allowed:
    """The lines that the search may use beside those that save and recompute."""

    offload: bool = False
    chunk: bool = True
    order: bool = True
    lossy: bool = False


@frozen
class Besides:
    """Memory beside the graph: optimizer state and the reserve."""

    optimizer: int = 0
    """Bytes of the optimizer's state."""
    reserve: float = 0.0
    """The share of the memory that the allocator wastes."""

    def on(self, peak: int) -> int:
        """The peak with the memory beside the graph."""
        return round((peak + self.optimizer) / (1 - self.reserve))

    def memory(self, each: Candidate, budget: Budget) -> int:
        """The bytes that a budget is about."""
        return each.saved if budget.figure == "saved" else self.on(each.peak)


@frozen(eq=False)
class TunedStages:
    """A policy of a whole pipeline, as it was planned."""

    rules: str
    pipeline: Pipeline
    figures: PipelineFigures
    costs: Sequence[StageCosts]
    state: tuple[int, ...]
    """Bytes of the optimizer's state, per rank."""
    offloaded: int
    """Bytes of one microbatch that are kept on the host, in all stages."""
    exposed: float
    """Seconds in which computation waits for a collective or a copy, of all microbatches in all stages."""
    alike: TunedStages | None = None
    """The fastest of the policies with the same rules in all stages that fit; None where none does."""

    @property
    def step(self) -> float:
        """Seconds from the first forward to the last backward of any rank."""
        assert self.figures.step_seconds is not None, "policies are tuned with times"
        return self.figures.step_seconds

    def memory(self, reserve: float) -> list[int]:
        """Bytes per rank: of its peak, of its optimizer's state, and in reserve."""
        peaks = {each.rank: each.peak for each in self.figures.stages}
        return [Besides(state, reserve).on(peaks[rank]) for rank, state in enumerate(self.state)]


@frozen
class Tuned:
    """A choice among the candidates of one graph on one device."""

    budget: Budget
    besides: Besides
    chosen: Candidate
    less: Candidate | None
    """Its neighbour that takes less memory and more time; None where there is none."""
    more: Candidate | None
    """Its neighbour that takes more memory and less time."""
    table: tuple[Candidate, ...]
    """All that no other beats in both memory and time, by rising memory."""
    bound: float | None
    """Seconds of recomputation that no choice of values can go below in as many bytes as the chosen one keeps, on the
    device and on the host together."""
    forward: float
    """Seconds of the forward."""
    stages: TunedStages | None = None
    """The stages of the pipeline that is tuned; None of a single step. With stages the bytes of ``chosen`` are those of
    the rank with the highest peak, and times those of all microbatches."""


@frozen
class Infeasible:
    """No policy meets the budget."""

    budget: Budget
    besides: Besides
    smallest: Candidate
    """The candidate that comes nearest."""


_IDLE = (refusals.MATCHES_NOTHING, refusals.NO_EFFECT)
"""Codes of lines without which nothing changes: a line for all blocks may match in some of them only."""


class Evaluation:
    """Plans and simulates texts, each once."""

    def __init__(self, facts: Facts, times: NodeTimes, capabilities: Capabilities, *, ordered: bool = False) -> None:
        """``ordered``: texts may edit the graph and order its collectives. They are planned for the device, and are
        taken as they are written, notes against them or not."""
        self.facts = facts
        self.times = times
        self.capabilities = capabilities
        self.ordered = ordered
        self.operators = OperatorTable.bundled(met=facts.operators)
        self.errors: set[str] = set()
        """Texts with an error, such as a rule that matches nothing."""
        self._known: dict[str, Candidate | None] = {}
        self._selections: dict[str | None, Selections] = {}
        """By glob of the blocks."""
        self._simulated: dict[bytes, Candidate] = {}
        """By digest of their schedule."""
        self._asked: dict[str, None] = {}
        self._planned = lru_cache(8 if ordered else 2)(self._plan)
        """What was evaluated last is mostly looked at again; of texts with an order, whose plans take long, the best
        is."""

    def afresh(self, asked: Iterable[str] = ()) -> None:
        """Count as evaluated these texts and what is asked for from here on: nothing else decides."""
        self._asked = dict.fromkeys(asked)

    def asked(self) -> tuple[str, ...]:
        return tuple(self._asked)

    def planned(self, text: str) -> Plan | None:
        """The plan of a text; None if it has any diagnostic, except a note that some offloaded values stay on the
        device: the simulation covers that."""
        made = self.planned_or_refused(text)
        return None if isinstance(made, list) else made

    def planned_or_refused(self, text: str, pipeline: Pipeline | None = None) -> Plan | list[Diagnostic]:
        """The plan of a text, or the diagnostics against it."""
        return self._plan(text, pipeline) if pipeline else self._planned(text)

    def _plan(self, text: str, pipeline: Pipeline | None = None) -> Plan | list[Diagnostic]:
        loaded = parse_policy(text, operators=self.operators)
        if loaded.policy is None:
            return list(loaded.diagnostics)
        policy = evolve(loaded.policy, pipeline=pipeline) if pipeline else loaded.policy
        device = self.times.device if self.ordered or pipeline else None
        like = None
        if device is None and policy.device is None and policy.pipeline is None:
            glob = None if policy.blocks is None else policy.blocks.glob
            if glob not in self._selections:
                self._selections[glob] = selections_for(policy, self.facts)
            like = self._selections[glob]
        made = plan(policy, self.facts, self.capabilities, device=device, like=like)
        copies = loaded.policy.offloads or self.ordered
        said = [each for each in made.diagnostics if not (copies and each.code == refusals.STAYS_ON_DEVICE)]
        return [
            each
            for each in (*loaded.diagnostics, *said)
            if each.severity is not Severity.NOTE or not (self.ordered or is_included(each, text))
        ] or made

    def of(self, text: str) -> Candidate | None:
        """The candidate of a text, in canonical form; None if it has a diagnostic, or leaves a value to PyTorch's
        partitioner."""
        self._asked[text] = None
        if text not in self._known:
            with collector_paused():
                self._known[text] = self._evaluate(text)
        return self._known[text]

    @property
    def evaluated(self) -> tuple[Candidate, ...]:
        """All candidates that were asked for, in that order."""
        return tuple(each for text in self._asked if (each := self._known[text]) is not None)

    def without_rules(self) -> Candidate:
        """The candidate of a graph without choices: the step as it is."""
        schedule = schedule_of(self.facts, [None] * len(self.facts))
        peak = peak_of(simulate(self.facts, schedule), self.facts)
        times = step_time(self.facts, schedule, self.times)
        return Candidate("", peak.bytes, peak.at, 0, 0, 0.0, times.exposed, times.step)

    def _evaluate(self, text: str) -> Candidate | None:
        formatted = _canonical(text)
        if formatted is None:
            return None
        made = self.planned_or_refused(formatted)
        if isinstance(made, list):
            if any(map(is_error, made)):
                self.errors.add(text)
            if self.ordered:
                return None
            kept = without_idle(formatted, made)
            return None if kept is None else self.of(kept)
        needs = saved_and_recomputed(made)
        if not needs.final or (made.policy.offloads and not needs.offloaded):
            return None
        if self.ordered:
            if made.times is None:
                return None
            found = candidate_of(formatted, made, needs, made.times)
            if made.order is None:
                return found
            took = made.step_time
            assert took is not None
            return evolve(found, peak=made.peak.bytes, peak_at=made.peak.at, step=took.step, exposed=took.exposed)
        idle = None if formatted.startswith("include") else _idle_line(formatted, made, needs)
        if idle is not None:
            lines = formatted.splitlines(keepends=True)
            return self.of("".join(lines[:idle] + lines[idle + 1 :]))
        steps = made.schedule  # many texts differ in words alone, or in what no backward asks for
        held = repr((steps.held, steps.forms)).encode()
        key = sha256(b"".join((steps.kinds, steps.rows, steps.regions, held))).digest()
        if key not in self._simulated:
            self._simulated[key] = candidate_of(formatted, made, needs, self.times)
        return evolve(self._simulated[key], rules=formatted, saved=needs.saved_bytes, offloaded=needs.offloaded_bytes)


def _canonical(text: str) -> str | None:
    """Statements in canonical layout, each of which is written on a line of its own."""
    lines = [_canonical_line(each) for each in text.splitlines()]
    return None if None in lines else "".join(filter(None, lines))


@lru_cache(4096)
def _canonical_line(line: str) -> str | None:
    """A line in canonical layout: thousands of candidates are made of few phrases."""
    return format_source(Source("<tuned>", line)).text if line else "\n"


def is_included(each: Diagnostic, text: str) -> bool:
    """It is about a line of another file than this text."""
    return each.span is not None and each.span.source.text != text


def without_idle(text: str, against: Sequence[Diagnostic]) -> str | None:
    """A text without the lines that change nothing; None if nothing of that kind is said against it."""
    own = (each for each in against if each.code in _IDLE and not is_included(each, text))
    idle = {each.span.line - 1 for each in own if each.span is not None}
    return "".join(line for at, line in enumerate(text.splitlines(keepends=True)) if at not in idle) if idle else None


def edited(facts: Facts, lines: str, capabilities: Capabilities) -> Facts:
    """The facts of the graph that edits leave; the same object where these lines edit nothing."""
    policy = parse_policy(lines).policy
    assert policy is not None
    return plan_edits(policy, facts, capabilities)[1]


def candidate_of(rules: str, made: Plan, needs: BackwardCost, times: NodeTimes) -> Candidate:
    """Simulate a plan; ``times`` are of the graph that it leaves."""
    timeline = simulate(made.facts, made.schedule)
    peak, took = peak_of(timeline, made.facts), step_time(made.facts, made.schedule, times)
    return Candidate(
        rules=rules,
        peak=peak.bytes,
        peak_at=peak.at,
        saved=needs.saved_bytes,
        offloaded=needs.offloaded_bytes,
        recompute=took.recomputed,
        exposed=took.exposed,
        step=took.step,
        copies=copies_of(made.facts, made.schedule, times) if made.policy.offloads else 0.0,
        least_peak=_undecided_at_peak(made.facts, timeline),
    )


def _undecided_at_peak(facts: Facts, timeline: Timeline) -> int:
    """The backward runs in one order, whatever is decided: its own values are alive in the same places."""
    if (moment := highest_moment(timeline)) is None:
        return timeline.resident
    found, total = timeline.lifetimes, 0
    for at in found.alive_at(timeline.steps[moment]):
        origin = found.origins[at]
        is_made = origin == Origin.FIRST_RUN and facts.phases[found.rows[at]] != Phase.FORWARD
        total += found.bytes[at] if is_made or origin in (Origin.INPUT, Origin.TANGENT) else 0
    return total


def copies_of(facts: Facts, schedule: Schedule, times: NodeTimes) -> float:
    """Seconds that a step waits longer than one in which copies take no time."""
    at_once = evolve(times, device=evolve(times.device, host_bandwidth=None))
    waits, others = (step_time(facts, schedule, each).exposed for each in (times, at_once))
    return max(waits - others, 0.0)


def _idle_line(text: str, made: Plan, needs: SavedForBackward) -> int | None:
    """The number of the first line without which all that the backward asks for would be decided alike."""
    owners = made.facts.owners
    asked = mask_of((owners[row] for row in (*needs.saved, *needs.recomputed, *needs.offloaded)), len(made.facts))
    undecided = any(
        decision.why is Why.UNDECIDED
        for row, decision in enumerate(made.decisions)
        if decision is not None and asked[owners[row]]
    )
    before: dict[int, Action | None] = {}
    idle: set[int] = set()
    rest = made.policy.undecided
    ground = None if rest is None else Action.SAVE if rest.fate == "save" else Action.RECOMPUTE
    for index, outcome in enumerate(made.rules):
        action = outcome.rule.action
        if all(before.get(row, ground) is action for row in outcome.decided if asked[row]):
            idle.add(index)
        before.update(dict.fromkeys(outcome.matched, action))
    number = 0
    for at, line in enumerate(text.splitlines()):
        if "->" in line:
            if not undecided:
                return at
        elif not line.startswith("blocks "):
            if number in idle:
                return at
            number += 1
    return None
