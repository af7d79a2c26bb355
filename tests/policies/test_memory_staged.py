"""`memory_staged`: as it is on a recorded step of Llama-3 8B, and with small stages on small models."""

from __future__ import annotations

from functools import cache

import pytest
from attrs import evolve

from policylang.graph.chains import Chains
from policylang.graph.facts import Facts, GraphKind
from policylang.language.loader import parse_policy
from policylang.language.resources import policies_folder
from policylang.language.syntax import Policy
from policylang.planning.liveness import BackwardCost, saved_and_recomputed
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.planning.selection.selectors import Cuts
from policylang.simulation.memory import Peak, estimate_peak
from tests.graph.captured import facts_of_model
from tests.planning.reference import Reference
from tests.planning.sentences import JOINT as THE_PATH
from tests.support.shared_graphs import JOINT, shared_facts

KIB, GIB = 2**10, 2**30
TEXT = (policies_folder() / "memory_staged.apl").read_text(encoding="utf-8")
STAGED = "optional save everything where crosses cut per 2 GiB"


def policy(text: str) -> Policy:
    loaded = parse_policy(text)
    assert loaded.policy is not None, loaded.diagnostics
    return loaded.policy


def staged(size: str) -> str:
    assert STAGED in TEXT
    return TEXT.replace("per 2 GiB", f"per {size}")


@cache
def llama_8b() -> Facts:
    """Without the checkpoint that the recording's owner had put around every layer: a policy would leave its tags."""
    facts = shared_facts(JOINT, True)
    return evolve(facts, ac_regions=[None] * len(facts), user_tags=[None] * len(facts))


def made(chosen: Policy, facts: Facts) -> tuple[Plan, BackwardCost, Peak]:
    result = plan(chosen, facts, THE_PATH)
    assert result.diagnostics == ()
    outcome = saved_and_recomputed(result)
    return result, outcome, estimate_peak(facts, result.schedule)


@cache
def made_of_8b(text: str) -> tuple[Plan, BackwardCost, Peak]:
    return made(policy(text), llama_8b())


@cache
def cuts_of_8b() -> Cuts:
    return Cuts(llama_8b(), Chains(llama_8b()))


def test_one_rank_of_llama_8b_in_stages_of_2_gib():
    """66 GiB of activations on each of 128 ranks; what is kept is what crosses 43 cuts."""
    assert round(cuts_of_8b().produced / GIB) == 66
    assert len(cuts_of_8b().positions(2 * GIB)) == 43
    result, outcome, _ = made_of_8b(staged("2 GiB"))
    assert len(result.rules[1].decided) == len(outcome.saved) == 65
    assert round(outcome.saved_bytes / GIB, 2) == 1.45


def test_stages_bound_the_peak_that_recomputing_everything_has():
    everything_kept, nothing_kept = (made_of_8b(f"{verb} everything")[2] for verb in ("save", "recompute"))
    peaks = {size: made_of_8b(staged(f"{size} GiB"))[2].bytes for size in (2, 8, 32)}
    assert nothing_kept.bytes >= everything_kept.bytes  # one chain: all of it is alive again at the end
    assert peaks[2] < peaks[8] < peaks[32] < everything_kept.bytes
    assert peaks[2] < 0.4 * nothing_kept.bytes


def test_larger_stages_hand_less_on():
    saved = [made_of_8b(staged(f"{size} GiB"))[1].saved_bytes for size in (1, 2, 4, 8, 16)]
    assert saved == sorted(saved, reverse=True)
    assert len(set(saved)) == 5


def test_a_transformer_is_cut_where_its_residual_stream_alone_is_alive():
    facts = llama_8b()
    cuts = cuts_of_8b().crossing(8 * GIB)
    crossing = [row for row in range(len(facts)) if cuts[row]]
    assert len(crossing) == 9  # one value at each cut
    assert {facts.bytes[row] for row in crossing} == {16 * 2**20}


def test_gathered_weights_cross_no_cut():
    facts = llama_8b()
    chains = Chains(facts)
    crossing = cuts_of_8b().crossing(GIB / 2)
    gathers = [
        row for row, target in enumerate(facts.targets) if target == "_c10d_functional.all_gather_into_tensor.default"
    ]
    of_parameters = [row for row in gathers if chains.from_parameter_mask[row]]
    assert len(of_parameters) == 290
    assert not any(crossing[row] for row in of_parameters)


@pytest.mark.parametrize("model", ["llama", "gpt2", "resnet"])
def test_a_small_model_with_small_stages_is_planned_as_the_reference_plans_it(model: str):
    facts = facts_of_model(model)
    assert facts.kind is GraphKind.JOINT
    chosen = policy(staged("8 KiB"))
    result, outcome, _ = made(chosen, facts)
    expected = Reference(chosen, facts).decisions(replays_random=True)
    assert {row: (d.action, d.rule, d.why.value) for row, d in enumerate(result.decisions) if d} == expected
    assert len(result.rules[1].decided) > 2
    assert outcome.saved
    assert outcome.recomputed


def test_a_small_model_as_it_is_has_no_cut():
    result, outcome, _ = made(policy(TEXT), facts_of_model("llama"))
    assert result.rules[1].matched == ()
    assert outcome.saved == ()
