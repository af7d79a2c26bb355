"""A plan block by block: which values are saved and recomputed, what each costs, which line of the policy decided.

Equal blocks are one *group*: the same sequence of operators, modules, shapes, decisions and deciding lines. Values left
to PyTorch's partitioner count as saved, and are listed separately.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import fsum

from attrs import evolve, field, frozen

from policylang.graph.facts import Facts, uncounted_operators
from policylang.graph.schedule import Schedule
from policylang.language.cancellation import check_cancelled
from policylang.language.shown import folded_names
from policylang.operators.names import GETITEM
from policylang.planning.inspection.communication import Communication, communication
from policylang.planning.inspection.worth import SAVED, a_gib, as_counted, time_difference, time_of_step
from policylang.planning.liveness import BackwardCost, counted_by_data, saved_and_recomputed
from policylang.planning.plan import Plan, schedule_of
from policylang.planning.value_outcome import KEPT, LEFT_TO_MIN_CUT, Held, Outcome, is_open, saved_bytes
from policylang.simulation.memory import Peak, Timeline, peak_of, simulate
from policylang.simulation.streams import StepTime

OUTSIDE = "outside the blocks"


@frozen
class ValueEntry:
    """One value that the backward needs. Where several follow from the same in a block, ``count`` of them are one."""

    outcome: Outcome
    operator: str
    module: str
    """Relative to the block."""
    shape: tuple[int, ...] | None
    dtype: str
    source: str | None
    """``file:line`` of the rule that decided, None where none did."""
    reason: str
    bytes: int
    """For all ``count`` values. Memory that several saved values alias counts for the first of them."""
    flops: int
    """Recomputed FLOPs."""
    count: int = 1
    uncounted: str = ""
    """The operators whose work is not in :attr:`flops`, of what is recomputed."""
    seconds: float | None = None
    """Recomputed time; None without a device."""

    @property
    def is_free(self) -> bool:
        """True if it is recomputed and takes neither memory nor work, as a view."""
        costs = self.bytes or self.flops or self.uncounted or self.seconds
        return self.outcome.held is Held.NOWHERE and not costs


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
    """The recomputations one after the other; None without a device."""


@frozen
class BlockGroup:
    """Blocks that are all alike; ``entries`` and ``amounts`` are those of one of them."""

    label: str
    """``model.layers.1–31``."""
    blocks: tuple[int, ...]
    """Numbers of the blocks; empty for nodes outside every block."""
    amounts: Amounts
    entries: tuple[ValueEntry, ...] = ()

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
    """The graph of the schedule and the timeline: the plan's, or, if the policy schedules, the rematerialised graph."""
    time: StepTime | None = None
    """None without a device."""


@frozen(eq=False)
class Breakdown:
    plan: Plan
    groups: tuple[BlockGroup, ...]
    """In the order of their first block; the nodes outside the blocks come last."""
    under: Scenario
    """The step under the policy."""
    without: Scenario
    """The step in which nothing is recomputed: everything that the backward reads is kept."""
    forward_flops: int
    outcomes: Sequence[Outcome | None]
    """By node; None for a value that the backward does not need."""
    uncounted: Mapping[str, int] | None
    """The operators of the forward that could do matrix work and that no FLOP formula counts, and how many calls; None
    if an older snapshot lacks it."""
    uncounted_again: Mapping[str, int] | None
    """The recomputed ones among them."""
    communication: Communication | None = None
    """The collectives in the order of the scheduling lines; None where the policy has none."""

    @property
    def forward_seconds(self) -> float | None:
        """The forward's operators, each run once; None without a device."""
        return None if self.under.time is None else self.under.time.forward

    @property
    def seconds_per_gib(self) -> float | None:
        """The price of recomputation: time of the step for each GiB that its peak is lower; None without a device, and
        where it is not lower."""
        under, without = self.under, self.without
        freed = without.peak.bytes - under.peak.bytes
        if under.time is None or without.time is None or freed <= 0:
            return None
        return a_gib(max(time_difference(under.time.step, without.time.step), 0.0), freed)

    @property
    def notes(self) -> tuple[str, ...]:
        """Limits of the figures."""
        plan = self.plan
        saved = [row for row, outcome in enumerate(self.outcomes) if outcome is not None and outcome.on_device]
        by_data = counted_by_data(plan.facts, saved)
        others = by_data or counted_by_data(plan.facts, plan.facts.forward, added_up=False)
        said = others and f"{'saved' if by_data else 'the peak'} counts {others}"
        return (*((_AS_IN_THE_GRAPH,) if plan.checkpoints is not None else ()), *((said,) if said else ()))


def breakdown(plan: Plan) -> Breakdown:
    """A few passes over the graph; needs no torch."""
    needs = saved_and_recomputed(plan, as_counted(plan.decisions))
    check_cancelled()
    outcomes: list[Outcome | None] = [None] * len(plan.facts)
    for outcome, rows in needs.rows.items():
        for row in rows:
            outcomes[row] = LEFT_TO_MIN_CUT if outcome is KEPT and is_open(plan.decisions[row]) else outcome
    everything = [None if decision is None else SAVED for decision in plan.decisions]
    whole = saved_and_recomputed(evolve(plan, checkpoints=None), everything)
    ordered = communication(plan)
    check_cancelled()
    under = _scenario(plan, plan.schedule, needs, outcomes)
    return Breakdown(
        plan=plan,
        groups=_groups(plan, needs, outcomes),
        under=under if ordered is None else _in_order(under, ordered),
        without=_scenario(plan, schedule_of(plan.facts, everything), whole, ()),
        forward_flops=needs.forward("flops")[0],
        outcomes=outcomes,
        uncounted=uncounted_operators(plan.facts, plan.facts.forward),
        uncounted_again=uncounted_operators(plan.facts, needs.recomputed),
        communication=ordered,
    )


def _scenario(plan: Plan, schedule: Schedule, needs: BackwardCost, outcomes: Sequence[Outcome | None]) -> Scenario:
    timeline, time = simulate(plan.facts, schedule), time_of_step(plan, schedule)
    # Other saved values may alias the same memory: open are only the bytes that go if the open values do.
    closed = [row for row in needs.saved if not outcomes or outcomes[row] is not LEFT_TO_MIN_CUT]
    rest = (
        needs.saved_bytes if len(closed) == len(needs.saved) else sum(saved_bytes(plan.facts, closed, plan.decisions))
    )
    amounts = Amounts(
        saved=len(needs.saved),
        saved_bytes=needs.saved_bytes,
        open_bytes=needs.saved_bytes - rest,
        recomputed=len(needs.recomputed),
        recomputed_bytes=needs.recomputed_bytes,
        recomputed_flops=needs.recomputed_flops,
        offloaded=len(needs.offloaded),
        offloaded_bytes=needs.offloaded_bytes,
        recomputed_seconds=None if time is None else time.recomputed,
    )
    return Scenario(amounts, peak_of(timeline, plan.facts), timeline, schedule, plan.facts, time)


def _in_order(scenario: Scenario, found: Communication) -> Scenario:
    """The scenario with the same decisions, in the order of the scheduling lines."""
    step, time = found.planned, scenario.time
    if time is not None and step.lanes is not None:
        time = evolve(time, step=step.lanes.step, exposed=step.lanes.exposed)
    return evolve(scenario, peak=step.peak, timeline=step.timeline, schedule=step.schedule, facts=step.facts, time=time)


# --- blocks --------------------------------------------------------------------------------------------------------


def _groups(plan: Plan, needs: BackwardCost, outcomes: Sequence[Outcome | None]) -> tuple[BlockGroup, ...]:
    timed, facts = plan.shown_times is not None, plan.facts
    entries: list[list[ValueEntry]] = [[] for _ in range(len(plan.block_names) + 1)]
    sizes: dict[int, int] = {}
    for each, rows in reversed([*needs.rows.items()]):  # what a checkpoint saves in place of offloading counts as saved
        amounts = zip(each.kept_bytes(facts, rows), each.recomputed_bytes(facts, rows), strict=True)
        sizes.update(zip(rows, map(sum, amounts), strict=True))
    for row, outcome in enumerate(outcomes):
        if outcome is not None:
            block = plan.block_of[outcome.place(facts, row)] if plan.block_names else -1
            entries[block].append(_entry(plan, row, outcome, block, sizes[row]))
    alike = defaultdict[tuple[ValueEntry, ...], list[int]](list)
    for block in range(len(plan.block_names)):
        alike[tuple(entries[block])].append(block)
    groups = [(folded_names([plan.block_names[block] for block in rows]), rows, same) for same, rows in alike.items()]
    if entries[-1]:
        groups.append((OUTSIDE if plan.block_names else "the graph", [], tuple(entries[-1])))
    return tuple(
        BlockGroup(label, tuple(blocks), _amounts(((entry, 1) for entry in same), timed=timed), _folded(same))
        for label, blocks, same in groups
    )


def _entry(plan: Plan, row: int, outcome: Outcome, block: int, size: int) -> ValueEntry:
    facts, decision, again = plan.facts, plan.decisions[row], outcome.held is Held.NOWHERE
    module = facts.modules[row] or facts.modules[facts.owners[row]]
    rule, name = plan.rule_of(row), plan.block_names[block] if block >= 0 else ""
    return ValueEntry(
        outcome=outcome,
        operator=operator_of(facts, row),
        module="" if module == name else module.removeprefix(f"{name}."),
        shape=facts.shapes[row],
        dtype=facts.dtypes[row],
        source=None if rule is None else rule.source,
        reason="" if decision is None else decision.reason,
        bytes=size,
        flops=facts.flops[row] if again else 0,
        uncounted=facts.uncounted[row] if again and facts.uncounted else "",
        seconds=plan.shown_times.seconds[row] if again and plan.shown_times is not None else None,
    )


def operator_of(facts: Facts, row: int) -> str:
    """The operator that makes a value: of a ``getitem`` the one that it reads."""
    return facts.targets[facts.owners[row] if facts.targets[row] == GETITEM else row]


def _amounts(entries: Iterable[tuple[ValueEntry, int]], *, timed: bool) -> Amounts:
    """Sum entries, each with how often it counts."""
    counts, sizes = Counter[Held](), Counter[Held]()
    flops, seconds = 0, list[float]()
    for each, times in entries:
        counts[each.outcome.held] += each.count * times
        sizes[each.outcome.held] += each.bytes * times
        flops += each.flops * times
        seconds.append((each.seconds or 0.0) * times)
    return Amounts(
        saved=counts[Held.DEVICE] + counts[Held.UNDECIDED],
        saved_bytes=sizes[Held.DEVICE] + sizes[Held.UNDECIDED],
        open_bytes=sizes[Held.UNDECIDED],
        recomputed=counts[Held.NOWHERE],
        recomputed_bytes=sizes[Held.NOWHERE],
        recomputed_flops=flops,
        offloaded=counts[Held.HOST],
        offloaded_bytes=sizes[Held.HOST],
        recomputed_seconds=fsum(seconds) if timed else None,
    )


def _folded(entries: Sequence[ValueEntry]) -> tuple[ValueEntry, ...]:
    """Entries that agree in all but their place are one, at the place of the first."""
    return tuple(
        evolve(
            entry,
            bytes=entry.bytes * count,
            flops=entry.flops * count,
            count=count,
            seconds=None if entry.seconds is None else entry.seconds * count,
        )
        for entry, count in Counter(entries).items()
    )


# --- rules ---------------------------------------------------------------------------------------------------------


@frozen
class RuleAmounts:
    amounts: Amounts
    """All blocks together."""
    groups: tuple[BlockGroup, ...]
    """Blocks in which it keeps and recomputes the same amounts, in the order of the first; only where it decides a
    value that the backward needs."""


def amounts_of_rules(found: Breakdown) -> dict[str, RuleAmounts]:
    """The amounts of the rules that begin at a ``file:line``, mostly one. What is left to PyTorch counts as saved. A
    line without values that the backward needs is not there."""
    lines = defaultdict[str, dict[int, list[ValueEntry]]](dict)
    for number, group in enumerate(found.groups):
        for entry in group.entries:
            if entry.source is not None:
                lines[entry.source].setdefault(number, []).append(entry)
    return {source: _rule(found, mine) for source, mine in lines.items()}


def _rule(found: Breakdown, mine: Mapping[int, Sequence[ValueEntry]]) -> RuleAmounts:
    """``mine``: the entries that a line decides, by the number of their group."""
    timed, names = found.plan.shown_times is not None, found.plan.block_names
    everything = [(each, found.groups[at].times) for at, entries in mine.items() for each in entries]
    alike = defaultdict[Amounts, list[int]](list)
    rest: list[BlockGroup] = []
    for at, entries in mine.items():
        group = found.groups[at]
        amounts = _amounts(((each, 1) for each in entries), timed=timed)
        if group.blocks:
            alike[amounts] += group.blocks
        else:
            rest.append(BlockGroup(group.label, (), amounts))
    inside = [(tuple(sorted(blocks)), amounts) for amounts, blocks in alike.items()]
    groups = [
        BlockGroup(folded_names([names[block] for block in blocks]), blocks, amounts)
        for blocks, amounts in sorted(inside, key=lambda each: each[0])
    ]
    return RuleAmounts(_amounts(everything, timed=timed), (*groups, *rest))
