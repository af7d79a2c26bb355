"""The planner and the reference say the same of any graph and any policy."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.graph.blocks import blocks_of
from policylang.graph.chains import Chains
from policylang.graph.facts import Facts, Flag
from policylang.language.syntax import CrossesCut, Everything, Is, Policy, Where
from policylang.planning.capabilities import Capabilities
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from policylang.planning.selection.selectors import Cuts, Selections
from policylang.simulation.node_times import NodeTimes, node_times
from tests.planning.reference import Reference
from tests.planning.strategies import PROPERTIES, QUICK, cut_sizes, graphs, policies, predicates, selectors
from tests.support.drawn import examples
from tests.support.trees import policy_of, span


def the_planner(replays_random: bool) -> Capabilities:
    return Capabilities("the test", replays_random=replays_random, undecided="auto")


def one_selector(facts: Facts, selector, times: NodeTimes | None = None) -> list[int]:
    return Selections(facts, {}, blocks_of(facts), Chains(facts), times).rows(selector)


@settings(max_examples=examples(25, 200))
@given(graphs(), selectors(()))
def test_a_selector_denotes_what_its_sentence_says(facts, selector):
    assert one_selector(facts, selector) == sorted(Reference(policy_of(), facts).nodes(selector))


@settings(max_examples=examples(20, 100))
@given(graphs(), predicates)
def test_a_predicate_filters_as_its_sentence_says(facts, predicate):
    times = node_times(facts, QUICK)
    selector = Where(Everything(span=span("everything")), predicate, span=span("everything where …"))
    reference = Reference(policy_of(), facts, list(times.seconds))
    assert one_selector(facts, selector, times) == sorted(reference.nodes(selector))


@settings(max_examples=examples(20, 100))
@given(graphs())
def test_every_property_of_a_node_is_what_its_name_says(facts):
    reference = Reference(policy_of(), facts)
    for name in PROPERTIES:
        selector = Where(
            Everything(span=span("everything")), Is(name, span=span(name)), span=span(f"everything where {name}")
        )
        assert (name, one_selector(facts, selector)) == (name, sorted(reference.nodes(selector)))


@settings(max_examples=examples(25, 200))
@given(graphs(), cut_sizes)
def test_the_forward_is_cut_and_crossed_as_the_reference_says(facts, size):
    reference = Reference(policy_of(), facts)
    cuts = Cuts(facts, Chains(facts))
    assert list(cuts.positions(size.value)) == reference.cuts(size.value)
    selector = Where(
        Everything(span=span("everything")), CrossesCut(size, span=span("…")), span=span("everything where …")
    )
    assert one_selector(facts, selector) == sorted(reference.nodes(selector))


@settings(max_examples=examples(12, 100))
@given(graphs(), policies(), st.booleans())
def test_a_plan_decides_what_the_rules_say(facts: Facts, policy: Policy, replays_random: bool):
    times = list(node_times(facts, QUICK).seconds)
    made = plan(policy, facts, the_planner(replays_random), device=QUICK)
    reference = Reference(policy, facts, times)
    expected = reference.decisions(replays_random)
    assert {row: (d.action, d.rule, d.why.value) for row, d in enumerate(made.decisions) if d is not None} == expected
    for rule, outcome in zip(policy.rules, made.rules, strict=True):
        assert outcome.matched == tuple(sorted(reference.matched(rule)))
    nothing = {outcome.rule.span for outcome in made.rules if not outcome.matched and not outcome.rule.optional}
    codes = {found.code for found in made.diagnostics}
    assert bool(nothing) if "APL301" in codes else not nothing or "APL369" in codes  # a share of no block says it all
    assert bool(reference.refused(expected, replays_random)) == any(d.code == "APL304" for d in made.diagnostics)


@settings(max_examples=examples(12, 150))
@given(graphs(), policies())
def test_the_outcome_is_what_the_backward_needs(facts: Facts, policy: Policy):
    made = plan(policy, facts, the_planner(True))
    outcome = saved_and_recomputed(made)
    reference = Reference(policy, facts)
    decided = {row: (d.action, d.rule, d.why.value) for row, d in enumerate(made.decisions) if d is not None}
    certain, possible = reference.needed(decided)
    open_rows = {row for row in certain | possible if row in decided and decided[row][0] is None}
    assert set(outcome.undecided) == open_rows
    recomputed = {row for row in certain - open_rows if reference.recomputes(decided, row)}
    assert set(outcome.recomputed) == recomputed
    kept = set(outcome.saved) | set(outcome.inputs) | set(outcome.symbolic)
    assert certain - open_rows - recomputed <= kept <= (certain | possible) - open_rows - recomputed
    assert set(outcome.contingent) == {row for row in possible - open_rows if row in decided} - kept
    making = [row for row in reference.forward if facts.owners[row] == row and not facts.flags[row] & Flag.VIEW]
    assert outcome.forward("bytes")[0] == sum(facts.bytes[row] for row in making)
    computing = {row for row in making if not facts.flags[row] & Flag.SYMBOLIC}
    assert outcome.recomputed_operators == len(recomputed & computing)
    in_blocks = [len([row for row in computing if reference.block[row] == n]) for n in range(reference.block_count)]
    assert outcome.forward("operators") == (len(computing), tuple(in_blocks))


@settings(max_examples=examples(12, 100))
@given(graphs(), policies())
def test_every_match_is_accounted_for(facts: Facts, policy: Policy):
    """Decided, taken over by another rule, kept by the user, or a size that no rule decides."""
    made = plan(policy, facts, the_planner(True))
    for index, outcome in enumerate(made.rules):
        sizes = sum(made.decisions[row].why.value == "always" for row in outcome.matched)
        taken = sum(outcome.overridden_by.values())
        assert len(outcome.matched) == len(outcome.decided) + taken + outcome.kept_by_user + sizes
        assert index not in outcome.overridden_by
        assert all(made.decisions[row].rule == index for row in outcome.decided)
