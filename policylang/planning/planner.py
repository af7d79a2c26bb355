"""Plans a policy on the facts of a graph: edits, decisions, safety, offloading, expectations, diagnostics."""

from __future__ import annotations

from attrs import evolve

from policylang.graph.facts import Facts, Flag
from policylang.language.devices.profile import DeviceProfile
from policylang.language.diagnostics import Diagnostic
from policylang.language.interruption.wanted import check_cancelled
from policylang.language.syntax import Action, ExpectFate, Policy
from policylang.planning import refusals
from policylang.planning.batch.thresholds import flipping_thresholds
from policylang.planning.block_graph import Place, around_blocks, beyond_one_block
from policylang.planning.capabilities import Capabilities
from policylang.planning.checkpoints import checkpoint_of_all, checkpoints_around
from policylang.planning.decisions.contracts import gathers_left
from policylang.planning.decisions.dead_rules import without_effect
from policylang.planning.decisions.decide import NOTHING_AROUND, first_decisions, judge, rule_outcomes
from policylang.planning.decisions.lost_markers import markers_lost, markers_outranked
from policylang.planning.decisions.offloading import offload_diagnostics, resolve_offloads
from policylang.planning.decisions.routing import keep_routing
from policylang.planning.decisions.safety import Safety
from policylang.planning.decisions.user_tags import user_decisions
from policylang.planning.decisions.weights_aside import WeightsAside, answered
from policylang.planning.digest import plan_digest
from policylang.planning.edits.offers import Ranks
from policylang.planning.edits.statement_edits import edit_diagnostics, plan_edits
from policylang.planning.expectations.data_sizes import by_data_in
from policylang.planning.expectations.held import check_expectations
from policylang.planning.expectations.uncounted_work import uncounted_in
from policylang.planning.liveness import Needs, with_checkpoints, with_cost
from policylang.planning.order.statements import cannot_order, plan_order
from policylang.planning.plan import Plan, schedule_of
from policylang.planning.selection.other_kernels import named_alone
from policylang.planning.selection.selectors import Selections, selections_for
from policylang.planning.selection.unanswerable import unanswerable
from policylang.planning.statement_errors import StatementErrors
from policylang.planning.time_errors import time_errors
from policylang.planning.value_decision import Decision, Fate, Why, by_rule, offloads
from policylang.simulation.node_times import node_times


def plan(
    policy: Policy,
    facts: Facts,
    capabilities: Capabilities,
    place: Place | None = None,
    *,
    ranks: Ranks | None = None,
    aside: WeightsAside | None = None,
    device: DeviceProfile | None = None,
) -> Plan:
    """Decide the fate of every forward value of a graph.

    Never raises for what is wrong between a policy and a graph: that is in ``Plan.diagnostics``. Linear in nodes,
    edges and matches; the same policy on the same graph gives the same plan, digest included, in every process.
    ``place`` says of a graph that runs again as a whole what part of a model it is. ``ranks`` are those that
    share the graph, where they can be asked what they would rewrite. ``aside`` are the weights that FSDP gathers around
    the graph, in which a rule about gathers then has nothing to match. ``device`` is what times are worked out for, in
    place of the device that the policy names.
    """
    before = facts
    edits, facts = plan_edits(policy, before, capabilities, ranks)
    alone = place is not None and place.blocks is not None
    used = device or policy.device
    times = None if used is None else node_times(facts, used)
    selections = selections_for(policy, facts, None if place is None else place.blocks, times=times)
    blocks = selections.blocks
    apart = capabilities.block_by_block and place is None
    around = around_blocks(facts, blocks) if apart else NOTHING_AROUND
    tagged = {} if apart else user_decisions(facts)  # the policy's checkpoints take the place of the user's own
    fate = _fate(policy, capabilities)
    verdict = judge(policy, facts, selections, tagged, around)
    check_cancelled()
    decisions = first_decisions(policy, facts, verdict, tagged, fate, capabilities, around)
    routing = keep_routing(policy, facts, decisions)
    safety = Safety(policy, facts, capabilities, decisions)
    needs = safety.enforce()
    check_cancelled()
    stays: tuple[int, ...] = ()
    if capabilities.offloads and (policy.offloads or any(map(offloads, decisions))):
        stays = resolve_offloads(policy, facts, decisions, needs)
        needs = safety.enforce()
    checkpoints = None
    if place is not None:
        checkpoints = checkpoint_of_all(facts, place.reach, place.unchanged, place.inner)
    elif apart:
        checkpoints = checkpoints_around(facts, blocks)
    needs = with_checkpoints(needs, facts, decisions, checkpoints)
    outcome = with_cost(needs, facts, blocks.block_of, len(blocks.names))
    rules = rule_outcomes(policy, verdict, tagged)
    check_cancelled()
    order = None
    if policy.orders and capabilities.orders:
        schedule = schedule_of(facts, decisions)
        order = plan_order(policy, facts, schedule, capabilities, ranks=ranks, device=used, blocks=blocks)
    check_cancelled()
    expectations, failures = check_expectations(
        policy.expectations, selections, decisions, outcome, checkpoints=checkpoints, order=order
    )
    check_cancelled()
    unmet = dict(zip((at for at, each in enumerate(expectations) if each.status == "failed"), failures, strict=True))
    unmatched = [index for index, each in enumerate(rules) if not each.matched]
    by_fsdp = answered(policy, aside, unmatched, _about_nothing(policy, selections) if aside is not None else ())
    expectations = tuple(by_fsdp.expectations.get(at, each) for at, each in enumerate(expectations))
    errors = StatementErrors(policy, selections, with_shares=place is None or place.numbered)
    return Plan(
        policy=policy,
        before=before,
        facts=facts,
        decisions=decisions,
        rules=rules,
        edits=edits,
        expectations=expectations,
        diagnostics=(
            *(beyond_one_block(policy, place) if alone or apart else ()),
            *(named_alone(policy, facts) if apart else ()),
            *errors.no_blocks(rules),
            *unanswerable(policy, facts),
            *time_errors(policy, times, asked_for=device is not None, copies=bool(needs.offloaded)),
            *errors.shares(),
            *errors.of_rules(rules, by_fsdp.rules, around),
            *by_fsdp.diagnostics,
            *without_effect(rules, facts, decisions, needs if place is None else _with_returned(needs, facts)),
            *edit_diagnostics(policy, edits, before, capabilities),
            *errors.of_order(order.diagnostics if order is not None else cannot_order(policy, capabilities)),
            *_capability_diagnostics(policy, facts, capabilities, decisions, needs.undecided),
            *gathers_left(policy, facts, selections.chains, rules),
            *markers_lost(policy, facts),
            *markers_outranked(policy, facts, rules, decisions, needs),
            *flipping_thresholds(policy, facts, capabilities, selections, tagged, fate),
            *safety.diagnostics(),
            *offload_diagnostics(policy, facts, decisions, needs, stays),
            *(refusals.routing_kept(*kept, policy, facts) for kept in by_rule(routing, decisions, policy)),
            *errors.of_expectations({at: each for at, each in unmet.items() if at not in by_fsdp.expectations}),
            *uncounted_in(policy.expectations, facts, needs.recomputed, times),
            *by_data_in(policy.expectations, facts, needs),
        ),
        undecided=fate,
        order=order,
        digest=plan_digest(policy, facts, decisions, edits, used, order),
        times=times,
        block_of=blocks.block_of,
        block_names=blocks.names,
        checkpoints=checkpoints,
    )


def _fate(policy: Policy, capabilities: Capabilities) -> Fate:
    fate = policy.undecided.fate if policy.undecided is not None else "auto"
    if fate == "auto" and capabilities.keeps_undecided:
        return "as traced"
    return "as checkpointed" if fate == "auto" and capabilities.recomputes_undecided else fate


def _with_returned(needs: Needs, facts: Facts) -> Needs:
    """With what the block returns, which the next one's checkpoint holds as its input."""
    returned = (row for row in facts.forward if facts.flags[row] & Flag.FORWARD_OUTPUT)
    return evolve(needs, saved=(*needs.saved, *returned))


def _about_nothing(policy: Policy, selections: Selections) -> list[int]:
    """The expectations about the fate of a set of nodes that is empty."""
    asked = enumerate(policy.expectations)
    return [at for at, each in asked if isinstance(each, ExpectFate) and not selections.rows(each.selector)]


def _capability_diagnostics(
    policy: Policy,
    facts: Facts,
    capabilities: Capabilities,
    decisions: list[Decision | None],
    open_rows: tuple[int, ...],
) -> list[Diagnostic]:
    """Whatever the policy asks for that the path cannot do: refused, never ignored."""
    found: list[Diagnostic] = []
    decides = capabilities.keeps_undecided or capabilities.recomputes_undecided
    for rule in policy.rules:
        leaves = rule.action is Action.LEAVE and not (capabilities.undecided_auto or decides)
        if leaves or (rule.action.offloads and not capabilities.offloads):
            found.append(refusals.cannot_decide(rule, capabilities))
    undecided = [row for row in open_rows if (d := decisions[row]) is not None and d.why is Why.UNDECIDED]
    asked = policy.undecided is not None and policy.undecided.fate == "auto" and not decides
    if (asked or undecided) and not capabilities.undecided_auto:
        found.append(
            refusals.cannot_be_auto(policy.undecided if asked else None, undecided, facts, capabilities, policy)
        )
    return found
