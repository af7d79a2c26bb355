"""Bundled policies on the joint graphs of real architectures, against the reference and against counting by hand."""

from __future__ import annotations

import pytest

from policylang.language.loader import load_policy, parse_policy
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from tests.graph.captured import facts_of_model
from tests.planning.reference import Reference
from tests.planning.sentences import JOINT, names


@pytest.mark.parametrize("policy_name", ["llama3_sac", "torchtitan_full", "every_2nd_layer"])
@pytest.mark.parametrize(
    "model", ["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mixtral", "gpt2"))]
)
def test_a_bundled_policy_is_planned_as_the_reference_plans_it(model: str, policy_name: str):
    facts = facts_of_model(model)
    loaded = load_policy(policy_name)
    assert loaded.policy is not None, loaded.diagnostics
    made = plan(loaded.policy, facts, JOINT)
    routed = model == "mixtral" and policy_name != "llama3_sac"  # which saves `topk` itself
    assert [found.code for found in made.diagnostics] == ["APL308"] * routed
    expected = Reference(loaded.policy, facts).decisions(replays_random=True)
    assert {row: (d.action, d.rule, d.why.value) for row, d in enumerate(made.decisions) if d is not None} == expected


def test_the_three_sentences_on_a_llama():
    """Seven projections a layer: every 2nd is the 2nd, 4th and 6th; what is left of them is saved where it is read."""
    facts = facts_of_model("llama")
    text = "recompute everything in block; save mm; recompute every 2nd mm; save first add per block; undecided -> save"
    policy = parse_policy(text).policy
    assert policy is not None
    made = plan(policy, facts, JOINT)
    assert made.block_names == ("model.model.layers.0", "model.model.layers.1")
    everything, save_mm, every_second, first_add = made.rules
    by_block = [[row for row in every_second.decided if made.block_of[row] == block] for block in (0, 1)]
    modules = [[facts.modules[row].rpartition(".")[2] for row in rows] for rows in by_block]
    assert modules == [["k_proj", "o_proj", "up_proj"]] * 2
    assert save_mm.overridden_by == {2: 6}
    assert len(first_add.matched) == 2
    assert everything.overridden_by[3] == 2
    outcome = saved_and_recomputed(made)
    assert outcome.final
    assert not set(names(facts, every_second.decided)) & set(names(facts, outcome.saved))
    # bytes of the distinct values that stay: nothing of them is a view of another
    assert outcome.saved_bytes <= sum(facts.bytes[row] for row in outcome.saved)
    assert sum(outcome.saved_bytes_by_block) <= outcome.saved_bytes
    again = [row for row in outcome.recomputed if facts.targets[row] == "aten.mm.default"]
    assert set(again) <= set(every_second.decided)


def test_a_rule_for_another_models_names_is_told_what_this_one_has():
    policy = parse_policy("recompute everything in block; save mm in encoder.*.attention").policy
    assert policy is not None
    (found,) = plan(policy, facts_of_model("llama"), JOINT).diagnostics
    assert found.code == "APL301"
    assert found.message == "`save mm in encoder.*.attention` matches nothing in this graph"
    assert found.details[0] == "mm: 15 nodes"
    assert found.details[1].startswith("in encoder.*.attention: 0 of them; nearest module paths: model.model.layers.0")
