"""Partitions a joint graph exactly as planned: saves what the plan saves and the backward needs, and nothing else.

The order matters. The plan was made on the user's graph, and everything wrong with it raised before the graph was
touched; now equal nodes are merged, tags written, values chosen, and the graph is split by PyTorch's own extraction.
What came out is audited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve, field, frozen
from torch import fx

from policylang.audit.joint import audit, audit_copies, read_halves
from policylang.audit.order import audit_order
from policylang.audit.outcome import Audit
from policylang.backends import refusals
from policylang.backends.announcing import announce
from policylang.backends.graph_registry import CarriedOut, remember
from policylang.backends.half.path import Half, rewrite_half, unanswered, without_answered
from policylang.backends.joint import cse, finalize
from policylang.backends.joint.offload import crossings, move_across, rows_in, schedule_of_halves
from policylang.backends.joint.split import finish, split
from policylang.backends.path import raise_differences, raise_errors
from policylang.backends.runtime.groups import RankOrder
from policylang.backends.runtime.stages import collector_paused, timed
from policylang.backends.surgery import tags
from policylang.errors import PolicyMatchError
from policylang.graph import marks
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.schedule import Schedule
from policylang.language.diagnostics import Diagnostic
from policylang.planning.capabilities import JOINT
from policylang.planning.expectations.deferred import check_deferred
from policylang.planning.graph_edit import Edits
from policylang.planning.liveness import Needs, backward_needs
from policylang.planning.plan import Plan
from policylang.ranks.comparison import agree_on_collectives, is_compared
from policylang.ranks.rank_account import GraphRun
from policylang.torch_compat.inductor import settings_lines
from policylang.torch_compat.partition import cse_enabled, functorch_settings, min_cut_saved_values


@frozen(eq=False)
class Partition:
    """The two halves of a joint graph and how they came about."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    plan: Plan
    """As made on the user's graph, with every expectation checked."""
    audit: Audit
    seconds: dict[str, float] = field(factory=dict)
    """By stage, in the order they ran."""
    halves: Mapping[str, Edits] = field(factory=dict)
    """What was rewritten in the ``forward`` and in the ``backward`` once they were apart."""
    groups: tuple[RankOrder, ...] = ()
    """The process groups that were found or made for both."""
    schedule: Schedule | None = None
    """The order that both were brought into, on the rows of the plan: equal nodes merged, and min-cut asked. What was
    rewritten once they were apart is not in it."""
    orders: Mapping[str, Plan] = field(factory=dict)
    """The plans of the ``forward`` and of the ``backward``, where the policy has scheduling lines."""

    @property
    def carried_out(self) -> CarriedOut:
        """What is kept of it without its graphs."""
        return CarriedOut("joint", self.plan, self.audit, self.seconds, self.halves, self.orders)


@collector_paused()
def partition_planned(
    gm: fx.GraphModule,
    plan: Plan,
    *,
    num_fwd_outputs: int,
    static_inputs: Sequence[int],
    root: str,
    seconds: dict[str, float],
    groups: Sequence[RankOrder],
) -> Partition:
    """Split a joint graph after a plan whose rewrites are carried out and whose facts are the graph's. Changes ``gm``.

    A gather that is recomputed has fewer readers in the backward than it had in the joint graph, so each half is
    rewritten once more. The order of collectives is that of a half, and is planned on each.

    Raises ``PolicyAuditError`` where the graphs that come out do not do what the plan says, and ``PolicyMatchError``
    where min-cut, left to decide a rest, finds none that a decided recomputation allows, or decides it so that an
    expectation fails.
    """
    with timed(seconds, "cse"):
        merged = cse.eliminate(gm.graph, plan) if cse_enabled() else cse.NOTHING_MERGED
        merged_plan = finalize.resolve_offloads_again(finalize.merge(plan, merged))
    with timed(seconds, "tag"):
        tags.write(gm.graph, merged_plan)
    with timed(seconds, "choose"):
        final, needs = _choose(gm, merged_plan, num_fwd_outputs, static_inputs)
        plan, failures = check_deferred(evolve(plan, diagnostics=final.diagnostics), final, needs)
        raise_errors(failures)
    with timed(seconds, "split"):
        tags.mark_saved(gm.graph, _saved_marks(final.facts, needs))
        forward, backward = split(gm, final, needs, num_fwd_outputs=num_fwd_outputs, static_inputs=static_inputs)
    with timed(seconds, "audit"):
        found = read_halves(final, needs, forward.graph, backward.graph, num_fwd_outputs=num_fwd_outputs)
        result = audit(final, needs, found)
    raise_differences(result.differences)
    crossing = crossings(final.facts, needs.offloaded, forward.graph, backward.graph, after=num_fwd_outputs)
    halves: tuple[Half, ...] = ()
    graphs = (forward.graph, backward.graph)
    rows = [rows_in(final, half, backward=half is graphs[1]) for half in graphs if plan.policy.orders]
    if plan.policy.rewrites or plan.policy.orders:
        with timed(seconds, "rewrite halves"):
            kinds = ((forward, GraphKind.FORWARD), (backward, GraphKind.BACKWARD))
            halves = tuple(rewrite_half(half, plan, kind, root=root) for half, kind in kinds)
        plan = evolve(plan, diagnostics=without_answered(plan.diagnostics, halves))
        raise_errors(unanswered(plan, halves))
    schedule = final.schedule
    if plan.policy.orders:
        schedule = schedule_of_halves(final, needs, graphs, rows, [half.edits for half in halves])
    with timed(seconds, "move"):
        move_across(final.facts, schedule, crossing, forward.graph, backward.graph)
        raise_differences(audit_copies(final, needs, found, forward.graph, backward.graph))
    with timed(seconds, "finish"):
        forward, backward = finish(forward, backward, num_fwd_outputs=num_fwd_outputs, static_inputs=static_inputs)
    if plan.policy.orders:
        with timed(seconds, "audit order"):
            raise_differences(_order_differences(halves, forward, backward))
    if is_compared(plan.before):
        kinds = ((forward, GraphKind.FORWARD), (backward, GraphKind.BACKWARD))
        runs = [GraphRun(kind.value, collect(half, kind=kind, root=root)) for half, kind in kinds]
        agree_on_collectives(plan, runs, settings_lines("torch._functorch.config", functorch_settings()))
    made = {*groups, *(group for half in halves for group in half.groups)}
    edits = {half.kind.value: half.edits for half in halves}
    orders = {half.kind.value: half.plan for half in halves if half.plan.order is not None}
    partition = Partition(forward, backward, plan, result, seconds, edits, tuple(sorted(made)), schedule, orders)
    remember(partition.carried_out, gm, forward, backward)
    announce(partition.carried_out)
    return partition


def _order_differences(
    halves: Sequence[Half], forward: fx.GraphModule, backward: fx.GraphModule
) -> Sequence[Diagnostic]:
    """Where the halves, as they are handed out, do not run in the order that was planned of each."""
    graphs = {GraphKind.FORWARD: forward.graph, GraphKind.BACKWARD: backward.graph}
    orders = ((half.plan.order, graphs[half.kind]) for half in halves)
    return [found for order, graph in orders if order is not None for found in audit_order(order, graph)]


def _choose(gm: fx.GraphModule, plan: Plan, num_fwd_outputs: int, static_inputs: Sequence[int]) -> tuple[Plan, Needs]:
    """What is saved and recomputed; min-cut is asked only where it has something to decide."""
    gradients = finalize.gradient_rows(gm.graph, plan.facts, num_fwd_outputs)
    final = finalize.fit(plan, gradients)
    needs = backward_needs(final.facts, final.decisions)
    if not needs.final:
        chosen = _ask_min_cut(gm, plan, num_fwd_outputs, static_inputs)
        final = finalize.resolve_offloads_again(finalize.fit(plan, gradients, chosen))
        needs = backward_needs(final.facts, final.decisions)
    raise_errors(refusals.unsafe_after_all(final, needs, JOINT))
    return final, needs


def _ask_min_cut(gm: fx.GraphModule, plan: Plan, num_fwd_outputs: int, static_inputs: Sequence[int]) -> list[int]:
    """The rows that PyTorch's min-cut would save, with the decided values as its fixed points."""
    index = plan.facts.index
    with tags.lent_to_min_cut(gm.graph, plan):
        try:
            saved = min_cut_saved_values(gm, num_fwd_outputs=num_fwd_outputs, static_inputs=static_inputs)
        except RuntimeError as error:
            raise PolicyMatchError([refusals.no_partition(plan, error)]) from error
    return [index[node.name] for node in saved or () if node.name in index]


def _saved_marks(facts: Facts, needs: Needs) -> dict[str, bool | str]:
    """The names of the saved values and of the multi-output operators they are pieces of, with their marks.

    Min-cut may save one piece of a tuple and recompute another; a decision on the operator cannot repeat that.
    """
    recomputed = frozenset(needs.recomputed)
    marked: dict[str, bool | str] = {}
    for row in (*needs.saved, *needs.offloaded):
        owner = facts.owners[row]
        whole = owner == row or owner not in recomputed
        marked[facts.names[owner]] = True if whole else marks.PARTLY
        marked[facts.names[row]] = True
    return marked
