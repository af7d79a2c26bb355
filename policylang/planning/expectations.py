"""A policy's expectations: each is held, failed with the figure found, or deferred until after partitioning.

Totals (``expect saved per block <= 220 MiB``), times and the peak of the simulated step, counts of nodes, and what
becomes of a set of nodes (``expect every S recomputed``). A warning accompanies a figure that is incomplete: work that
no FLOP formula counts, values whose sizes come from data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Literal, assert_never

from attrs import evolve, frozen

from policylang.graph.blocks import BlockTable
from policylang.graph.facts import Facts, StepKind, uncounted_operators
from policylang.language import syntax
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.shown import beside, counted, first_lines, joined
from policylang.planning.capabilities import JOINT
from policylang.planning.liveness import BackwardCost, SavedForBackward, counted_by_data, sized_by_data, with_cost
from policylang.planning.order.statements import plan_order
from policylang.planning.plan import ExpectationOutcome, Plan
from policylang.planning.refusals import EXPECTATION_FAILED, MATCHES_NOTHING
from policylang.planning.schedule import is_about_whole
from policylang.planning.selection.no_match import part_counts
from policylang.planning.selection.selectors import Selections, group_keys, selections_for
from policylang.planning.value_outcome import (
    KEPT,
    LEFT_TO_MIN_CUT,
    ON_HOST,
    RECOMPUTED,
    Decision,
    Held,
    Outcome,
    Why,
    is_open,
)
from policylang.simulation.node_times import NodeTimes

UNCOUNTED, UNTIMED, BY_DATA = "APL332", "APL333", "APL350"
_REGISTER = "register their formulas with `torch.utils.flop_counter.register_flop_formula` where the graph is made"
_MOST_NAMES = 8
_MOST_NAMED = 3
_NOTHING = "no node matches"
_BOUNDS: dict[str, Literal["==", ">=", "<="]] = {"exactly": "==", "at least": ">=", "at most": "<="}
_MOST_PLACES = 9

Status = Literal["held", "failed", "deferred"]


@frozen
class Finding:
    """The result of checking an expectation, and the evidence for it."""

    status: Status
    found: str
    details: tuple[str, ...] = ()
    margin: float | None = None


_COLUMNS: dict[str, tuple[str, Literal["bytes", "flops", "operators"]]] = {
    "saved": ("saved_bytes", "bytes"),
    "recomputed": ("recomputed_bytes", "bytes"),
    "recomputed flops": ("recomputed_flops", "flops"),
    "recomputed operators": ("recomputed_operators", "operators"),
}
"""By figure, the field with it, and the total of the forward that it is a share of."""
LEFT_OPEN = Finding("deferred", "it depends on values that are left to PyTorch's partitioner")
_ONE_STAGE = Finding("deferred", "it is about all stages of a pipeline, and no schedule of a whole model is given")
_UNTIMED = Finding("deferred", "no device is given, so times are not known")


def check_expectations(
    plan: Plan,
    expectations: Sequence[syntax.Expectation],
    selections: Selections,
    cost: BackwardCost,
    outcomes: NodeOutcomes | None = None,
) -> tuple[tuple[ExpectationOutcome, ...], tuple[Diagnostic, ...]]:
    """The result of each expectation, and an error for each that failed, both in order.

    ``outcomes``: of the plan's decisions unless given.
    """
    outcomes = outcomes or NodeOutcomes(plan.facts, plan.decisions, cost)
    results: list[ExpectationOutcome] = []
    failures: list[Diagnostic] = []
    for expectation in expectations:
        finding, span = _check(expectation, plan, selections, outcomes, cost), expectation.span
        text, details = span.one_line, finding.details
        results.append(ExpectationOutcome(text, span.location, finding.status, finding.found, finding.margin))
        if finding.status != "failed":
            continue
        if by_data := figure_by_data(expectation, plan.facts, cost):
            details = (*details, f"the figure counts {by_data}")
        code, message = EXPECTATION_FAILED, f"`{text}` does not hold: {finding.found}"
        if finding.found == _NOTHING and isinstance(expectation, syntax.ExpectCount | syntax.ExpectFate):
            code, span = MATCHES_NOTHING, expectation.selector.span
            message = f"`{text}` is about nothing: `{span.one_line}` matches nothing in this graph"
        failures.append(diagnose(code, message, span=span, details=details))
    return tuple(results), tuple(failures)


def _check(
    expectation: syntax.Expectation, plan: Plan, selections: Selections, outcomes: NodeOutcomes, cost: BackwardCost
) -> Finding:
    if selections.blocks.alone is not None and is_about_whole(expectation):
        return Finding("deferred", "it is about a whole graph, of which this is one block")
    match expectation:
        case syntax.ExpectTotal():
            return check_total(expectation, plan, cost, selections.blocks)
        case syntax.ExpectCount():
            rows = selections.rows(expectation.selector)
            finding = _check_count(expectation, rows, selections)
            nothing = not rows and finding.status == "failed"
        case syntax.ExpectFate():
            rows = selections.rows(expectation.selector)
            finding = check_outcome(expectation, rows, outcomes, selections.facts)
            nothing = not rows and expectation.quantifier == "every"
        case syntax.ExpectLossless():
            if lost := (*lossy(plan.facts, cost), *plan.edits.lossy):
                return Finding("failed", lost[0], first_lines(lost, _MOST_NAMES))
            return Finding("held", "nothing is narrowed") if cost.final else LEFT_OPEN
        case _:
            assert_never(expectation)
    return Finding("failed", _NOTHING, part_counts(expectation.selector, selections)) if nothing else finding


def _check_count(expectation: syntax.ExpectCount, rows: list[int], selections: Selections) -> Finding:
    scope, blocks, op = expectation.scope or syntax.Scope.GRAPH, selections.blocks, _BOUNDS[expectation.bound]
    if scope is syntax.Scope.GRAPH:
        holds, margin = syntax.COMPARISONS[op](len(rows), expectation.n), margin_of(op, len(rows), expectation.n)
        return Finding("held" if holds else "failed", str(len(rows)), margin=margin)
    # All blocks; of modules and chains, those that hold one at least.
    totals: dict[object, int] = dict.fromkeys(numbers(blocks) if scope is syntax.Scope.BLOCK else (), 0)
    if scope is syntax.Scope.BLOCK and not totals:
        return Finding("failed", "the graph has no blocks")
    for key in group_keys(scope, rows, selections.facts, blocks, selections.chains):
        if key is not None:
            totals[key] = totals.get(key, 0) + 1
    margins = {count: margin_of(op, count, expectation.n) for count in totals.values()}
    wrong = [(key, count) for key, count in totals.items() if not syntax.COMPARISONS[op](count, expectation.n)]
    if not wrong:
        counts = sorted(margins)
        each = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "0"
        return Finding("held", f"{each} in each {scope.value}", margin=min(margins.values(), default=0.0))
    named = {syntax.Scope.BLOCK: "block {}", syntax.Scope.CHAIN: "the chain from `{}`"}.get(scope, "{}")
    places = [named.format(key) or "the root module" for key, _ in wrong]
    paths = [f", {blocks.names[key]}" if isinstance(key, int) else "" for key, _ in wrong]
    details = [f"{place}{path}: {count}" for place, path, (_, count) in zip(places, paths, wrong, strict=True)]
    count = wrong[0][1]
    return Finding("failed", f"{count} in {places[0]}", first_lines(details, _MOST_PLACES), margins[count])


def lossy(facts: Facts, needs: SavedForBackward) -> tuple[str, ...]:
    """The reasons why the backward computes with other bits than the forward made, a phrase each; empty if none.
    Whatever changes bits adds its phrases here: ``expect lossless`` asks nothing else."""
    narrowed = [(row, outcome) for outcome, rows in needs.rows.items() if outcome.narrows for row in rows]
    return tuple(f"{facts.names[row]} is {outcome.phrase}" for row, outcome in sorted(narrowed, key=itemgetter(0)))


# --- totals -----------------------------------------------------------------------------------------------------------


def check_total(expectation: syntax.ExpectTotal, plan: Plan, cost: BackwardCost, blocks: BlockTable) -> Finding:
    """Compare a total with its limit.

    While values are left to PyTorch's partitioner the totals known are lower bounds: enough to fail an upper limit,
    not to hold one.
    """
    if expectation.of_time and plan.times is None:
        return _UNTIMED
    if expectation.figure == "host memory per host" and (plan.times is None or plan.times.device.host_ranks is None):
        return Finding("failed", "no device profile says how many ranks share a host, as `ranks = 8` in `[host]` does")
    if expectation.figure == "peak per stage":
        figures = plan.pipeline if cost.final else None
        if figures is None:
            return LEFT_OPEN if plan.policy.pipeline is not None and plan.policy.pipeline.order else _ONE_STAGE
        worst = max(figures.stages, key=lambda each: each.peak)
        return _judge(expectation, float(worst.peak), cost, f" in stage {worst.stage}")
    if expectation.figure in ("peak", "host memory", "host memory per host", "exposed", "step time"):
        return _judge(expectation, _whole(expectation, plan), cost) if cost.final else LEFT_OPEN
    amount, by_block = _amounts(expectation, plan, cost)
    if not expectation.per_block:
        return _judge(expectation, amount, cost)
    if not by_block:
        return Finding("failed", "the graph has no blocks")
    op, limit = expectation.op, expectation.limit.value
    # The block that decides: the first that fails worst, or comes nearest to failing; for `==` the first that fails.
    test = margin_of if op[0] in "<>" else lambda op, amount, limit: syntax.COMPARISONS[op](amount, limit)
    block = min(numbers(blocks), key=lambda each: test(op, by_block[each], limit))
    details = (f"block {block} is {blocks.names[block]}",)
    return _judge(expectation, by_block[block], cost, f" in block {block}", details)


def _judge(
    expectation: syntax.ExpectTotal, amount: float, cost: BackwardCost, where: str = "", details: tuple[str, ...] = ()
) -> Finding:
    op, limit = expectation.op, expectation.limit.value
    holds, margin = syntax.COMPARISONS[op](amount, limit), margin_of(op, amount, limit)
    found = beside(amount, limit, expectation.limit.dimension) + where
    if cost.final:
        return Finding("held" if holds else "failed", found, details, margin)
    settled = not holds and op in ("<", "<=")
    return Finding("failed", f"at least {found}", details, margin) if settled else LEFT_OPEN


def margin_of(op: str, amount: float, limit: float) -> float:
    """The distance of a figure from its limit: negative, or zero of a strict one, where it does not hold."""
    if op in ("<", "<="):
        return limit - amount
    return amount - limit if op in (">", ">=") else -abs(amount - limit)


def _whole(expectation: syntax.ExpectTotal, plan: Plan) -> float:
    """A figure of the step as it runs, which costs a simulation."""
    if expectation.figure == "peak":
        return float(plan.peak.bytes)
    if expectation.figure == "host memory":
        return float(plan.host_memory)
    if expectation.figure == "host memory per host":
        return float(plan.host_memory * ((plan.times and plan.times.device.host_ranks) or 1))
    step = plan.step_time
    assert step is not None
    if expectation.figure == "step time":
        return step.step
    return _share(step.exposed, step.step) if expectation.limit.dimension == "fraction" else step.exposed


def _amounts(expectation: syntax.ExpectTotal, plan: Plan, cost: BackwardCost) -> tuple[float, Sequence[float]]:
    """The figure, in all and by block: as it is, or as a share of the whole forward."""
    is_share = expectation.limit.dimension == "fraction"
    if expectation.figure == "recomputed time":
        part = _seconds(plan, plan.schedule.rows_of(StepKind.SECOND_RUN))
        whole = _seconds(plan, plan.facts.forward) if is_share else part
    else:
        column, of = _COLUMNS[expectation.figure]
        part = getattr(cost, column), getattr(cost, f"{column}_by_block")
        whole = cost.forward(of) if is_share else part
    if not is_share:
        return part
    return _share(part[0], whole[0]), [_share(*pair) for pair in zip(part[1], whole[1], strict=True)]


def _seconds(plan: Plan, rows: Iterable[int]) -> tuple[float, Sequence[float]]:
    """The time of operators one after the other, in all and by block."""
    assert plan.times is not None
    seconds, block_of = plan.times.seconds, plan.block_of
    total, by_block = 0.0, [0.0] * len(plan.block_names)
    for row in rows:
        total += seconds[row]
        if by_block and block_of[row] >= 0:
            by_block[block_of[row]] += seconds[row]
    return total, by_block


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def numbers(blocks: BlockTable) -> Sequence[int]:
    return range(len(blocks.names)) if blocks.alone is None else (blocks.alone,)


# --- what becomes of nodes --------------------------------------------------------------------------------------------


_PRECEDENCE = (Held.NOWHERE, Held.HOST, Held.DEVICE, Held.UNDECIDED)


class NodeOutcomes:
    """The outcome of each node: by what the backward needs of its group, else by what was decided for it.

    A group (an operator with its ``getitem`` nodes, a collective with its ``wait_tensor``) has one: a collective is
    saved when its ``wait_tensor`` is. A view that is rebuilt from a moved value counts as that does.
    """

    def __init__(self, facts: Facts, decisions: Sequence[Decision | None], needs: SavedForBackward) -> None:
        self._owners, self._decisions = facts.owners, decisions
        rebuilt = [row for row in needs.recomputed if (by := decisions[row]) is not None and by.why is Why.REBUILT]
        rows = dict(needs.rows)
        rows[RECOMPUTED] = tuple(sorted({*rows.get(RECOMPUTED, ())}.difference(rebuilt)))
        moved = {row: outcome for outcome, each in needs.rows.items() if outcome.moves for row in each}
        for row in rebuilt:  # a view comes after its storage
            moved[row] = moved.get(facts.inputs[row][0], ON_HOST)
            rows[moved[row]] = (*rows.get(moved[row], ()), row)
        rows[KEPT] = (*rows.get(KEPT, ()), *needs.symbolic)
        self._needed: dict[int, Outcome] = {}  # by producer; of several outcomes the first in this order
        for outcome in sorted(rows, key=lambda each: _PRECEDENCE.index(each.held)):
            for row in rows[outcome]:
                self._needed.setdefault(facts.owners[row], outcome)
        self._contingent = {facts.owners[row] for row in needs.contingent}

    def really(self, row: int) -> Outcome | None:
        """The outcome of a value; None where the backward does not need it."""
        owner = self._owners[row]
        return self._needed.get(owner, LEFT_TO_MIN_CUT if owner in self._contingent else None)

    def decided(self, row: int) -> Outcome | None:
        """The outcome from :meth:`really`, or the decision for a value that the backward does not (for sure) need."""
        owner, found = self._owners[row], self.really(row)
        if found is not None and not (found is LEFT_TO_MIN_CUT and owner in self._contingent):
            return found
        decision = self._decisions[owner]
        return found if decision is None or is_open(decision) else decision.outcome


def check_outcome(expectation: syntax.ExpectFate, rows: Sequence[int], outcomes: NodeOutcomes, facts: Facts) -> Finding:
    """``every`` goes by what was decided where the backward needs no such value, ``no`` by what really happens."""
    every, wanted, nodes = expectation.quantifier == "every", expectation.fate, counted(len(rows), "node")
    found = [(row, outcomes.decided(row) if every else outcomes.really(row)) for row in rows]
    words = [(row, "not needed by the backward" if outcome is None else outcome.fate) for row, outcome in found]
    is_open = any(outcome is LEFT_TO_MIN_CUT for _, outcome in found)
    if every:
        settled = (wanted, LEFT_TO_MIN_CUT.word)
        wrong = [f"{facts.names[row]} is {word}" for row, word in words if word not in settled]
    else:
        wrong = [facts.names[row] for row, word in words if word == wanted]
    if wrong:
        not_so = f"not {wanted}" if every else wanted
        return Finding("failed", f"{len(wrong):,} of {nodes} {not_so}", first_lines(wrong, _MOST_NAMES))
    share = "none of" if not every else "1 of" if len(rows) == 1 else "all"
    return LEFT_OPEN if is_open else Finding("held", f"{share} {nodes} {wanted}")


# --- once the partitioner has decided ---------------------------------------------------------------------------------


def check_deferred(plan: Plan, final: Plan, needs: SavedForBackward) -> tuple[Plan, tuple[Diagnostic, ...]]:
    """The plan with its deferred expectations held or failed, and an error for each that failed. Warnings about
    uncounted FLOPs are repeated, now that the recomputations are known.

    ``final`` is ``plan`` with every decision taken, and ``needs`` follows from it. Selectors range over the graph as it
    was planned; the outcome of a node is looked up in the final plan. Scheduling lines are planned anew on what is
    recomputed then, for the peak and the times of the step.
    """
    waiting = [index for index, outcome in enumerate(plan.expectations) if outcome.status == "deferred"]
    if not waiting:
        return plan, ()
    policy, facts = plan.policy, plan.facts
    selections = selections_for(policy, facts, times=plan.times)
    cost = with_cost(needs, final.facts, plan.block_of, len(plan.block_names))
    outcomes = NodeOutcomes(final.facts, final.decisions, cost)
    expectations = [policy.expectations[index] for index in waiting]
    made = evolve(plan, decisions=final.decisions, order=None)
    if plan.order is not None and any(isinstance(each, syntax.ExpectTotal) for each in expectations):
        device = None if plan.times is None else plan.times.device
        made = evolve(made, order=plan_order(policy, facts, made.schedule, JOINT, device=device))
    found, failures = check_expectations(made, expectations, selections, cost, outcomes)
    results = list(plan.expectations)
    for index, checked in zip(waiting, found, strict=True):
        results[index] = checked
    others = tuple(each for each in plan.diagnostics if each.code not in (UNCOUNTED, UNTIMED, BY_DATA))
    incomplete = incomplete_figures(policy.expectations, final.facts, needs, plan.times)
    return evolve(plan, expectations=tuple(results), diagnostics=(*others, *incomplete)), failures


# --- figures that miss something --------------------------------------------------------------------------------------


def incomplete_figures(
    expectations: Sequence[syntax.Expectation], facts: Facts, needs: SavedForBackward, times: NodeTimes | None
) -> Iterator[Diagnostic]:
    """A warning for each expectation about FLOPs or time that counts calls without a formula, and for each that counts
    values whose sizes come from data, unless it is an upper limit on figures that count their largest possible size."""
    for each in expectations:
        asks = isinstance(each, syntax.ExpectTotal) and (each.figure == "recomputed flops" or (each.of_time and times))
        if isinstance(each, syntax.ExpectTotal) and asks:
            yield from _uncounted(each, facts, _counted_rows(each, facts, needs))
    for each in expectations if facts.data_sizes else ():
        rows = [row for row in _by_hint(each, facts, needs) if len({*facts.data_sizes[row][1:]}) == 2]
        at_most = all(facts.bytes[row] == facts.data_sizes[row][2] for row in rows)
        if isinstance(each, syntax.ExpectTotal) and rows and not (at_most and each.op in ("<", "<=")):
            counts = figure_by_data(each, facts, needs)
            message = f"`{each.span.one_line}` is compared with a figure that counts {counts}"
            help = "the figure changes with the load: expect what becomes of the values instead, `expect every … saved`"
            yield diagnose(BY_DATA, message, each.span, help=help, details=_places(facts, rows))


def _uncounted(expectation: syntax.ExpectTotal, facts: Facts, rows: Sequence[int]) -> Iterator[Diagnostic]:
    missing = uncounted_operators(facts, rows)
    if not missing:
        return
    calls = counted(sum(missing.values()), "call")
    names = [f"`{name}`" for name in missing]
    shown = joined(names) if len(names) <= _MOST_NAMED else f"{names[0]} and {len(names) - 1} others"
    again = " that are recomputed" if expectation.figure.startswith("recomputed") else ""
    code, misses, help = UNCOUNTED, f"does not count {calls} of {shown}{again}", _REGISTER
    if expectation.of_time:
        code, misses = UNTIMED, f"prices {calls} of {shown}{again} by their bytes alone"
    else:
        help += ", or expect what becomes of these operators, such as `expect no … recomputed`"
    message = f"`{expectation.span.one_line}` {misses}: no FLOP formula is known"
    found = [row for row in rows if facts.uncounted[row]]
    yield diagnose(code, message, span=expectation.span, help=help, details=_places(facts, found))


def _places(facts: Facts, rows: Sequence[int]) -> tuple[str, ...]:
    places = (f"{facts.names[row]} ({facts.targets[row]}) in {facts.modules[row] or 'no module'}" for row in rows)
    return first_lines(tuple(places), _MOST_NAMES)


def figure_by_data(expectation: syntax.Expectation, facts: Facts, needs: SavedForBackward) -> str:
    """The part of an expectation's figure that is counted by a hint, as the end of a sentence; else empty."""
    added_up = isinstance(expectation, syntax.ExpectTotal) and expectation.figure in ("saved", "recomputed")
    return counted_by_data(facts, _by_hint(expectation, facts, needs), added_up=added_up)


def _by_hint(expectation: syntax.Expectation, facts: Facts, needs: SavedForBackward) -> list[int]:
    """The nodes that the figure of an expectation counts by a hint."""
    if not isinstance(expectation, syntax.ExpectTotal) or expectation.figure == "recomputed operators":
        return []
    return sized_by_data(facts, _counted_rows(expectation, facts, needs))


def _counted_rows(expectation: syntax.ExpectTotal, facts: Facts, needs: SavedForBackward) -> Sequence[int]:
    if expectation.figure == "saved":
        return needs.saved
    return needs.recomputed if expectation.figure.startswith("recomputed") else range(len(facts))
