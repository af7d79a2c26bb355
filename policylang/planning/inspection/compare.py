"""Two plans on one graph: the nodes whose decision changes, by rule and block, and what the change costs and saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from attrs import evolve, field, frozen

from policylang.graph.facts import uncounted_operators
from policylang.planning.inspection.order_changes import OrderChanges, order_changes
from policylang.planning.inspection.step_times import peak_of_plan, time_of_plan
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import ExpectationOutcome, Plan
from policylang.planning.value_outcome import Decision, Why

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
    """What the seconds are of; None without a device, as they are then."""
    forward_seconds: float | None = None
    recomputed_seconds: float | None = None
    step_seconds: float | None = None
    exposed_seconds: float | None = None
    """Of the step, in which computation waits for a collective or a copy."""
    priced_by_bytes: Mapping[str, int] = field(factory=dict)
    """The operators whose time is that of their bytes for want of a FLOP formula, and how many calls."""


@frozen
class Decider:
    """What decides a group of nodes in one of the plans."""

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
    """How many of them lie in each block, by the block's path, in graph order."""


@frozen
class PlanComparison:
    old: Figures
    new: Figures
    decisions: int
    """How many decisions there are."""
    changes: tuple[Change, ...]
    """In the order of the first node of each."""
    order: OrderChanges | None = None
    """Of the collectives; None where neither policy schedules any."""

    @property
    def same(self) -> bool:
        """Whether nothing is decided otherwise, and no collective runs elsewhere."""
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
    peak = peak_of_plan(plan)
    saved, again = outcome.saved_bytes, outcome.recomputed_flops
    missing = uncounted_operators(plan.facts, outcome.recomputed) or {}
    found = Figures(saved, again, peak.bytes, outcome.final, missing, plan.expectations)
    time = time_of_plan(plan)
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
