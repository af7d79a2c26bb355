"""A plan block by block: which values are saved and recomputed, what each costs, which line of the policy decided.

Blocks in which the same happens are one *group*: the same sequence of operators, modules, shapes, decisions and
deciding lines. What is left to PyTorch's partitioner counts as saved, and is told apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import fsum
from typing import Literal

from attrs import evolve, field, frozen

from policylang.graph.facts import Facts, uncounted_operators
from policylang.graph.schedule import Schedule
from policylang.graph.storage import storage_roots
from policylang.language.figures import folded_names
from policylang.language.interruption.wanted import check_cancelled
from policylang.language.syntax import Action
from policylang.operators.names import GETITEM
from policylang.planning.expectations.data_sizes import counted_by_data
from policylang.planning.inspection.communication import Communication, communication
from policylang.planning.inspection.step_times import time_of_step
from policylang.planning.inspection.time_prices import a_gib, time_difference
from policylang.planning.liveness import CostedNeeds, Needs, own_bytes, saved_and_recomputed, with_cost
from policylang.planning.plan import Plan, schedule_of
from policylang.planning.value_decision import Decision, Why, is_open
from policylang.simulation.memory import Timeline, simulate
from policylang.simulation.peak import Peak, peak_of
from policylang.simulation.step_time import StepTime

Fate = Literal["saved", "left to PyTorch", "recomputed", "offloaded"]
OUTSIDE = "outside the blocks"

_KEPT = Decision(Action.SAVE, None, Why.UNDECIDED)


@frozen
class ValueEntry:
    """One value that the backward needs. Where several follow from the same in a block, ``count`` of them are one."""

    fate: Fate
    operator: str
    module: str
    """Relative to the block."""
    shape: tuple[int, ...] | None
    dtype: str
    source: str | None
    """``file:line`` of the rule that decided, None where none did."""
    reason: str
    bytes: int
    """Of all ``count`` values. Memory that several saved values look into counts for the first of them."""
    flops: int
    """Of what is recomputed."""
    count: int = 1
    uncounted: str = ""
    """The operators whose work is not in :attr:`flops`, of what is recomputed."""
    seconds: float | None = None
    """Of what is recomputed; None without a device."""

    @property
    def costs(self) -> bool:
        """Whether it takes memory or work: a view that is recomputed does not."""
        return bool(self.bytes or self.flops or self.uncounted or self.seconds)


@frozen
class Amounts:
    """``saved`` and ``recomputed`` count values. What is left to PyTorch counts as saved and, apart, as open."""

    saved: int
    saved_bytes: int
    open_bytes: int
    recomputed: int
    recomputed_bytes: int
    recomputed_flops: int
    offloaded: int = 0
    offloaded_bytes: int = 0
    recomputed_seconds: float | None = None
    """Of all second runs, one after the other; None without a device."""


@frozen
class BlockGroup:
    """Blocks that are all alike; ``entries`` and ``amounts`` are those of one of them."""

    label: str
    """``model.layers.1–31``."""
    blocks: tuple[int, ...]
    """Numbers of the blocks; empty for what lies outside every block."""
    entries: tuple[ValueEntry, ...]
    amounts: Amounts

    @property
    def times(self) -> int:
        return max(len(self.blocks), 1)


_AS_IN_THE_GRAPH = (
    "the operators are those of this graph: an eager checkpoint may hold a little more where the model writes in "
    "place, or where autograd keeps what a compiler finds that nobody reads"
)


@frozen(eq=False)
class Scenario:
    """A step with all that it keeps and does twice."""

    amounts: Amounts
    peak: Peak
    timeline: Timeline
    schedule: Schedule
    facts: Facts = field(repr=False)
    """The graph that the schedule and the timeline are of: that of the plan, or, where a policy schedules, the one that
    it comes to, in which a recomputation is a node of its own."""
    time: StepTime | None = None
    """None without a device."""


@frozen(eq=False)
class Breakdown:
    plan: Plan
    groups: tuple[BlockGroup, ...]
    """In the order of their first block; what lies outside the blocks comes last."""
    under: Scenario
    """The step under the policy."""
    without: Scenario
    """The step in which nothing is recomputed: everything that the backward reads is kept."""
    forward_flops: int
    fates: Sequence[Fate | None]
    """By row; None for a value that the backward does not need."""
    uncounted: Mapping[str, int] | None
    """The operators of the forward that could do matrix work and that no FLOP formula counts, and how many calls; None
    where an older snapshot does not say."""
    uncounted_again: Mapping[str, int] | None
    """The same of what is recomputed."""
    communication: Communication | None = None
    """What the scheduling lines come to; None where the policy has none."""

    @property
    def forward_seconds(self) -> float | None:
        """Of the forward's operators, each run once; None without a device."""
        return None if self.under.time is None else self.under.time.forward

    @property
    def seconds_per_gib(self) -> float | None:
        """What recomputation costs: time of the step for each GiB that its peak is lower; None without a device, and
        where it is not lower."""
        under, without = self.under, self.without
        freed = without.peak.bytes - under.peak.bytes
        if under.time is None or without.time is None or freed <= 0:
            return None
        return a_gib(max(time_difference(under.time.step, without.time.step), 0.0), freed)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the figures cannot know."""
        plan = self.plan
        saved = [row for row, fate in enumerate(self.fates) if fate in ("saved", "left to PyTorch")]
        by_data = counted_by_data(plan.facts, saved)
        others = by_data or counted_by_data(plan.facts, plan.facts.forward, added_up=False)
        said = others and f"{'saved' if by_data else 'the peak'} counts {others}"
        return (*((_AS_IN_THE_GRAPH,) if plan.checkpoints is not None else ()), *((said,) if said else ()))


def breakdown(plan: Plan) -> Breakdown:
    """A few passes over the graph; needs no torch."""
    counted = as_counted(plan.decisions)
    outcome = saved_and_recomputed(plan, counted)
    check_cancelled()
    fates = _fates(plan, outcome)
    plain = evolve(plan, checkpoints=None)
    everything = [None if decision is None else _KEPT for decision in plan.decisions]
    ordered = communication(plan)
    check_cancelled()
    under = _scenario(plan, plan.schedule, outcome, fates)
    return Breakdown(
        plan=plan,
        groups=_groups(plan, outcome, fates),
        under=under if ordered is None else _in_order(under, ordered),
        without=_scenario(plan, schedule_of(plan.facts, everything), saved_and_recomputed(plain, everything), ()),
        forward_flops=outcome.forward.flops,
        fates=fates,
        uncounted=uncounted_operators(plan.facts, plan.facts.forward),
        uncounted_again=uncounted_operators(plan.facts, outcome.recomputed),
        communication=ordered,
    )


def as_counted(decisions: Sequence[Decision | None]) -> list[Decision | None]:
    """Decisions with all saved that is left to PyTorch."""
    return [_KEPT if is_open(decision) else decision for decision in decisions]


def _scenario(plan: Plan, schedule: Schedule, outcome: CostedNeeds, fates: Sequence[Fate | None]) -> Scenario:
    timeline, time = simulate(plan.facts, schedule), time_of_step(plan, schedule)
    open_rows = tuple(row for row in outcome.saved if fates and fates[row] == "left to PyTorch")
    # The other saved values may look into the same memory: what is open is what goes if only the open ones do.
    closed = tuple(row for row in outcome.saved if not fates or fates[row] != "left to PyTorch")
    rest = with_cost(Needs(saved=closed), plan.facts, (), 0).saved_bytes if open_rows else outcome.saved_bytes
    amounts = Amounts(
        saved=len(outcome.saved),
        saved_bytes=outcome.saved_bytes,
        open_bytes=outcome.saved_bytes - rest,
        recomputed=len(outcome.recomputed),
        recomputed_bytes=outcome.recomputed_bytes,
        recomputed_flops=outcome.recomputed_flops,
        offloaded=len(outcome.offloaded),
        offloaded_bytes=outcome.offloaded_bytes,
        recomputed_seconds=None if time is None else time.recomputed,
    )
    return Scenario(amounts, peak_of(timeline, plan.facts), timeline, schedule, plan.facts, time)


def _in_order(scenario: Scenario, found: Communication) -> Scenario:
    """The same values kept and made again, in the order that the scheduling lines come to."""
    step, time = found.planned, scenario.time
    if time is not None and step.lanes is not None:
        time = evolve(time, step=step.lanes.step, exposed=step.lanes.exposed)
    return evolve(scenario, peak=step.peak, timeline=step.timeline, schedule=step.schedule, facts=step.facts, time=time)


def _fates(plan: Plan, needs: Needs) -> list[Fate | None]:
    fates: list[Fate | None] = [None] * len(plan.facts)
    for row in needs.saved:
        fates[row] = "left to PyTorch" if is_open(plan.decisions[row]) else "saved"
    for row in needs.recomputed:
        fates[row] = "recomputed"
    for row in needs.offloaded:
        fates[row] = "offloaded"
    return fates


# --- blocks --------------------------------------------------------------------------------------------------------


def _groups(plan: Plan, outcome: CostedNeeds, fates: Sequence[Fate | None]) -> tuple[BlockGroup, ...]:
    timed = plan.shown_times is not None
    entries: list[list[ValueEntry]] = [[] for _ in range(len(plan.block_names) + 1)]
    roots = storage_roots(plan.facts)
    sizes = _sizes(plan.facts, outcome, roots)
    for row, fate in enumerate(fates):
        if fate is not None:
            place = roots[row] if fate != "recomputed" and plan.facts.ops[roots[row]] == "call_function" else row
            block = plan.block_of[place] if plan.block_names else -1
            entries[block].append(_entry(plan, row, fate, block, sizes[row]))
    alike: dict[tuple[ValueEntry, ...], list[int]] = {}
    for block in range(len(plan.block_names)):
        alike.setdefault(tuple(entries[block]), []).append(block)
    groups = [
        _group(folded_names([plan.block_names[block] for block in blocks]), blocks, same, timed=timed)
        for same, blocks in alike.items()
    ]
    if entries[-1]:
        label = OUTSIDE if plan.block_names else "the graph"
        groups.append(_group(label, [], tuple(entries[-1]), timed=timed))
    return tuple(groups)


def _sizes(facts: Facts, outcome: CostedNeeds, roots: Sequence[int]) -> dict[int, int]:
    sizes = {row: own_bytes(facts, row) for row in outcome.recomputed}
    sizes.update((row, facts.bytes[row]) for row in outcome.offloaded)
    taken: set[int] = set()
    for row in outcome.saved:
        root = roots[row]
        first = root not in taken and facts.ops[root] == "call_function"
        sizes[row] = facts.bytes[root] if first else 0
        taken.add(root)
    return sizes


def _entry(plan: Plan, row: int, fate: Fate, block: int, size: int) -> ValueEntry:
    facts, decision = plan.facts, plan.decisions[row]
    module = facts.modules[row] or facts.modules[facts.owners[row]]
    rule = None if decision is None or decision.rule is None else plan.policy.rules[decision.rule]
    return ValueEntry(
        fate=fate,
        operator=operator_of(facts, row),
        module=within_block(module, plan.block_names[block]) if block >= 0 else module,
        shape=facts.shapes[row],
        dtype=facts.dtypes[row],
        source=None if rule is None else rule.source,
        reason="" if decision is None else decision.reason,
        bytes=size,
        flops=facts.flops[row] if fate == "recomputed" else 0,
        uncounted=facts.uncounted[row] if fate == "recomputed" and facts.uncounted else "",
        seconds=plan.shown_times.seconds[row] if fate == "recomputed" and plan.shown_times is not None else None,
    )


def operator_of(facts: Facts, row: int) -> str:
    """The operator that a value comes from: of a ``getitem`` the one that it reads."""
    return facts.targets[facts.owners[row] if facts.targets[row] == GETITEM else row]


def within_block(module: str, block: str) -> str:
    """The path of a module from its block on."""
    if module == block:
        return ""
    return module[len(block) + 1 :] if module.startswith(f"{block}.") else module


def _group(label: str, blocks: Sequence[int], entries: Sequence[ValueEntry], *, timed: bool) -> BlockGroup:
    saved = [entry for entry in entries if entry.fate in ("saved", "left to PyTorch")]
    again = [entry for entry in entries if entry.fate == "recomputed"]
    moved = [entry for entry in entries if entry.fate == "offloaded"]
    amounts = Amounts(
        saved=len(saved),
        saved_bytes=sum(entry.bytes for entry in saved),
        open_bytes=sum(entry.bytes for entry in saved if entry.fate == "left to PyTorch"),
        recomputed=len(again),
        recomputed_bytes=sum(entry.bytes for entry in again),
        recomputed_flops=sum(entry.flops for entry in again),
        offloaded=len(moved),
        offloaded_bytes=sum(entry.bytes for entry in moved),
        recomputed_seconds=fsum(entry.seconds or 0.0 for entry in again) if timed else None,
    )
    return BlockGroup(label, tuple(blocks), _folded(entries), amounts)


def _times(entry: ValueEntry, count: int) -> float | None:
    return None if entry.seconds is None else entry.seconds * count


def _folded(entries: Sequence[ValueEntry]) -> tuple[ValueEntry, ...]:
    """Entries that agree in all but their place are one, at the place of the first."""
    return tuple(
        evolve(entry, bytes=entry.bytes * count, flops=entry.flops * count, count=count, seconds=_times(entry, count))
        for entry, count in Counter(entries).items()
    )
