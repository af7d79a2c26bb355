"""Liveness: which values a plan saves, recomputes or offloads for the backward, and their bytes and FLOPs.

A backward walk from what the backward reads: a value decided *save* is saved and ends the walk, a value decided
*recompute* is recomputed and needs its own inputs. Nothing else is kept or recomputed. The partitioner
takes its saved values from here, the expectations their figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, Literal, assert_never
from weakref import WeakKeyDictionary

from attrs import evolve, field, fields, frozen

from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, StepKind, is_gradient
from policylang.language.shown import counted, format_quantity
from policylang.planning.plan import Plan
from policylang.planning.schedule import Checkpoints, held_and_rerun
from policylang.planning.value_outcome import (
    KEPT,
    LEFT_TO_MIN_CUT,
    ON_HOST,
    RECOMPUTED,
    Decision,
    Held,
    Outcome,
    own_bytes,
    recomputes,
    saved_as,
    saves,
)

POSSIBLY = 1
CERTAINLY = 2


@frozen(eq=False, slots=False)
class SavedForBackward:
    """The forward values that the backward needs. Nodes, each tuple in graph order."""

    rows: Mapping[Outcome, tuple[int, ...]] = field(factory=dict)
    """By outcome, the values computed by the forward that the backward needs; of those that are left to PyTorch's
    partitioner also the ones that it needs if others of them are recomputed."""
    inputs: tuple[int, ...] = ()
    """Values that the backward reads and that are alive anyway: graph inputs, constants, values that the forward
    holds."""
    symbolic: tuple[int, ...] = ()
    """Sizes, computed or given: kept as numbers."""
    contingent: tuple[int, ...] = ()
    """Decided values that are needed only if one left to the partitioner is recomputed; in none of the above."""

    @classmethod
    def of(
        cls, saved: Iterable[int] = (), recomputed: Iterable[int] = (), offloaded: Iterable[int] = ()
    ) -> SavedForBackward:
        return cls({KEPT: tuple(saved), RECOMPUTED: tuple(recomputed), ON_HOST: tuple(offloaded)})

    def held(self, where: Held) -> tuple[int, ...]:
        """The values that wait there for the backward."""
        found = [rows for outcome, rows in self.rows.items() if outcome.held is where]
        return found[0] if len(found) == 1 else tuple(sorted(chain(*found)))

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Values kept on the device."""
        return self.held(Held.DEVICE)

    @cached_property
    def offloaded(self) -> tuple[int, ...]:
        return self.held(Held.HOST)

    @cached_property
    def moved(self) -> tuple[int, ...]:
        """Values in whose place something else waits."""
        return tuple(sorted(chain(*(rows for outcome, rows in self.rows.items() if outcome.moves))))

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        return self.held(Held.NOWHERE)

    @cached_property
    def undecided(self) -> tuple[int, ...]:
        return self.held(Held.UNDECIDED)

    @property
    def all(self) -> Iterator[int]:
        """Every value computed by the forward that the backward needs or may need."""
        return chain(*self.rows.values(), self.contingent)

    @property
    def final(self) -> bool:
        """True if nothing is left to PyTorch's partitioner."""
        return not self.undecided


_reads: WeakKeyDictionary[Facts, bytearray] = WeakKeyDictionary()


@frozen(eq=False, slots=False)
class BackwardCost(SavedForBackward):
    """Saved and recomputed values with their cost. Bytes and FLOPs are of the decided part."""

    saved_bytes: int = 0
    """The distinct memory that ``saved`` keeps alive: two views of one value count once. Without offloaded values."""
    saved_bytes_by_block: tuple[int, ...] = ()
    recomputed_bytes: int = 0
    recomputed_bytes_by_block: tuple[int, ...] = ()
    recomputed_flops: int = 0
    recomputed_flops_by_block: tuple[int, ...] = ()
    recomputed_operators: int = 0
    """The operators of ``recomputed`` that compute: not views, pieces of a tuple, waits and sizes."""
    recomputed_operators_by_block: tuple[int, ...] = ()
    offloaded_bytes: int = 0
    """Bytes that leave the device between their last forward and their first backward use."""
    facts: Facts = field(kw_only=True, repr=False)
    block_of: Sequence[int] = field(kw_only=True, repr=False)
    blocks: int = field(kw_only=True)

    def forward(self, figure: Literal["bytes", "flops", "operators"]) -> tuple[int, tuple[int, ...]]:
        """A figure of the whole forward, in all and by block, which shares are taken of."""
        return _total(_amounts_of(self.facts, self.facts.forward, figure), self.block_of, self.blocks)


def saved_and_recomputed(plan: Plan, decisions: Sequence[Decision | None] | None = None) -> BackwardCost:
    """The values that a save-all partition saves and recomputes under the plan, or under other decisions, with its
    cost."""
    if decisions is not None and decisions != plan.decisions:  # a plan works out its schedule once
        plan = evolve(plan, decisions=decisions)
    needs = with_checkpoints(backward_needs(plan.facts, plan.decisions), plan.facts, plan.decisions, plan.checkpoints)
    return with_cost(as_scheduled(needs, plan), plan.facts, plan.block_of, len(plan.block_names))


def as_scheduled(needs: SavedForBackward, plan: Plan) -> SavedForBackward:
    """The needs with the recomputations of a flat graph's schedule: all views of a storage that is written in place,
    and no value that the rest of its forward holds anyway."""
    if plan.facts.kind is not GraphKind.FLAT or plan.checkpoints is not None:
        return needs
    again = frozenset(plan.schedule.rows_of(StepKind.SECOND_RUN))
    if again == frozenset(needs.recomputed):
        return needs
    held = (row not in again and recomputes(decision) for row, decision in enumerate(plan.decisions))
    decided = [None if is_held else each for is_held, each in zip(held, plan.decisions, strict=True)]
    return backward_needs(plan.facts, decided, also=again)


def backward_needs(
    facts: Facts,
    decisions: Sequence[Decision | None],
    on_recompute: Callable[[int], None] | None = None,
    also: Iterable[int] = (),
) -> SavedForBackward:
    """Walk the graph once, last node first, so that all readers of a value are known when it is reached.
    ``on_recompute`` is called with each node about to be recomputed, before that is final; it may replace the decision
    on this node or on earlier ones. ``also``: nodes that the backward needs whether or not it reads them."""
    need = bytearray(_read_by_backward(facts))
    for row in also:
        need[row] = CERTAINLY
    flags, is_symbolic = facts.flags, Flag.SYMBOLIC
    found: dict[Outcome, list[int]] = {each: [] for each in (KEPT, RECOMPUTED, ON_HOST, LEFT_TO_MIN_CUT)}
    known: dict[int, tuple[Outcome | None, bool, list[int], Decision | None]] = {}  # by id of few shared decisions
    inputs, symbolic, contingent = list[int](), list[int](), list[int]()
    for row in range(len(facts) - 1, -1, -1):
        level = need[row]
        if not level:
            continue
        if on_recompute is not None and recomputes(decisions[row]):
            on_recompute(row)
        decision = decisions[row]
        if id(decision) not in known:
            outcome = None if decision is None else decision.outcome
            is_open = outcome is not None and outcome.held is Held.UNDECIDED
            rows = inputs if outcome is None else found.setdefault(outcome, [])
            known[id(decision)] = outcome, is_open, rows, decision  # kept alive: another may not get its id
        outcome, is_open, rows, _ = known[id(decision)]
        if outcome is not None and outcome.reads_again:
            reach = POSSIBLY if is_open else level
            for source in facts.inputs[row]:
                if need[source] < reach:
                    need[source] = reach
        if flags[row] & is_symbolic and not is_open:
            symbolic.append(row)
        elif outcome is not None and level == POSSIBLY and not is_open:
            contingent.append(row)
        else:
            rows.append(row)
    kept = {outcome: tuple(reversed(rows)) for outcome, rows in found.items()}
    return SavedForBackward(kept, *(tuple(reversed(rows)) for rows in (inputs, symbolic, contingent)))


def with_checkpoints(
    needs: SavedForBackward, facts: Facts, decisions: Sequence[Decision | None], checkpoints: Checkpoints | None
) -> SavedForBackward:
    """Replace the saved and recomputed values by those of eager checkpoints, where there are any. What a traced block
    returns is saved if a rule says so: the next block's checkpoint holds it."""
    if checkpoints is None:
        return needs
    saved, moved, again = held_and_rerun(facts, decisions, checkpoints)
    others = {outcome: rows for outcome, rows in needs.rows.items() if outcome.held is not Held.DEVICE}
    handed = set[int]()
    for row in checkpoints.crossing or ():
        decision = decisions[checkpoints.inner.get(row, row)]
        by_rule = decision is not None and decision.rule is not None and saves(decision)
        if by_rule and facts.flags[row] & Flag.FORWARD_OUTPUT and row >= checkpoints.reach[checkpoints.of[row]]:
            handed.add(row)
    held = sorted(handed.union(saved))
    kept = {outcome: tuple(rows) for outcome, rows in saved_as(held, decisions, checkpoints.inner).items()}
    return evolve(needs, rows={**others, **kept, ON_HOST: moved, RECOMPUTED: again})


def _read_by_backward(facts: Facts) -> bytearray:
    """``CERTAINLY`` for every forward value and graph input that the backward, or an output of it, reads. Worked out
    once for each facts: do not change it."""
    known = _reads.get(facts)
    if known is not None:
        return known
    need = bytearray(len(facts))
    phases = facts.phases
    for row in range(len(facts)):
        if phases[row] == Phase.BACKWARD:
            for source in facts.inputs[row]:
                is_given = phases[source] == Phase.INPUT and facts.input_kinds[source] != InputKind.TANGENT
                if is_given or phases[source] == Phase.FORWARD:
                    need[source] = CERTAINLY
        elif phases[row] == Phase.OUTPUT and facts.kind is GraphKind.JOINT:
            for source in facts.inputs[row]:
                if is_gradient(facts, source):
                    need[source] = CERTAINLY
    _reads[facts] = need
    return need


def with_cost(needs: SavedForBackward, facts: Facts, block_of: Sequence[int], blocks: int) -> BackwardCost:
    """Add up bytes and FLOPs, in all and by block."""
    saved, made, moved = list[tuple[int, int]](), list[tuple[int, int]](), 0
    for outcome, rows in needs.rows.items():
        places = [outcome.place(facts, row) for row in rows]
        kept = outcome.kept_bytes(facts, rows)
        made += zip(places, outcome.recomputed_bytes(facts, rows), strict=True)
        if outcome.held is Held.DEVICE:
            saved += zip(places, kept, strict=True)
        elif outcome.held is Held.HOST:
            moved += sum(kept)
    totals: dict[str, Any] = {column.name: getattr(needs, column.name) for column in fields(SavedForBackward)}
    for name, amounts in (
        ("saved_bytes", saved),
        ("recomputed_bytes", made),
        ("recomputed_flops", _amounts_of(facts, needs.recomputed, "flops")),
        ("recomputed_operators", _amounts_of(facts, needs.recomputed, "operators")),
    ):
        totals[name], totals[f"{name}_by_block"] = _total(amounts, block_of, blocks)
    return BackwardCost(**totals, offloaded_bytes=moved, facts=facts, block_of=block_of, blocks=blocks)


def _total(amounts: Sequence[tuple[int, int]], block_of: Sequence[int], blocks: int) -> tuple[int, tuple[int, ...]]:
    """In all, and by block, of pairs of a node and its amount."""
    totals = [0] * blocks
    for row, amount in amounts if blocks else ():
        if amount and block_of[row] >= 0:
            totals[block_of[row]] += amount
    return sum(amount for _, amount in amounts), tuple(totals)


def _amounts_of(
    facts: Facts, rows: Sequence[int], figure: Literal["bytes", "flops", "operators"]
) -> list[tuple[int, int]]:
    """Nodes with their amounts: the bytes that each allocates, its FLOPs, or 1 for an operator that computes something:
    no view, no size, no piece of another operator's result."""
    match figure:
        case "bytes":
            return [(row, own_bytes(facts, row)) for row in rows]
        case "flops":
            return [(row, facts.flops[row]) for row in rows]
        case "operators":
            owners, flags, idle = facts.owners, facts.flags, int(Flag.VIEW | Flag.SYMBOLIC)
            return [(row, int(owners[row] == row and not flags[row] & idle)) for row in rows]
        case _:
            assert_never(figure)


def counted_by_data(facts: Facts, rows: Iterable[int], *, added_up: bool = True) -> str:
    """The part of a figure that is counted by a hint, as the end of a sentence; empty where their sizes are known.
    ``added_up``: whether it is the sum of their bytes."""
    found = sized_by_data(facts, rows)
    if not found:
        return ""
    told = [row for row in found if facts.data_terms and not facts.data_terms[row]]
    if told and (len(told) == len(found) or not added_up):
        return _counted_by_load(facts, told, added_up=added_up)
    hints = sorted({facts.data_sizes[row][0] for row in found})
    rows_each = f"{hints[0]:,}" if len(hints) == 1 else f"{hints[0]:,} to {hints[-1]:,}"
    text = f"{counted(len(found), 'value')} by a hint of {rows_each} rows, since their sizes come from data"
    if facts.data_terms and not told:
        text += " and no load is stated (`balance up to 2.0`)"
    if not added_up:
        return text
    counts = format_quantity(sum(facts.bytes[row] for row in found), "bytes")
    least = format_quantity(sum(facts.data_sizes[row][1] for row in found), "bytes")
    upper = [facts.data_sizes[row][2] for row in found]
    most = f"to {format_quantity(sum(upper), 'bytes')}" if min(upper) >= 0 else "without a known limit"
    return f"{text}: {counts}, which may be from {least} {most}"


def _counted_by_load(facts: Facts, rows: Sequence[int], *, added_up: bool) -> str:
    text = f"{counted(len(rows), 'value')} as on the rank that receives the most tokens"
    if not added_up:
        return text
    most, least = (format_quantity(sum(facts.data_sizes[row][at] for row in rows), "bytes") for at in (2, 1))
    return f"{text}: {most}" + (f", and {least} where the fewest are received" if least != most else "")


def sized_by_data(facts: Facts, rows: Iterable[int]) -> list[int]:
    """The nodes that allocate memory whose size comes from data, each once."""
    if not facts.data_sizes:
        return []
    roots = facts.storage_roots
    return [root for root in dict.fromkeys(roots[row] for row in rows) if facts.data_sizes[root] and facts.bytes[root]]
