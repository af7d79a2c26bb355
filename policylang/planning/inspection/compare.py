"""Two plans on one graph: the nodes whose decision changes, by rule and block, and what the change costs and saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from attrs import evolve, field, frozen

from policylang.graph.facts import uncounted_operators
from policylang.planning.inspection.communication import CollectivePlace, collective_rows, places_of
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.order.rematerialised import rematerialised
from policylang.planning.plan import ExpectationOutcome, Plan
from policylang.planning.value_outcome import Decision, Why
from policylang.simulation.streams import in_flight


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


def order_changes(old: Plan, new: Plan) -> OrderChanges | None:
    """None where neither policy schedules anything. Linear in nodes and edges."""
    if old.order is None and new.order is None:
        return None
    (old_figures, were, before), (new_figures, are, after) = _ordered(old), _ordered(new)
    names = list(dict.fromkeys((*before, *after)))
    joined = tuple(name for name in names if name in are and are[name] != were.get(name))
    parted = tuple(name for name in names if name in were and name not in are)
    others = {*joined, *parted}
    alike = [(name, before[name], after[name]) for name in names if name in before and name in after]
    moved = [each for each in alike if each[0] not in others]
    return OrderChanges(
        old=old_figures,
        new=new_figures,
        joined=joined,
        parted=parted,
        starts=tuple(name for name, was, now in moved if was.before != now.before),
        awaited=tuple(name for name, was, now in moved if was.awaited_before != now.awaited_before),
    )


def _ordered(plan: Plan) -> tuple[OrderFigures, dict[str, tuple[str, ...]], dict[str, CollectivePlace]]:
    """The figures, each bucket's members by member, and the places by the names without any bucket."""
    ran = plan.order or rematerialised(plan.facts, plan.schedule)
    done = plan.order.edits.done if plan.order is not None else ()
    places, buckets = places_of(ran.facts, ran.schedule), dict[str, tuple[str, ...]]()
    for edit in done:
        buckets |= dict.fromkeys(edit.collectives, edit.collectives)
        made = [places.pop(node.name) for node in edit.nodes if node.name in places]
        if made:
            places |= dict.fromkeys(edit.collectives, made[0])
    sent = max(in_flight(ran.facts, ran.schedule), default=0)
    return OrderFigures(len(collective_rows(ran.facts, ran.schedule)), len(done), sent), buckets, places


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


def compare(old: Plan, new: Plan) -> PlanComparison:
    """Nodes are the same where their names are: a plan that rewrites collectives has other nodes than one that does
    not. What decides takes no part: a rule that moved and decides as before is no change."""
    before, after = _decided(old), _decided(new)
    names = dict.fromkeys((*before, *after))
    groups: dict[tuple[Decider, Decider], dict[str, str]] = {}  # the names, each with its block
    nowhere = Decider("", None, "not in the graph"), OUTSIDE
    for name in names:
        (left, was_in), (right, is_in) = before.get(name, nowhere), after.get(name, nowhere)
        if left.action != right.action:
            groups.setdefault((left, right), {})[name] = is_in if name in after else was_in
    changes = tuple(
        Change(*sides, tuple(found), tuple(Counter(found.values()).items())) for sides, found in groups.items()
    )
    return PlanComparison(figures(old), figures(new), len(names), changes, order_changes(old, new))


def figures(plan: Plan) -> Figures:
    """The cost of a plan on its graph."""
    cost, times, time = saved_and_recomputed(plan), plan.shown_times, plan.shown_step_time
    found = Figures(
        saved_bytes=cost.saved_bytes,
        recomputed_flops=cost.recomputed_flops,
        peak_bytes=plan.peak.bytes,
        settled=cost.final,
        uncounted=uncounted_operators(plan.facts, cost.recomputed) or {},
        expectations=plan.expectations,
    )
    if times is None or time is None:
        return found
    return evolve(
        found,
        device=times.device.name,
        forward_seconds=time.forward,
        recomputed_seconds=time.recomputed,
        step_seconds=time.step,
        exposed_seconds=time.exposed,
        priced_by_bytes=times.uncounted,
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


def _decided(plan: Plan) -> dict[str, tuple[Decider, str]]:
    """Producer's name to what decides it, and its block."""
    facts, found = plan.facts, dict[str, tuple[Decider, str]]()
    sides: dict[int, Decider] = {}  # decisions are few shared objects
    for row in facts.forward:
        decision = plan.decisions[row]
        if facts.owners[row] == row and decision is not None:
            side = sides.get(id(decision)) or sides.setdefault(id(decision), _side(plan, decision))
            block = plan.block_of[row]
            found[facts.names[row]] = side, plan.block_names[block] if block >= 0 else OUTSIDE
    return found


def _side(plan: Plan, decision: Decision) -> Decider:
    action = "auto" if decision.action is None else decision.action.word
    if decision.rule is not None:
        rule = plan.policy.rules[decision.rule]
        return Decider(action, rule.source, f"{rule.text} ({decision.reason})" if decision.reason else rule.text)
    text = f"undecided -> {plan.undecided}" if decision.why is Why.UNDECIDED else decision.reason
    return Decider(action, None, text)
