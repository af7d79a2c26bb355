"""Plans a policy on the facts of a graph: edits, decisions, safety, offloading, expectations, diagnostics."""

from __future__ import annotations

from attrs import evolve

from policylang.graph.expert_load import under_load
from policylang.graph.facts import Facts, Flag, GraphKind
from policylang.language.cancellation import check_cancelled, collector_paused
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic, heeded
from policylang.language.syntax import Policy
from policylang.planning import refusals, schedule
from policylang.planning.capabilities import STAGE, Capabilities
from policylang.planning.decisions import decide, rule_warnings
from policylang.planning.decisions.offloading import offload_diagnostics, prefetch_diagnostics, resolve_offloads
from policylang.planning.edits.other_ranks import Ranks
from policylang.planning.edits.statement_edits import edit_diagnostics, plan_edits
from policylang.planning.expectations import check_expectations, incomplete_figures
from policylang.planning.liveness import as_scheduled, with_checkpoints, with_cost
from policylang.planning.order.statements import cannot_order, plan_order
from policylang.planning.pipelines import received, stage_errors, unsharded
from policylang.planning.plan import ExpectationOutcome, Plan, plan_digest, schedule_of
from policylang.planning.selection.selectors import Selections, selections_for
from policylang.planning.statement_errors import (
    StatementErrors,
    in_stage,
    loads_untold,
    named_alone,
    time_errors,
    unanswerable,
)
from policylang.planning.value_outcome import KEPT, Default, by_rule, moves
from policylang.simulation.node_times import node_times


@collector_paused()
def plan(
    policy: Policy,
    facts: Facts,
    capabilities: Capabilities,
    place: schedule.BlockContext | None = None,
    *,
    ranks: Ranks | None = None,
    aside: rule_warnings.FsdpParameters | None = None,
    device: DeviceProfile | None = None,
    like: Selections | None = None,
) -> Plan:
    """Decide the outcome of every forward value of a graph.

    Never raises for a policy that does not fit the graph: see ``Plan.diagnostics``. Linear in nodes, edges and matches;
    the same policy on the same graph gives the same plan, digest included, in every process. ``place``: the part of a
    model that the graph is, if it is recomputed as a whole. ``ranks``: the ranks that share the graph, if they can be
    asked for their rewrites. ``aside``: the weights that FSDP gathers outside the graph, where rules about gathers have
    nothing to match. ``device`` overrides the policy's device. ``like``: selections of another policy with the same
    blocks, neither of which has a device or a pipeline: what both denote on one graph is worked out once.
    """
    if policy.balance is not None:
        facts = under_load(facts, policy.balance.factor, policy.balance.is_limit)
    before = facts
    is_stage = policy.stage is not None and place is None and facts.kind is GraphKind.FLAT
    if is_stage:
        capabilities = STAGE
    edits, facts = plan_edits(policy, before, capabilities, ranks)
    alone = place is not None and place.blocks is not None
    used = device or policy.device
    times = None if used is None else node_times(facts, used)
    if like is not None and like.facts is facts:
        selections = like.of(policy.lets)
    else:
        selections = selections_for(policy, facts, None if place is None else place.blocks, times=times)
    blocks = selections.blocks
    apart = capabilities.block_by_block and place is None
    checkpoints = schedule.checkpoint_of_all(facts, place) if place is not None else None
    around = decide.NOTHING_AROUND
    if apart:
        checkpoints, around = selections.each_block.checkpoints, selections.each_block.around
    if policy.pipeline is not None and place is None:
        around = evolve(around, received=received(facts, selections))
    if is_stage:
        around = evolve(around, unsharded=unsharded(facts, selections.chains))
    tagged = {} if apart else decide.user_decisions(facts)  # the policy's checkpoints take the place of the user's own
    default: Default = policy.undecided.fate if policy.undecided is not None else "auto"
    if default == "auto" and capabilities.undecided is not None:
        default = capabilities.undecided
    made_anew = (node for edit in edits.done for node in edit.nodes if node.action is not None)
    slices = {facts.index[node.name]: node.action for node in made_anew if node.name in facts.index}
    verdict = decide.judge(policy, facts, selections, tagged, around)
    check_cancelled()
    decisions = decide.first_decisions(policy, facts, verdict, tagged, default, capabilities, around, slices)
    routing = decide.keep_routing(policy, facts, decisions)
    safety = decide.Safety(policy, facts, capabilities, decisions, () if checkpoints is None else checkpoints.unchanged)
    needs = safety.enforce()
    check_cancelled()
    stays: tuple[int, ...] = ()
    if capabilities.offloads and any(map(moves, decisions)):
        spent = {} if place is None else place.spent
        stays = resolve_offloads(policy, facts, decisions, needs, spent, checkpoints, blocks.block_of)
        needs = safety.enforce()
    needs = with_checkpoints(needs, facts, decisions, checkpoints)
    rules = decide.rule_outcomes(policy, verdict, tagged)
    check_cancelled()
    order = None
    if policy.orders and capabilities.orders:
        line = policy.prefetch_offloaded
        ahead = None if line is None else schedule.Ahead(line.blocks, blocks.block_of)
        steps = schedule_of(facts, decisions, ahead)
        order = plan_order(policy, facts, steps, capabilities, ranks=ranks, device=used, blocks=blocks)
    check_cancelled()
    made = Plan(
        policy=policy,
        before=before,
        facts=facts,
        decisions=decisions,
        rules=rules,
        edits=edits,
        expectations=(),
        diagnostics=(),
        undecided=default,
        order=order,
        digest=plan_digest(policy, facts, decisions, edits, used, order),
        times=times,
        block_of=blocks.block_of,
        block_names=blocks.names,
        checkpoints=checkpoints,
    )
    expectations: tuple[ExpectationOutcome, ...] = ()
    failures: tuple[Diagnostic, ...] = ()
    if policy.expectations:
        cost = with_cost(as_scheduled(needs, made), facts, blocks.block_of, len(blocks.names))
        expectations, failures = check_expectations(made, policy.expectations, selections, cost)
    check_cancelled()
    unmet = dict(zip((at for at, each in enumerate(expectations) if each.status == "failed"), failures, strict=True))
    unmatched = [index for index, each in enumerate(rules) if not each.matched]
    by_fsdp = rule_warnings.answered(policy, aside, unmatched, selections)
    expectations = tuple(by_fsdp.expectations.get(at, each) for at, each in enumerate(expectations))
    read = needs
    if place is not None:  # what the block returns, the next one's checkpoint holds as its input
        returned = (row for row in facts.forward if facts.flags[row] & Flag.FORWARD_OUTPUT)
        read = evolve(needs, rows={**needs.rows, KEPT: (*needs.saved, *returned)})
    errors = StatementErrors(policy, selections, with_shares=place is None or place.numbered)
    diagnostics = (
        *(schedule.beyond_one_block(policy, place) if alone or apart else ()),
        *(named_alone(policy, facts) if apart else ()),
        *stage_errors(policy, selections, is_stage=place is not None),
        *rule_warnings.gathers_again(policy, rules, around.unsharded, selections.chains),
        *errors.no_blocks(rules),
        *unanswerable(policy, facts),
        *loads_untold(policy.balance if place is None else None, facts),
        *time_errors(policy, times, asked_for=device is not None, copies=bool(needs.offloaded)),
        *errors.shares(),
        *errors.of_rules(rules, by_fsdp.rules, around),
        *by_fsdp.diagnostics,
        *rule_warnings.without_effect(rules, facts, decisions, read),
        *edit_diagnostics(policy, edits, before, capabilities),
        *errors.of_order(order.diagnostics if order is not None else cannot_order(policy, capabilities)),
        *refusals.beyond_capabilities(policy, facts, capabilities, decisions, needs.undecided),
        *rule_warnings.gathers_left(policy, facts, selections.chains, rules),
        *rule_warnings.markers_lost(policy, facts),
        *rule_warnings.markers_outranked(policy, facts, rules, decisions, needs),
        *safety.diagnostics(),
        *prefetch_diagnostics(policy, facts, needs, blocks.names),
        *(offload_diagnostics(policy, facts, decisions, needs, stays) if capabilities.offloads else ()),
        *(refusals.routing_kept(*kept, policy, facts) for kept in by_rule(routing, decisions, policy)),
        *errors.of_expectations({at: each for at, each in unmet.items() if at not in by_fsdp.expectations}),
        *incomplete_figures(policy.expectations, facts, needs, times),
    )
    if is_stage:
        diagnostics = tuple(in_stage(diagnostics, policy.stage))
    return evolve(made, expectations=expectations, diagnostics=heeded(diagnostics))
