"""A graph's contents (``policylang show``), and the differences of two plans of one graph (``policylang diff``)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from attrs import define, evolve, field, frozen

from policylang.graph.blocks import OUTSIDE, BlockTable
from policylang.graph.facts import Facts, Flag, Phase, uncounted_operators
from policylang.language.globs import NameGlob, PathGlob
from policylang.planning.inspection.communication import CollectivePlace, collective_rows, places_of
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.order.rematerialised import rematerialised
from policylang.planning.plan import ExpectationOutcome, Plan
from policylang.planning.schedule import build_schedule
from policylang.planning.selection.selectors import split_target
from policylang.planning.value_outcome import Decision, Why, own_bytes
from policylang.simulation.node_times import NodeTimes
from policylang.simulation.streams import StepTime, in_flight, step_time

PHASES = {phase: phase.name.lower() for phase in Phase}


@define
class Totals:
    """The forward and backward calls of a group of nodes. Bytes and FLOPs are those of the forward; bytes are of values
    that allocate memory, so that a view counts nothing."""

    forward: int = 0
    backward: int = 0
    bytes: int = 0
    flops: int = 0
    uncounted_calls: int | None = 0
    """Forward calls of operators that no FLOP formula counts; None if an older snapshot lacks it."""
    seconds: float | None = None
    """The forward calls; None without a device."""
    backward_seconds: float | None = None

    @property
    def time(self) -> float:
        """All of it; 0 without a device, so that it decides no order."""
        return (self.seconds or 0.0) + (self.backward_seconds or 0.0)

    def add(self, facts: Facts, row: int, seconds: float) -> None:
        """Add a call, with its time on the device."""
        if facts.phases[row] != Phase.FORWARD:
            self.backward += 1
            if self.backward_seconds is not None:
                self.backward_seconds += seconds
            return
        self.forward += 1
        self.bytes += own_bytes(facts, row)
        self.flops += facts.flops[row]
        if self.seconds is not None:
            self.seconds += seconds
        if not facts.uncounted:
            self.uncounted_calls = None
        elif self.uncounted_calls is not None:
            self.uncounted_calls += bool(facts.uncounted[row])


@frozen
class GraphOverview:
    """The nodes that were asked for, counted."""

    rows: Sequence[int] = field(repr=False)
    phases: tuple[tuple[str, int], ...]
    """Nodes by phase, in the order of the phases; none of a phase without nodes."""
    total: Totals
    uncounted: Mapping[str, int] | None
    """The forward's operators of matrix work without FLOP formula, and how many calls; None if a snapshot lacks it."""
    blocks: tuple[tuple[str | None, Totals], ...]
    """By path, in graph order; the nodes outside every block last, under None."""
    operators: tuple[tuple[str, Totals], ...]
    """On a device those that take longest first; else those with the most bytes, then those with the most calls."""
    modules: tuple[tuple[str, str, Totals], ...]
    """Module, operator and totals, for the forward; modules, and the operators of each, in graph order. Modules that
    differ in numbers alone are one, with ``*`` for each number. On a device, by time."""
    times: NodeTimes | None = None
    """The whole graph; None without a device."""
    step: StepTime | None = None
    """The whole graph as traced, nothing recomputed; None without a device, and for a graph without collectives."""


def overview(facts: Facts, blocks: BlockTable, rows: Sequence[int], times: NodeTimes | None = None) -> GraphOverview:
    """One pass over the nodes."""
    zero = None if times is None else 0.0
    new = partial(Totals, seconds=zero, backward_seconds=zero)
    by_phase = dict.fromkeys(Phase, 0)
    by_block, by_operator = defaultdict[int, Totals](new), defaultdict[str, Totals](new)
    by_module = defaultdict[str, defaultdict[str, Totals]](lambda: defaultdict(new))
    paths = defaultdict[str, set[str]](set)
    total = new()
    for row in rows:
        phase = Phase(facts.phases[row])
        by_phase[phase] += 1
        if facts.ops[row] != "call_function":
            continue
        module, target = facts.modules[row] or facts.modules[facts.owners[row]], facts.targets[row]
        sums = [total, by_block[blocks.block_of[row]], by_operator[target]]
        if phase == Phase.FORWARD:
            folded = _folded(module)
            paths[folded].add(module)
            sums.append(by_module[folded][target])
        for each in sums:
            each.add(facts, row, 0.0 if times is None else times.seconds[row])
    slowest = sorted(by_module.items(), key=lambda each: -sum(sums.time for sums in each[1].values()))
    return GraphOverview(
        rows=rows,
        phases=tuple((PHASES[phase], count) for phase, count in by_phase.items() if count),
        total=total,
        uncounted=uncounted_operators(facts, (row for row in rows if facts.phases[row] == Phase.FORWARD)),
        blocks=tuple(
            (None if block == OUTSIDE else blocks.names[block], sums)
            for block, sums in sorted(by_block.items(), key=lambda each: (each[0] == OUTSIDE, each[0]))
        ),
        operators=tuple(sorted(by_operator.items(), key=_rank)),
        modules=tuple(
            (module if len(paths[module]) > 1 else next(iter(paths[module])), target, sums)
            for module, calls in slowest
            for target, sums in sorted(calls.items(), key=lambda each: -each[1].time)
        ),
        times=times,
        step=_step(facts, times),
    )


def _step(facts: Facts, times: NodeTimes | None) -> StepTime | None:
    if times is None or not any(flag & Flag.COLLECTIVE for flag in facts.flags):
        return None
    return step_time(facts, build_schedule(facts, ()), times)


def _rank(item: tuple[str, Totals]) -> tuple[float, int, int, str]:
    name, sums = item
    return -sums.time, -sums.bytes, -(sums.forward + sums.backward), name


def entries(
    facts: Facts, blocks: BlockTable, rows: Iterable[int], times: NodeTimes | None = None
) -> Iterator[dict[str, Any]]:
    """Some nodes, in order, as a program reads them.

    ``operator`` is the operator in full; of a node that calls none its kind: ``placeholder``, ``get_attr``, ``output``.
    ``block`` is None outside every block, ``seconds`` without a device. The ``bytes`` are those of all the tensors that
    it returns: a view counts its size, though the memory is another node's. ``uncounted``, where it is there, names the
    operators of the call whose work is not in ``flops``.
    """
    for row in rows:
        block = blocks.block_of[row]
        yield {
            "name": facts.names[row],
            "operator": facts.targets[row] or facts.ops[row],
            "module": facts.modules[row] or facts.modules[facts.owners[row]],
            "block": None if block == OUTSIDE else blocks.names[block],
            "phase": PHASES[Phase(facts.phases[row])],
            "bytes": facts.bytes[row],
            "flops": facts.flops[row],
            "seconds": None if times is None else times.seconds[row],
            **({"uncounted": facts.uncounted[row]} if facts.uncounted and facts.uncounted[row] else {}),
        }


def rows_asked(facts: Facts, modules: Sequence[str] = (), operators: Sequence[str] = ()) -> list[int]:
    """The nodes in one of some modules (as ``in`` reads a glob) that call one of some operators; empty means any."""
    found: Iterable[int] = range(len(facts))
    if modules:
        covers = _any([PathGlob(each).covers for each in modules])
        found = (row for row in found if covers(facts.modules[row] or facts.modules[facts.owners[row]]))
    if operators:
        calls = _any([_names(each) for each in operators])
        found = (row for row in found if facts.targets[row] and calls(facts.targets[row]))
    return list(found)


def _any(tests: Sequence[Callable[[str], bool]]) -> Callable[[str], bool]:
    return cache(lambda text: any(test(text) for test in tests))


def _names(glob: str) -> Callable[[str], bool]:
    """True if a glob is an operator's name: in full, without the overload, or without the namespace as well."""
    matches = NameGlob(glob).matches

    def test(target: str) -> bool:
        namespace, name, overload = split_target(target)
        return any(map(matches, (target, f"{namespace}.{name}", name, f"{name}.{overload}")))

    return test


@cache
def _folded(module: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


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
    """Collectives that are in a bucket now, and were in none or in one with others."""
    parted: tuple[str, ...]
    """Collectives that were in a bucket, and are alone now."""
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
    starts = tuple(name for name, was, now in moved if was.before != now.before)
    awaited = tuple(name for name, was, now in moved if was.awaited_before != now.awaited_before)
    return OrderChanges(old=old_figures, new=new_figures, joined=joined, parted=parted, starts=starts, awaited=awaited)


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


NO_BLOCK = "outside every block"


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
    """The action in the words of the language; ``auto`` where PyTorch's partitioner decides, empty where there is no
    such node."""
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
    nowhere = Decider("", None, "not in the graph"), NO_BLOCK
    for name in names:
        (left, was_in), (right, is_in) = before.get(name, nowhere), after.get(name, nowhere)
        if left.action != right.action:
            groups.setdefault((left, right), {})[name] = is_in if name in after else was_in
    counted = ((sides, tuple(found), Counter(found.values())) for sides, found in groups.items())
    changes = tuple(Change(*sides, names, tuple(counts.items())) for sides, names, counts in counted)
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
        if found and found[-1][2] == count and NO_BLOCK not in (name, found[-1][0]):
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
            found[facts.names[row]] = side, plan.block_names[block] if block >= 0 else NO_BLOCK
    return found


def _side(plan: Plan, decision: Decision) -> Decider:
    action = decision.word
    if decision.rule is not None:
        rule = plan.policy.rules[decision.rule]
        return Decider(action, rule.source, f"{rule.text} ({decision.reason})" if decision.reason else rule.text)
    text = f"undecided -> {plan.undecided}" if decision.why is Why.UNDECIDED else decision.reason
    return Decider(action, None, text)
