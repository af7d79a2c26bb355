"""What holds of every tuned policy: it fits, more memory never costs time, its rules are few and each is needed."""

from __future__ import annotations

from itertools import chain, combinations
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.api.load import parse
from policylang.api.planned_graphs import read_any
from policylang.graph.facts import Facts
from policylang.language.devices.reading import read_device
from policylang.language.diagnostics import Source, is_error
from policylang.language.formatting import format_source
from policylang.planning.capabilities import EAGER, FLAT, JOINT, Capabilities
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import Plan, schedule_of
from policylang.planning.planner import plan
from policylang.planning.schedule import build_checkpointed_schedule, checkpoints_around, held_and_rerun
from policylang.simulation.memory import estimate_peak
from policylang.simulation.node_times import node_times
from policylang.simulation.streams import step_time
from policylang.tuning.evaluation import Besides, Budget, Candidate, Infeasible, Tuned
from policylang.tuning.tuner import Tuner
from tests.support.textgraph import CHAIN, facts_of
from tests.support.tuned_graphs import DEVICE, stacked, stacked_text, times_of, tuner_of

SAVE_ALL = tuner_of().save_all
assert SAVE_ALL is not None
SMALLEST = tuner_of().smallest(Budget("peak", 0))


def peak_at(share: float) -> Budget:
    """A budget so far between what nothing goes below and what nothing recomputed takes."""
    return Budget("peak", SMALLEST.peak + share * (SAVE_ALL.peak - SMALLEST.peak))


def chosen(budget: Budget, blocks: int = 6) -> Candidate:
    found = tuner_of(blocks).tuned(budget)
    return found.chosen


def planned(text: str, facts: Facts) -> Plan:
    return plan(parse(text), facts, JOINT)


def asked_of(made: Plan) -> tuple[tuple[int, ...], ...]:
    needs = saved_and_recomputed(made)
    return needs.saved, needs.recomputed, needs.undecided


@pytest.mark.parametrize("share", [0, 0.1, 0.3, 0.5, 0.7, 0.9, 1])
def test_a_tuned_policy_fits_and_says_what_planning_says(share: float) -> None:
    budget = peak_at(share)
    found = chosen(budget)
    made = planned(found.rules, stacked())
    assert made.diagnostics == ()
    assert estimate_peak(made.facts, made.schedule).bytes == found.peak <= budget.limit
    assert saved_and_recomputed(made).saved_bytes == found.saved
    assert step_time(made.facts, made.schedule, times_of()).recomputed == found.recompute


@pytest.mark.parametrize("share", [0, 0.2, 0.4, 0.6, 0.8, 1])
def test_its_rules_are_few_and_each_is_needed(share: float) -> None:
    rules = chosen(peak_at(share)).rules
    assert format_source(Source("tuned", rules)).text == rules
    lines = rules.splitlines(keepends=True)
    assert len(lines) <= 16
    whole = asked_of(planned(rules, stacked()))
    for at in range(len(lines)):
        rest = "".join(lines[:at] + lines[at + 1 :])
        if not rest:
            continue
        assert asked_of(planned(rest, stacked())) != whole, f"`{lines[at]}` decides nothing"


@settings(max_examples=25)
@given(st.integers(0, 200), st.integers(0, 200), st.sampled_from(["peak", "saved"]))
def test_more_memory_never_costs_time(one: int, other: int, figure: str) -> None:
    tuner = tuner_of()
    low, high = sorted((one / 200, other / 200))
    assert SAVE_ALL is not None
    if figure == "peak":
        budgets = [peak_at(share) for share in (low, high)]
    else:
        budgets = [Budget("saved", share * SAVE_ALL.saved) for share in (low, high)]
    less, more = (tuner._picked(budget) for budget in budgets)
    assert more.recompute <= less.recompute + 1e-9 * tuner.forward
    for budget, each in zip(budgets, (less, more), strict=True):
        assert tuner.besides.memory(each, budget) <= budget.limit


def test_with_room_for_all_nothing_runs_again() -> None:
    assert chosen(Budget("peak", 10**9)) == SAVE_ALL
    assert SAVE_ALL.recompute == 0


def test_what_cannot_be_met_says_the_least() -> None:
    found = tuner_of().tuned(Budget("peak", SMALLEST.peak - 1))
    assert found.smallest == SMALLEST
    assert found.smallest.peak_at in stacked().names
    table = tuner_of().tuned(Budget("peak", inf), table=True).table
    assert 0 < max(each.least_peak for each in table) <= min(each.peak for each in table)


def test_a_price_in_time_gives_the_least_memory() -> None:
    tuner = tuner_of()
    found = [tuner.tuned(Budget("recompute time", share)) for share in (0.0, 0.05, 0.2, 1.0)]
    peaks = [each.chosen.peak for each in found if isinstance(each, Tuned)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(peaks) == 4
    for share, each in zip((0.0, 0.05, 0.2, 1.0), found, strict=True):
        assert each.chosen.recompute <= share * each.forward


@pytest.mark.slow
def test_no_policy_of_whole_operators_is_faster() -> None:
    """All choices of operators to save, in all blocks or the first half of them, planned one by one."""
    names = ("aten.mul", "mm in q", "mm in k", "attention", "mm in up", "silu", "first add")
    facts, tuner = stacked(), tuner_of()
    for place in ("in first 3 blocks", "in block"):
        for some in chain.from_iterable(combinations(names, count) for count in (0, 1, 3, 5)):
            saved = "".join(f"save {name} {place}\n" for name in some)
            text = f"recompute everything in block\n{saved}save everything in block where crosses block\n"
            made = planned(text + "undecided -> save\n", facts)
            peak = estimate_peak(made.facts, made.schedule).bytes
            seconds = step_time(made.facts, made.schedule, times_of()).recomputed
            found = tuner._picked(Budget("peak", peak))
            assert found.recompute <= seconds + 1e-9 * tuner.forward, text


@pytest.mark.slow
def test_saved_bytes_come_close_to_the_bound() -> None:
    tuner = tuner_of(12)
    for share in np.linspace(0, 1, 21):
        limit = round(float(share) * tuner.save_all.saved)
        found = tuner._picked(Budget("saved", limit))
        assert tuner.bound(limit) <= found.recompute + 1e-9 * tuner.forward
        assert found.recompute <= tuner.bound(limit) + 0.02 * tuner.forward


@pytest.mark.parametrize("path", [JOINT, EAGER])
def test_what_is_composed_of_blocks_is_what_is_simulated(path: Capabilities) -> None:
    space = Tuner(stacked(), times_of(), path).spaces[0]
    patterns = space.candidates(Budget("peak", 0)).patterns
    composed = [space.composition.profile(fates, with_peak=True) for fates in patterns]
    usable = [at for at, each in enumerate(composed) if each.saves_outputs]
    random = np.random.default_rng(0)
    for _ in range(20):
        blocks = random.choice(usable, size=(1, 6)).astype(np.int32)
        around = random.choice(usable, size=1).astype(np.int32)
        composed_peak, _, again, _ = space.composition.mixtures(composed, np.column_stack([blocks, around]))
        decisions = list(space.composition.decisions(patterns[around[0]]))
        for row in stacked().forward:
            block = space.classes.blocks.block_of[row]
            if block >= 0:
                decisions[row] = space.composition.decisions(patterns[blocks[0, block]])[row]
        schedule = schedule_of(stacked(), decisions)
        if path is EAGER:
            checkpoints = checkpoints_around(stacked(), space.classes.blocks)
            kept = held_and_rerun(stacked(), decisions, checkpoints)
            schedule = build_checkpointed_schedule(stacked(), checkpoints, *kept)
        peak = estimate_peak(stacked(), schedule).bytes
        assert abs(int(composed_peak[0]) - peak) <= 100  # the last block's result counts with what lies around
        assert again[0] == pytest.approx(step_time(stacked(), schedule, times_of()).recomputed)


@pytest.mark.parametrize("share", [0.15, 0.35, 0.6])
def test_further_rules_spare_what_they_are_said_to(share: float) -> None:
    budget, tuner = peak_at(share), tuner_of()
    start, room = tuner._picked(budget), 300
    texts = tuner.spaces[0].refinement.texts(start.rules, planned(start.rules, stacked()), room)
    found = [each for text in texts if (each := tuner.evaluation.of(text)) is not None]
    assert found
    assert all(each.saved <= start.saved + room and each.recompute < start.recompute for each in found)
    assert [each.recompute for each in found] == sorted(each.recompute for each in found)
    assert tuner.tuned(budget).chosen.recompute <= start.recompute


def test_no_further_rule_takes_the_place_of_one_that_is_needed() -> None:
    """What may not run again has to be named: of a full text, the line that does so is never left out."""
    facts = facts_of("\n".join(line + " effectful" * (" aten.silu." in line) for line in stacked_text(8).splitlines()))
    tuner, some = Tuner(facts, node_times(facts, DEVICE), JOINT), ("mm in mlp.up", "attention")
    more = [f"save {each} in first {count} blocks" for count in range(7, 0, -1) for each in some]
    text = "\n".join(["recompute everything", "save silu in block", *more]) + "\n"
    found = tuner.spaces[0].refinement.texts(text, planned(text, facts), 1e6)
    assert found
    for each in found:
        assert "save silu in block" in each
        assert not any(map(is_error, planned(each, facts).diagnostics))


def test_the_same_input_gives_the_same_text() -> None:
    budget = peak_at(0.45)
    again = Tuner(stacked(), times_of(), JOINT).tuned(budget)
    assert again.chosen == chosen(budget)


def test_what_lies_beside_the_graph_counts() -> None:
    besides = Besides(optimizer=500, reserve=0.1)
    limit = besides.on(round(peak_at(0.5).limit))
    found = Tuner(stacked(), times_of(), JOINT, besides=besides).tuned(Budget("peak", limit))
    assert besides.on(found.chosen.peak) <= limit
    assert found.chosen == chosen(Budget("peak", round(peak_at(0.5).limit)))


def test_the_table_falls_in_time_and_rises_in_memory() -> None:
    found = tuner_of().tuned(Budget("peak", float("inf")))
    peaks, seconds = [each.peak for each in found.table], [each.recompute for each in found.table]
    assert peaks == sorted(set(peaks))
    assert seconds == sorted(set(seconds), reverse=True)
    assert len(peaks) > 10
    assert found.table[-1] == SAVE_ALL


@pytest.mark.parametrize("figure", ["peak", "saved"])
def test_a_graph_without_blocks_is_tuned_by_operator(figure: str) -> None:
    facts = facts_of(CHAIN)
    times = node_times(facts, DEVICE)
    all_saved = Tuner(facts, times, JOINT).tuned(Budget("peak", 10**6))
    assert isinstance(all_saved, Tuned)
    limit = all_saved.chosen.saved - 1 if figure == "saved" else all_saved.chosen.peak
    found = Tuner(facts, times, JOINT).tuned(Budget("saved" if figure == "saved" else "peak", limit))
    assert "block" not in found.chosen.rules


@pytest.mark.parametrize("text", ["", "%x = input bytes=10\n%y = aten.sin.default(%x) bytes=10\noutput(%y)"])
def test_a_graph_with_nothing_to_decide_is_saved(text: str) -> None:
    facts = facts_of(text)
    found = Tuner(facts, node_times(facts, DEVICE), JOINT).tuned(Budget("peak", 10**6))
    assert isinstance(found, Tuned | Infeasible)


def test_the_users_own_checkpoint_is_overridden() -> None:
    lines = (line + " tag=PREFER_RECOMPUTE" * (" layers." in line) for line in stacked_text(4).splitlines())
    tagged = "\n".join(lines)
    facts = facts_of(tagged)
    found = Tuner(facts, node_times(facts, DEVICE), JOINT).tuned(Budget("peak", 10**6))
    assert found.chosen.rules == "override save everything\n"


def test_an_eager_checkpoint_is_tuned_block_by_block() -> None:
    found = Tuner(stacked(), times_of(), EAGER).tuned(Budget("saved", 3000))
    if isinstance(found, Tuned):
        made = plan(parse(found.chosen.rules), stacked(), EAGER)
        assert made.diagnostics == ()
        assert saved_and_recomputed(made).saved_bytes == found.chosen.saved <= 3000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "mixtral", "tutorial", "llama3_8b"])
def test_real_models_fit_at_fifty_budgets(name: str) -> None:
    profile = read_device("h100-sxm")
    facts = read_any(f"docs/graphs/{name}.graph")
    capabilities = JOINT if name == "tutorial" else FLAT
    tuner = Tuner(facts, node_times(facts, profile), capabilities)
    low, high = tuner.smallest(Budget("peak", 0)), tuner.save_all
    assert high is not None
    before = float("inf")
    for share in np.linspace(0, 1, 50):
        limit = low.peak + float(share) * (high.peak - low.peak)
        found = tuner._picked(Budget("peak", limit))
        assert found.peak <= limit
        assert found.rules.count("\n") <= 16
        assert found.recompute <= before + 1e-9 * tuner.forward
        before = found.recompute
