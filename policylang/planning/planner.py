"""Plans a policy on the facts of a graph: edits, decisions, safety, offloading, expectations, diagnostics."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from attrs import evolve

from policylang.graph.facts import Facts, InputKind
from policylang.language.diagnostics import Diagnostic
from policylang.language.syntax import Action, Expectation, ExpectFate, Policy, Rule
from policylang.operators.names import is_all_gather
from policylang.planning import refusals
from policylang.planning.batch.thresholds import flipping_thresholds
from policylang.planning.block_graph import Place, beyond_one_block
from policylang.planning.capabilities import Capabilities
from policylang.planning.decisions.contracts import gathers_left, origins_asked
from policylang.planning.decisions.dead_rules import without_effect
from policylang.planning.decisions.decide import first_decisions, judge, rule_outcomes
from policylang.planning.decisions.lost_markers import markers_lost, markers_outranked
from policylang.planning.decisions.offloading import offload_diagnostics, resolve_offloads
from policylang.planning.decisions.routing import keep_routing
from policylang.planning.decisions.safety import Safety
from policylang.planning.decisions.user_tags import user_decisions
from policylang.planning.decisions.weights_aside import WeightsAside, answered
from policylang.planning.digest import plan_digest
from policylang.planning.edits.offers import Ranks
from policylang.planning.edits.statement_edits import edit_diagnostics, plan_edits
from policylang.planning.expectations.held import check_expectations
from policylang.planning.liveness import with_cost
from policylang.planning.plan import Plan, RuleOutcome
from policylang.planning.selection.one_block import AsOneBlock, speaks_of_blocks
from policylang.planning.selection.selectors import Selections, selections_for
from policylang.planning.selection.unanswerable import unanswerable
from policylang.planning.sequential_recompute import needs_when_rerun, with_returned
from policylang.planning.value_decision import Decision, Fate, Why, by_rule, offloads


def plan(
    policy: Policy,
    facts: Facts,
    capabilities: Capabilities,
    place: Place | None = None,
    *,
    ranks: Ranks | None = None,
    aside: WeightsAside | None = None,
) -> Plan:
    """Decide the fate of every forward value of a graph.

    Never raises for what is wrong between a policy and a graph: that is in ``Plan.diagnostics``. Linear in nodes,
    edges and matches; the same policy on the same graph gives the same plan, digest included, in every process.
    ``place`` says of a graph that runs again as a whole what part of a model it is. ``ranks`` are those that
    share the graph, where they can be asked what they would rewrite. ``aside`` are the weights that FSDP gathers around
    the graph, in which a rule about gathers then has nothing to match.
    """
    before = facts
    edits, facts = plan_edits(policy, before, capabilities, ranks)
    alone = place is not None and place.blocks is not None
    selections = selections_for(policy, facts, None if place is None else place.blocks)
    blocks = selections.blocks
    tagged = user_decisions(facts)
    fate = _fate(policy, capabilities)
    verdict = judge(policy, facts, selections, tagged)
    decisions = first_decisions(policy, facts, verdict, tagged, fate, capabilities)
    routing = keep_routing(policy, facts, decisions)
    safety = Safety(policy, facts, capabilities, decisions)
    needs = safety.enforce()
    stays: tuple[int, ...] = ()
    if place is not None:
        needs = needs_when_rerun(facts, decisions, place.reach, place.unchanged, place.inner)
    elif capabilities.offloads and (policy.offloads or any(map(offloads, decisions))):
        stays = resolve_offloads(policy, facts, decisions, needs)
        needs = safety.enforce()
    outcome = with_cost(needs, facts, blocks.block_of, len(blocks.names))
    rules = rule_outcomes(policy, verdict, tagged)
    expectations, failures = check_expectations(policy.expectations, selections, decisions, outcome)
    unmet = dict(zip((at for at, each in enumerate(expectations) if each.status == "failed"), failures, strict=True))
    unmatched = [index for index, each in enumerate(rules) if not each.matched]
    by_fsdp = answered(policy, aside, unmatched, _about_nothing(policy, selections) if aside is not None else ())
    expectations = tuple(by_fsdp.expectations.get(at, each) for at, each in enumerate(expectations))
    as_one = AsOneBlock(policy, selections)
    return Plan(
        policy=policy,
        before=before,
        facts=facts,
        decisions=decisions,
        rules=rules,
        edits=edits,
        expectations=expectations,
        diagnostics=(
            *(beyond_one_block(policy, place) if alone else ()),
            *_no_blocks(policy, rules, selections),
            *unanswerable(policy, facts),
            *_rule_diagnostics(policy, rules, selections, as_one, by_fsdp.rules),
            *by_fsdp.diagnostics,
            *without_effect(rules, facts, decisions, needs if place is None else with_returned(needs, facts)),
            *edit_diagnostics(policy, edits, before, capabilities),
            *_capability_diagnostics(policy, facts, capabilities, decisions, needs.undecided),
            *gathers_left(policy, facts, selections.chains, rules),
            *markers_lost(policy, facts),
            *markers_outranked(policy, facts, rules, decisions, needs),
            *flipping_thresholds(policy, facts, capabilities, selections, tagged, fate),
            *safety.diagnostics(),
            *offload_diagnostics(policy, facts, decisions, needs, stays),
            *(refusals.routing_kept(*kept, policy, facts) for kept in by_rule(routing, decisions, policy)),
            *(
                _of_cause(failure, policy.expectations[at], as_one)
                for at, failure in unmet.items()
                if at not in by_fsdp.expectations
            ),
        ),
        undecided=fate,
        digest=plan_digest(policy, facts, decisions, edits),
        block_of=blocks.block_of,
        block_names=blocks.names,
        rerun=None if place is None else needs.recomputed,
    )


def _fate(policy: Policy, capabilities: Capabilities) -> Fate:
    fate = policy.undecided.fate if policy.undecided is not None else "auto"
    if fate == "auto" and capabilities.keeps_undecided:
        return "as traced"
    return "as checkpointed" if fate == "auto" and capabilities.recomputes_undecided else fate


def _about_nothing(policy: Policy, selections: Selections) -> list[int]:
    """The expectations about the fate of a set of nodes that is empty."""
    asked = enumerate(policy.expectations)
    return [at for at, each in asked if isinstance(each, ExpectFate) and not selections.rows(each.selector)]


def _no_blocks(policy: Policy, rules: tuple[RuleOutcome, ...], selections: Selections) -> Iterator[Diagnostic]:
    """An error where the policy names blocks that the graph has not, or speaks of blocks and the graph has none."""
    if selections.blocks.names:
        return
    if policy.blocks is not None:
        found = refusals.no_such_blocks(policy.blocks, selections.facts)
        yield evolve(found, include=policy.included_by(policy.blocks.span))
        return
    wanting = (each.rule for each in rules if not each.matched and not each.rule.optional)
    first = next((rule for rule in wanting if speaks_of_blocks(rule, policy)), None)
    if first is not None:
        yield refusals.no_blocks(first.selector, selections.facts)


def _of_cause(found: Diagnostic, statement: Rule | Expectation, as_one: AsOneBlock) -> Diagnostic:
    """An error about a sentence, with what it comes from where that is known."""
    return evolve(found, cause=refusals.NO_SUCH_BLOCKS) if as_one.explains(statement) else found


def _rule_diagnostics(
    policy: Policy,
    rules: tuple[RuleOutcome, ...],
    selections: Selections,
    as_one: AsOneBlock,
    by_fsdp: Collection[int],
) -> list[Diagnostic]:
    found: list[Diagnostic] = []
    gathers = any(map(is_all_gather, selections.facts.by_target))
    for index, outcome in enumerate(rules):
        if not outcome.matched:
            if not (outcome.rule.optional or index in by_fsdp):
                of_weights = not gathers and InputKind.PARAMETER in origins_asked(outcome.rule, policy)
                nothing = refusals.matches_nothing(outcome.rule, selections, of_weights=of_weights)
                nothing = evolve(nothing, include=policy.included_by(outcome.rule.span))
                found.append(_of_cause(nothing, outcome.rule, as_one))
        elif outcome.decided:
            continue
        elif outcome.overridden_by:
            found.append(refusals.overridden(policy, outcome))
        elif outcome.kept_by_user:
            found.append(refusals.kept_by_user(outcome))
    return found


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
        found.append(refusals.cannot_be_auto(policy.undecided if asked else None, undecided, facts, capabilities))
    return found
