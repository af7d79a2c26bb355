"""A plan block by block, and at its peak: what each value costs, and which line of the policy keeps it.

Equal blocks are one *group*: the same sequence of operators, modules, shapes, decisions and deciding lines. Values left
to PyTorch's partitioner count as saved, and are listed separately. The values at the peak come from the same lifetimes
as the curve: they sum up to it exactly. A saved view's storage is listed under the line that saves the view.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import nsmallest
from math import fsum, inf
from typing import Literal, assert_never

from attrs import evolve, field, frozen

from policylang.graph.facts import Facts, InputKind, Phase, Schedule, StepKind, uncounted_operators
from policylang.language.cancellation import check_cancelled
from policylang.language.shown import folded_names, format_quantity
from policylang.operators.names import GETITEM
from policylang.planning import value_outcome
from policylang.planning.inspection.communication import Communication, communication
from policylang.planning.inspection.worth import SAVED, a_gib, as_counted, time_difference, time_of_step
from policylang.planning.liveness import BackwardCost, counted_by_data, saved_and_recomputed, sized_by_data
from policylang.planning.order.rematerialised import rematerialised
from policylang.planning.plan import Plan, schedule_of
from policylang.planning.value_outcome import KEPT, LEFT_TO_MIN_CUT, RECOMPUTED, Decision, Held, Outcome
from policylang.simulation.memory import Origin, Peak, Timeline, highest_moment, peak_of, simulate
from policylang.simulation.streams import RunLog, StepTime, walk

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
    "the operators are those of this graph: an eager checkpoint may hold a little more, where the model writes in "
    "place or autograd keeps values that a compiler drops"
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
    """The forward's operators of matrix work without FLOP formula, and how many calls; None if a snapshot lacks it."""
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
        """The price of recomputation: time of the step for each GiB off its peak; None without device or lower peak."""
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
        own = (_AS_IN_THE_GRAPH,) if plan.checkpoints is not None else ()
        if others and plan.policy.balance is not None and (found := self.saved_range) is not None:
            least, most = (None if each is None else format_quantity(each, "bytes") for each in found)
            size = most if least == most else f"{least} to {most or 'any number of bytes'}"
            by_load = f"saved is {size}, by the tokens that a rank receives"
            own = (*own, f"{by_load}; the peak is of the rank that receives the most")
        return (*own, *((said,) if said else ()))

    @property
    def saved_range(self) -> tuple[int, int | None] | None:
        """The least and the most bytes that are saved, the latter None without a known limit; None where no size of
        what is saved comes from data."""
        facts, total = self.plan.facts, self.under.amounts.saved_bytes
        rows = [row for row, outcome in enumerate(self.outcomes) if outcome is not None and outcome.on_device]
        if not (found := sized_by_data(facts, rows)):
            return None
        _, least, most = (sum(column) for column in zip(*(facts.data_sizes[row] for row in found), strict=True))
        counted = sum(facts.bytes[row] for row in found)
        limited = all(facts.data_sizes[row][2] >= 0 for row in found)
        return max(0, total - counted + least), total - counted + most if limited else None


def breakdown(plan: Plan) -> Breakdown:
    """A few passes over the graph; needs no torch."""
    needs = saved_and_recomputed(plan, as_counted(plan.decisions))
    check_cancelled()
    outcomes: list[Outcome | None] = [None] * len(plan.facts)
    for outcome, rows in needs.rows.items():
        for row in rows:
            is_left = outcome is KEPT and value_outcome.is_open(plan.decisions[row])
            outcomes[row] = LEFT_TO_MIN_CUT if is_left else outcome
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
    saved = needs.saved_bytes if len(closed) == len(needs.saved) else None
    rest = sum(value_outcome.saved_bytes(plan.facts, closed, plan.decisions)) if saved is None else saved
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
        reason="" if decision is None or rule is not None else decision.reason,
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


# --- copies --------------------------------------------------------------------------------------------------------


@frozen
class LineCopies:
    """The copies of a line to the host and back. Seconds are None without a device."""

    source: str
    """``file:line``; empty where no line decides, as for the model's own checkpoint."""
    out_bytes: int
    back_bytes: int
    """A value that several backwards read comes back for each of them."""
    hidden: float | None
    """Seconds in which copies run beside computation, or wait for each other."""
    exposed: float | None
    """Seconds in which computation waits for copies."""
    waits: Mapping[str, float]
    """By block, how long it waits; the longest first."""


def copies_of_rules(plan: Plan) -> dict[int | None, LineCopies]:
    """By rule what it moves, in the order that runs; under None what no rule decides. One pass over the steps."""
    order = plan if plan.order is None or plan.order.times is None else plan.order
    facts, schedule, log = order.facts, order.schedule, RunLog()
    times = None if plan.shown_times is None else order.times
    rules = defaultdict[int | None, list[tuple[int, StepKind, int]]](list)
    for step, (kind, row, _) in enumerate(schedule):
        if kind in (StepKind.COPY_TO_HOST, StepKind.WAIT_TO_HOST, StepKind.COPY_FROM_HOST, StepKind.WAIT_FROM_HOST):
            decision = plan.decisions[plan.facts.index[facts.names[row]]]
            rules[None if decision is None else decision.rule].append((step, StepKind(kind), facts.bytes[row]))
    if times is not None and rules:
        walk(facts, schedule, times, log)
    waited, following = dict(log.copy_waits), schedule.next_first_runs()
    found = dict[int | None, LineCopies]()
    for rule in sorted(rules, key=lambda rule: len(plan.rules) if rule is None else rule):
        kinds = (StepKind.COPY_TO_HOST, StepKind.COPY_FROM_HOST)
        out, back = (sum(size for _, kind, size in rules[rule] if kind is copy) for copy in kinds)
        waits = defaultdict[str, float](float)
        for step, _, _ in rules[rule]:
            block = order.block_of[following[step]] if order.block_names and following[step] >= 0 else -1
            waits[order.block_names[block] if block >= 0 else OUTSIDE] += waited.get(step, 0.0)
        exposed = fsum(waits.values())
        hidden = max((out + back) / ((times and times.device.host_bandwidth) or inf) - exposed, 0.0)
        longest = {block: wait for block, wait in sorted(waits.items(), key=lambda each: -each[1]) if wait}
        source = "" if rule is None else plan.policy.rules[rule].source
        seconds = (hidden, exposed) if times is not None else (None, None)
        found[rule] = LineCopies(source, out, back, seconds[0], seconds[1], longest)
    return found


# --- rules ---------------------------------------------------------------------------------------------------------


@frozen
class RuleAmounts:
    amounts: Amounts
    """All blocks together."""
    groups: tuple[BlockGroup, ...]
    """Blocks that it keeps and recomputes the same amounts in, where it decides a value that the backward needs."""


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


MOST_VALUES = 20

_INPUTS: dict[int, str] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.USER: "input",
    InputKind.TANGENT: "tangent",
}


@frozen
class Moment:
    step: int
    """Counted from 1."""
    node: str
    half: Literal["forward", "backward"]
    again: bool
    """True if it computes or fetches a forward value for the backward."""


@frozen
class AliveValue:
    """One piece of memory."""

    name: str
    """The node that allocated it."""
    bytes: int
    operator: str
    """Empty for an input of the graph."""
    module: str
    """The dotted name of a parameter or buffer."""
    block: str
    what: str
    """Why it is there: ``parameter``, ``saved``, ``recomputed``, ``in use``, …"""
    source: str | None
    """``file:line`` of the rule that decided it, None where none did."""
    rule: str
    """The rule's text; else what decided instead of one, empty where there was nothing to decide."""
    saved_as: str
    """The view for which the memory is kept."""
    made: Moment | None
    """None for what is there before the first step."""
    last: Moment | None
    """The step after which it is given back; None for what stays."""


@frozen
class AliveShare:
    """All that is alive for one reason, by one line."""

    what: str
    source: str | None
    rule: str
    count: int
    bytes: int


@frozen
class PeakValues:
    """``values`` and ``rest_bytes`` sum up to ``bytes``, and so do ``shares``."""

    bytes: int
    """The simulated peak."""
    at: Moment | None
    """None where no step needs more than what is there before the first."""
    steps: int
    """The number of steps in the schedule."""
    values: tuple[AliveValue, ...]
    rest: int
    """The number of values alive beside these."""
    rest_bytes: int
    shares: tuple[AliveShare, ...]
    """By reason and line, the largest first."""


def values_at_peak(found: Breakdown, most: int = MOST_VALUES) -> PeakValues:
    """The ``most`` largest values alive at the highest moment of the step under the policy, and all of them by line.
    What takes no memory does not count as a value."""
    facts, schedule, timeline = found.under.facts, found.under.schedule, found.under.timeline
    sizes = timeline.lifetimes.bytes
    entry = highest_moment(timeline)
    step = -1 if entry is None else timeline.steps[entry]
    alive = [at for at in timeline.lifetimes.alive_at(step) if sizes[at]]
    named = _Named(found)
    shares: dict[tuple[str, str | None, str], list[int]] = {}
    for at in alive:
        what, source, rule, _ = named.reason(at)
        shares.setdefault((what, source, rule), []).append(sizes[at])
    largest = nsmallest(most, alive, key=lambda at: (-sizes[at], at))
    total = timeline.resident if entry is None else timeline.live[entry]
    by_line = (AliveShare(*reason, len(each), sum(each)) for reason, each in shares.items())
    return PeakValues(
        bytes=total,
        at=moment_of(schedule, facts, step),
        steps=len(schedule),
        values=tuple(named.value(at) for at in largest),
        rest=len(alive) - len(largest),
        rest_bytes=sum(sizes[at] for at in alive) - sum(sizes[at] for at in largest),
        shares=tuple(sorted(by_line, key=lambda share: -share.bytes)),
    )


def moment_of(schedule: Schedule, facts: Facts, step: int) -> Moment | None:
    """None before the first step and after the last."""
    if not 0 <= step < len(schedule):
        return None
    row, backward = schedule.rows[step], schedule.regions[step] > 0
    again = backward and facts.phases[row] == Phase.FORWARD
    return Moment(step + 1, facts.names[row], "backward" if backward else "forward", again)


class _Named:
    """Memory in the words of a policy. Rows are nodes of the graph that the step runs; if scheduling lines rewrote it,
    the plan's values are found by name, and what a bucket adds has none."""

    def __init__(self, found: Breakdown) -> None:
        self.plan, self.outcomes, self.facts = found.plan, found.outcomes, found.under.facts
        order = self.plan.order if self.facts is not self.plan.facts else None
        self.block_of, self.block_names = (order or self.plan).block_of, (order or self.plan).block_names
        ran = None if order is None else rematerialised(self.plan.facts, self.plan.schedule)
        names, rows = (self.facts.names, range(len(self.facts))) if ran is None else (ran.facts.names, ran.origin)
        self.planned = dict(zip(names, rows, strict=True))
        """Node to the node of the plan's facts with the same value, first run or recomputed."""
        self.schedule, self.lifetimes = found.under.schedule, found.under.timeline.lifetimes
        self.keeper: dict[int, int] = {}  # memory → the first value that is kept in it
        roots = self.facts.storage_roots
        for row in range(len(self.facts)):
            outcome = self._outcome(row)
            if outcome is not None and outcome.on_device:
                self.keeper.setdefault(roots[row], row)

    def _recomputes(self, row: int) -> int | None:
        """The node of the plan's facts whose value a node of the step recomputes."""
        planned = self.planned.get(self.facts.names[row])
        return None if planned is None or self.plan.facts.names[planned] == self.facts.names[row] else planned

    def _outcome(self, row: int) -> Outcome | None:
        planned = self.planned.get(self.facts.names[row])
        return None if planned is None or self._recomputes(row) is not None else self.outcomes[planned]

    def reason(self, at: int) -> tuple[str, str | None, str, int]:
        """Why it is there, by which line, in its words, and the value whose decision that is."""
        facts, row = self.facts, self.lifetimes.rows[at]
        by, what = row, ""
        match Origin(self.lifetimes.origins[at]):
            case Origin.INPUT | Origin.TANGENT:
                other = "constant" if facts.ops[row] == "get_attr" else "input"
                return _INPUTS.get(facts.input_kinds[row], other), None, "", row
            case Origin.FIRST_RUN:
                if (again := self._recomputes(row)) is not None:
                    return RECOMPUTED.word, *self._line(self.plan.decisions[again]), row
                if facts.phases[row] == Phase.BACKWARD:
                    return ("returned" if self._stays(at) else "backward"), None, "", row
                by = self.keeper.get(row, row)
                outcome = self._outcome(by)
                what = "returned" if self._stays(at) else "in use"
                if outcome is not None and outcome.held is not Held.NOWHERE:
                    what = outcome.word
            case Origin.SECOND_RUN:
                what = RECOMPUTED.word
            case Origin.COPY_FROM_HOST:
                what = "copied back"
            case Origin.NARROW | Origin.WIDEN as origin:
                what = "narrowed" if origin is Origin.NARROW else "widened"
            case Origin.GENERATOR_STATE:
                what = "generator state"
            case origin:
                assert_never(origin)
        planned = self.planned.get(facts.names[by])
        return what, *self._line(None if planned is None else self.plan.decisions[planned]), by

    def _line(self, decision: Decision | None) -> tuple[str | None, str]:
        if decision is None:
            return None, ""
        if decision.rule is None:
            return None, decision.reason or f"undecided -> {self.plan.undecided}"
        rule = self.plan.policy.rules[decision.rule]
        return rule.source, f"{rule.text} ({decision.reason})" if decision.reason else rule.text

    def _stays(self, at: int) -> bool:
        return self.lifetimes.last[at] >= len(self.schedule)

    def value(self, at: int) -> AliveValue:
        facts, lifetimes = self.facts, self.lifetimes
        row = lifetimes.rows[at]
        what, source, rule, by = self.reason(at)
        is_input = facts.phases[row] == Phase.INPUT
        block = self.block_of[row] if self.block_names else -1
        return AliveValue(
            name=facts.names[row],
            bytes=lifetimes.bytes[at],
            operator="" if is_input else operator_of(facts, row),
            module=facts.input_names[row] if is_input else facts.modules[row] or facts.modules[facts.owners[row]],
            block=self.block_names[block] if block >= 0 else "",
            what=what,
            source=source,
            rule=rule,
            saved_as=facts.names[by] if by != row else "",
            made=moment_of(self.schedule, facts, lifetimes.made[at]),
            last=moment_of(self.schedule, facts, lifetimes.last[at]),
        )
