"""Liveness: which values a plan saves, recomputes or offloads for the backward, and their bytes and FLOPs.

A backward walk from what the backward reads: a value decided *save* is saved and ends the walk, a value decided
*recompute* is recomputed and needs its own inputs. Nothing else is kept, nothing else runs twice. The partitioner
takes its saved values from here, the expectations their figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from attrs import evolve, field, fields, frozen

from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, is_gradient, storage_roots
from policylang.planning.checkpoints import Checkpoints, held_and_rerun
from policylang.planning.plan import Plan
from policylang.planning.value_decision import Decision, recomputes

POSSIBLY = 1
CERTAINLY = 2


@frozen(eq=False)
class Needs:
    """What the backward comes down to on the forward side. Rows, each tuple in graph order."""

    saved: tuple[int, ...] = ()
    """Values computed by the forward and kept for the backward."""
    inputs: tuple[int, ...] = ()
    """Graph inputs and constants that the backward reads: alive anyway."""
    symbolic: tuple[int, ...] = ()
    """Sizes, computed or given: kept as numbers."""
    offloaded: tuple[int, ...] = ()
    recomputed: tuple[int, ...] = ()
    undecided: tuple[int, ...] = ()
    """Values left to PyTorch's partitioner that the backward needs, or needs if other such values are recomputed."""
    contingent: tuple[int, ...] = ()
    """Decided values that the backward needs only if one of ``undecided`` is recomputed; in none of the above."""

    @property
    def final(self) -> bool:
        """Whether nothing is left to PyTorch's partitioner."""
        return not self.undecided


@frozen(eq=False)
class ForwardTotals:
    """What the whole forward comes to, in all and block by block: what shares of it are shares of."""

    block_of: Sequence[int] = field(repr=False)
    blocks: int
    flops: int
    flops_by_block: tuple[int, ...]
    bytes: int
    """That it allocates, weights that it gathers and casts among them."""
    bytes_by_block: tuple[int, ...]
    operators: int
    """That compute: not views, pieces of a tuple, waits and sizes."""
    operators_by_block: tuple[int, ...]


_forwards: WeakKeyDictionary[Facts, ForwardTotals] = WeakKeyDictionary()
_reads: WeakKeyDictionary[Facts, bytearray] = WeakKeyDictionary()


@frozen(eq=False)
class CostedNeeds(Needs):
    """The needs of the backward with their cost. Bytes and FLOPs are of the decided part."""

    saved_bytes: int = 0
    """Of the distinct memory that ``saved`` keeps alive: two views of one value count once, as what they view. What is
    offloaded is not in it."""
    saved_bytes_by_block: tuple[int, ...] = ()
    recomputed_bytes: int = 0
    recomputed_bytes_by_block: tuple[int, ...] = ()
    recomputed_flops: int = 0
    recomputed_flops_by_block: tuple[int, ...] = ()
    recomputed_operators: int = 0
    """Of ``recomputed`` those that compute: not views, pieces of a tuple, waits and sizes."""
    recomputed_operators_by_block: tuple[int, ...] = ()
    offloaded_bytes: int = 0
    """That leave the device between their last forward and their first backward use."""
    facts: Facts = field(kw_only=True, repr=False)
    block_of: Sequence[int] = field(kw_only=True, repr=False)
    blocks: int = field(kw_only=True)

    @property
    def forward(self) -> ForwardTotals:
        """Asked for by what is a share of it alone. Worked out once for the same facts in the same blocks."""
        known = _forwards.get(self.facts)
        if known is None or known.blocks != self.blocks or (self.blocks and known.block_of != self.block_of):
            known = _forwards[self.facts] = _forward_totals(self.facts, self.block_of, self.blocks)
        return known


def saved_and_recomputed(plan: Plan, decisions: Sequence[Decision | None] | None = None) -> CostedNeeds:
    """What a save-all partition that follows the plan, or other decisions on its graph, saves and recomputes, and what
    that costs."""
    decided = plan.decisions if decisions is None else decisions
    needs = with_checkpoints(backward_needs(plan.facts, decided), plan.facts, decided, plan.checkpoints)
    return with_cost(needs, plan.facts, plan.block_of, len(plan.block_names))


def backward_needs(
    facts: Facts, decisions: Sequence[Decision | None], on_recompute: Callable[[int], None] | None = None
) -> Needs:
    """Walk the graph once, last node first, so that all readers of a value are known when it is reached.

    ``on_recompute`` is called with each row about to be recomputed, before that is final; it may put another
    decision in its place, for this row or for earlier ones.
    """
    need = bytearray(_read_by_backward(facts))
    flags, is_symbolic = facts.flags, Flag.SYMBOLIC
    found: dict[str, list[int]] = {column.name: [] for column in fields(Needs)}
    for row in range(len(facts) - 1, -1, -1):
        level = need[row]
        if not level:
            continue
        if on_recompute is not None and recomputes(decisions[row]):
            on_recompute(row)
        decision = decisions[row]
        action = None if decision is None else decision.action
        if decision is not None and (action is None or action.recomputes):
            reach = POSSIBLY if action is None else level
            for source in facts.inputs[row]:
                if need[source] < reach:
                    need[source] = reach
        if decision is not None and action is None:
            found["undecided"].append(row)
        elif flags[row] & is_symbolic:
            found["symbolic"].append(row)
        elif decision is None or action is None:
            found["inputs"].append(row)
        elif level == POSSIBLY:
            found["contingent"].append(row)
        elif action.recomputes:
            found["recomputed"].append(row)
        elif action.offloads:
            found["offloaded"].append(row)
        else:
            found["saved"].append(row)
    return Needs(**{name: tuple(reversed(rows)) for name, rows in found.items()})


def with_checkpoints(
    needs: Needs, facts: Facts, decisions: Sequence[Decision | None], checkpoints: Checkpoints | None
) -> Needs:
    """With what checkpoints in eager hold and run again, where there are any."""
    if checkpoints is None:
        return needs
    saved, again = held_and_rerun(facts, decisions, checkpoints)
    return evolve(needs, saved=saved, recomputed=again)


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
                if phases[source] == Phase.FORWARD or (
                    phases[source] == Phase.INPUT and facts.input_kinds[source] != InputKind.TANGENT
                ):
                    need[source] = CERTAINLY
        elif phases[row] == Phase.OUTPUT and facts.kind is GraphKind.JOINT:
            for source in facts.inputs[row]:
                if is_gradient(facts, source):
                    need[source] = CERTAINLY
    _reads[facts] = need
    return need


def with_cost(needs: Needs, facts: Facts, block_of: Sequence[int], blocks: int) -> CostedNeeds:
    """Add up bytes and FLOPs, in all and by block. A saved view keeps the whole memory it looks into; one of a
    parameter or input costs nothing more."""
    roots, again, flops = storage_roots(facts), needs.recomputed, facts.flops
    kept = [root for root in dict.fromkeys(roots[row] for row in needs.saved) if facts.ops[root] == "call_function"]
    saved_bytes, saved_bytes_by_block = _total(kept, [facts.bytes[root] for root in kept], block_of, blocks)
    recomputed_bytes, recomputed_bytes_by_block = _total(again, _own_bytes(facts, again), block_of, blocks)
    recomputed_flops, recomputed_flops_by_block = _total(again, [flops[row] for row in again], block_of, blocks)
    computing = _computing(facts, again)
    recomputed_operators, recomputed_operators_by_block = _total(again, computing, block_of, blocks)
    columns: dict[str, Any] = {column.name: getattr(needs, column.name) for column in fields(Needs)}
    return CostedNeeds(
        **columns,
        saved_bytes=saved_bytes,
        saved_bytes_by_block=saved_bytes_by_block,
        recomputed_bytes=recomputed_bytes,
        recomputed_bytes_by_block=recomputed_bytes_by_block,
        recomputed_flops=recomputed_flops,
        recomputed_flops_by_block=recomputed_flops_by_block,
        recomputed_operators=recomputed_operators,
        recomputed_operators_by_block=recomputed_operators_by_block,
        offloaded_bytes=sum(facts.bytes[row] for row in needs.offloaded),
        facts=facts,
        block_of=block_of,
        blocks=blocks,
    )


def _forward_totals(facts: Facts, block_of: Sequence[int], blocks: int) -> ForwardTotals:
    rows = facts.forward
    flops, flops_by_block = _total(rows, [facts.flops[row] for row in rows], block_of, blocks)
    allocated, allocated_by_block = _total(rows, _own_bytes(facts, rows), block_of, blocks)
    operators, operators_by_block = _total(rows, _computing(facts, rows), block_of, blocks)
    return ForwardTotals(
        block_of, blocks, flops, flops_by_block, allocated, allocated_by_block, operators, operators_by_block
    )


def _total(
    rows: Sequence[int], amounts: Sequence[int], block_of: Sequence[int], blocks: int
) -> tuple[int, tuple[int, ...]]:
    """In all, and by block."""
    totals = [0] * blocks
    for row, amount in zip(rows, amounts, strict=True) if blocks else ():
        if amount and block_of[row] >= 0:
            totals[block_of[row]] += amount
    return sum(amounts), tuple(totals)


def _own_bytes(facts: Facts, rows: Sequence[int]) -> list[int]:
    return [own_bytes(facts, row) for row in rows]


def _computing(facts: Facts, rows: Sequence[int]) -> list[int]:
    """1 for an operator that computes something: no view, no size, and nothing that comes with another operator."""
    owners, flags, idle = facts.owners, facts.flags, int(Flag.VIEW | Flag.SYMBOLIC)
    return [int(owners[row] == row and not flags[row] & idle) for row in rows]


def own_bytes(facts: Facts, row: int) -> int:
    """What computing a value again allocates: nothing for a view or for a piece of an operator counted already."""
    if facts.flags[row] & Flag.VIEW or facts.owners[row] != row:
        return 0
    return facts.bytes[row]
