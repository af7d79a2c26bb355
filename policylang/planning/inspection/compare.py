"""Two plans on one graph: the nodes whose decision changes, by rule and block, and what the change costs and saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from attrs import evolve, field, frozen

from policylang.graph.facts import Facts, storage_roots, uncounted_operators
from policylang.graph.schedule import Schedule, StepKind
from policylang.planning.graph_edit import Edit
from policylang.planning.inspection.communication import collective_rows
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.order.rematerialised import rematerialised
from policylang.planning.plan import ExpectationOutcome, Plan
from policylang.planning.value_outcome import Decision, Why
from policylang.simulation.streams import in_flight, streams_of

_LAST_RUN = int(StepKind.SECOND_RUN)
Place = tuple[str, str]
"""The node that computes next when a collective starts, and when it has been awaited."""


@frozen
class OrderFigures:
    """The collectives of one plan."""

    collectives: int
    buckets: int
    in_flight_bytes: int
    """Started and not awaited, where that is most."""


@frozen
class OrderChanges:
    """Collectives by the names that they have without any bucket, in the order of the graph."""

    old: OrderFigures
    new: OrderFigures
    joined: tuple[str, ...]
    """Those that are in a bucket now, and were in none or in one with others."""
    parted: tuple[str, ...]
    """Those that were in a bucket, and are alone now."""
    starts: tuple[str, ...]
    """All others that start elsewhere."""
    awaited: tuple[str, ...]
    """All others that are awaited elsewhere."""

    @property
    def same(self) -> bool:
        return not (self.joined or self.parted or self.starts or self.awaited)


@frozen
class _Ordered:
    figures: OrderFigures
    buckets: Mapping[str, tuple[str, ...]]
    """Member to all members."""
    places: Mapping[str, Place]


def order_changes(old: Plan, new: Plan) -> OrderChanges | None:
    """None where neither policy schedules anything. Linear in nodes and edges."""
    if old.order is None and new.order is None:
        return None
    before, after = _ordered(old), _ordered(new)
    names = list(dict.fromkeys((*before.places, *after.places)))
    joined = tuple(name for name in names if name in after.buckets and after.buckets[name] != before.buckets.get(name))
    parted = tuple(name for name in names if name in before.buckets and name not in after.buckets)
    others = {*joined, *parted}
    alike = [name for name in names if name in before.places and name in after.places and name not in others]
    moved = [(name, before.places[name], after.places[name]) for name in alike]
    return OrderChanges(
        old=before.figures,
        new=after.figures,
        joined=joined,
        parted=parted,
        starts=tuple(name for name, was, now in moved if was[0] != now[0]),
        awaited=tuple(name for name, was, now in moved if was[1] != now[1]),
    )


def _ordered(plan: Plan) -> _Ordered:
    done: tuple[Edit, ...] = ()
    if plan.order is None:
        ran = rematerialised(plan.facts, plan.schedule)
        facts, schedule = ran.facts, ran.schedule
    else:
        facts, schedule, done = plan.order.facts, plan.order.schedule, plan.order.edits.done
    places = places_of(facts, schedule)
    buckets: dict[str, tuple[str, ...]] = {}
    for edit in done:
        made = [node.name for node in edit.nodes if node.name in places]
        for member in edit.collectives:
            buckets[member] = edit.collectives
            if made:
                places[member] = places[made[0]]
        for name in made:
            del places[name]
    sent = in_flight(facts, schedule)
    figures = OrderFigures(len(collective_rows(facts, schedule)), len(done), max(sent, default=0))
    return _Ordered(figures, buckets, places)


def places_of(facts: Facts, schedule: Schedule) -> dict[str, Place]:
    """From the end on, so that the node that computes next is known."""
    streams, roots, names = streams_of(facts), storage_roots(facts), facts.names
    starts: dict[str, str] = {}
    awaited: dict[str, str] = {}
    coming = ""
    for kind, row in zip(reversed(schedule.kinds), reversed(schedule.rows), strict=True):
        if kind > _LAST_RUN:
            continue
        if row in streams.started:
            starts[names[row]] = coming
        elif roots[row] == row:
            coming = names[row]
        for each in streams.awaited.get(row, ()):
            awaited[names[each]] = coming
    return {name: (starts[name], awaited.get(name, "")) for name in reversed(starts)}


OUTSIDE = "outside every block"


@frozen
class Figures:
    """The cost of a plan. Bytes and FLOPs are of what is decided: lower bounds where min-cut decides the rest."""

    saved_bytes: int
    recomputed_flops: int
    peak_bytes: int
    settled: bool
    uncounted: dict[str, int]
    """The recomputed operators that no FLOP formula counts, and how many calls."""
    expectations: tuple[ExpectationOutcome, ...] = ()
    device: str | None = None
    """The device of the seconds; None without one, as they are then."""
    forward_seconds: float | None = None
    recomputed_seconds: float | None = None
    step_seconds: float | None = None
    exposed_seconds: float | None = None
    """Time of the step in which computation waits for a collective or a copy."""
    priced_by_bytes: Mapping[str, int] = field(factory=dict)
    """The operators whose time is that of their bytes for want of a FLOP formula, and how many calls."""


@frozen
class Decider:
    """The rule, or other cause, that decides a group of nodes in one of the plans."""

    action: str
    """As the language writes it; ``auto`` where PyTorch's partitioner decides, empty where there is no such node."""
    source: str | None
    """``file:line`` of the rule, None where no rule decides."""
    text: str
    """The rule, or what else decides."""


@frozen
class Change:
    """Decisions that change in the same way. An operator and the ``getitem`` nodes that read it are one decision."""

    old: Decider
    new: Decider
    names: tuple[str, ...] = field(repr=False)
    """The nodes, in graph order."""
    blocks: tuple[tuple[str, int], ...]
    """The number of nodes in each block, by the block's path, in graph order."""


@frozen
class PlanComparison:
    old: Figures
    new: Figures
    decisions: int
    """The number of decisions."""
    changes: tuple[Change, ...]
    """In the order of the first node of each."""
    order: OrderChanges | None = None
    """Changes of the collectives; None where neither policy schedules any."""

    @property
    def same(self) -> bool:
        """True if nothing is decided otherwise, and no collective runs elsewhere."""
        return not self.changes and (self.order is None or self.order.same)

    @property
    def changed(self) -> int:
        return sum(len(change.names) for change in self.changes)


@frozen
class _Decided:
    """One node as a plan has it."""

    side: Decider
    block: str


def compare(old: Plan, new: Plan) -> PlanComparison:
    """Nodes are the same where their names are: a plan that rewrites collectives has other nodes than one that does
    not. What decides takes no part: a rule that moved and decides as before is no change."""
    before, after = _decided(old), _decided(new)
    names = dict.fromkeys((*before, *after))
    groups: dict[tuple[Decider, Decider], dict[str, str]] = {}  # the names, each with its block
    nowhere = _Decided(Decider("", None, "not in the graph"), OUTSIDE)
    for name in names:
        left, right = before.get(name, nowhere), after.get(name, nowhere)
        if left.side.action != right.side.action:
            groups.setdefault((left.side, right.side), {})[name] = (right if name in after else left).block
    changes = tuple(
        Change(*sides, tuple(found), tuple(Counter(found.values()).items())) for sides, found in groups.items()
    )
    return PlanComparison(figures(old), figures(new), len(names), changes, order_changes(old, new))


def figures(plan: Plan) -> Figures:
    """The cost of a plan on its graph."""
    outcome = saved_and_recomputed(plan)
    peak = plan.peak
    saved, again = outcome.saved_bytes, outcome.recomputed_flops
    missing = uncounted_operators(plan.facts, outcome.recomputed) or {}
    found = Figures(saved, again, peak.bytes, outcome.final, missing, plan.expectations)
    time = plan.shown_step_time
    if plan.shown_times is None or time is None:
        return found
    return evolve(
        found,
        device=plan.shown_times.device.name,
        forward_seconds=time.forward,
        recomputed_seconds=time.recomputed,
        step_seconds=time.step,
        exposed_seconds=time.exposed,
        priced_by_bytes=plan.shown_times.uncounted,
    )


def folded(blocks: Iterable[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Neighbours of the same count together: the first name, how many blocks, and the count in each."""
    found: list[tuple[str, int, int]] = []
    for name, count in blocks:
        if found and found[-1][2] == count and OUTSIDE not in (name, found[-1][0]):
            found[-1] = (found[-1][0], found[-1][1] + 1, count)
        else:
            found.append((name, 1, count))
    return found


def _decided(plan: Plan) -> dict[str, _Decided]:
    """Owner's name to what decides it."""
    facts, found = plan.facts, {}
    known: dict[tuple[int, int], _Decided] = {}  # decisions are few shared objects
    for row in facts.forward:
        decision = plan.decisions[row]
        if facts.owners[row] != row or decision is None:
            continue
        block = plan.block_of[row]
        key = id(decision), block
        if key not in known:
            known[key] = _Decided(_side(plan, decision), plan.block_names[block] if block >= 0 else OUTSIDE)
        found[facts.names[row]] = known[key]
    return found


def _side(plan: Plan, decision: Decision) -> Decider:
    action = "auto" if decision.action is None else decision.action.word
    if decision.rule is not None:
        rule = plan.policy.rules[decision.rule]
        return Decider(action, rule.source, f"{rule.text} ({decision.reason})" if decision.reason else rule.text)
    if decision.why is Why.UNDECIDED:
        return Decider(action, None, f"undecided -> {plan.undecided}")
    return Decider(action, None, decision.reason)
