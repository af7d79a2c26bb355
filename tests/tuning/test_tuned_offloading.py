"""Copies to the host as a third choice: they never make a policy slower, and are never started for nothing."""

from __future__ import annotations

from functools import cache
from math import inf

import numpy as np
import pytest
from attrs import evolve

from policylang.api.load import parse
from policylang.api.planned_graphs import read_any
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind
from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.language.devices.reading import read_device
from policylang.language.diagnostics import Severity
from policylang.planning.capabilities import FLAT, JOINT
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from policylang.simulation.memory import estimate_peak
from policylang.simulation.node_times import NodeTimes, node_times
from policylang.simulation.streams import step_time
from policylang.tuning.evaluation import Budget, Candidate, Tuned
from policylang.tuning.phrases import Option
from policylang.tuning.tuner import Tuner
from tests.graph.captured import flat_of
from tests.support.drawn import examples, slow
from tests.support.flat_graphs import Flat
from tests.support.hand import same_bits
from tests.support.tuned_graphs import DEVICE, stacked, tuner_of

BLOCKS = 4
SHARES = np.linspace(0, 1, examples(7, 13))
FAST, MIDDLING, SLOW = 1e9, 2e4, 1e-3


def times_at(bandwidth: float) -> NodeTimes:
    return node_times(stacked(BLOCKS), evolve(DEVICE, name=f"host {bandwidth}", host_bandwidth=bandwidth))


@cache
def offloading(bandwidth: float) -> Tuner:
    return Tuner(stacked(BLOCKS), times_at(bandwidth), JOINT, offload=True)


def without(figure: str = "peak") -> tuple[Candidate, Candidate]:
    """The smallest and the fastest that copy nothing."""
    tuner = tuner_of(BLOCKS)
    assert tuner.save_all is not None
    return tuner.smallest(Budget(figure, 0)), tuner.save_all  # type: ignore[arg-type]


def budgets() -> list[Budget]:
    low, high = offloading(FAST).smallest(Budget("peak", 0)).peak, without()[1].peak
    return [Budget("peak", low + float(share) * (high - low)) for share in SHARES]


@pytest.mark.parametrize("bandwidth", [FAST, slow(MIDDLING)])
def test_it_fits_and_is_what_planning_and_simulation_say(bandwidth: float) -> None:
    tuner, times, moved = offloading(bandwidth), times_at(bandwidth), 0
    for budget in budgets():
        found = tuner.tuned(budget)
        if not isinstance(found, Tuned):
            continue
        each = found.chosen
        made = plan(parse(each.rules), stacked(BLOCKS), JOINT)
        assert all(said.severity is Severity.NOTE for said in made.diagnostics)
        assert estimate_peak(made.facts, made.schedule).bytes == each.peak <= budget.limit
        needs, took = saved_and_recomputed(made), step_time(made.facts, made.schedule, times)
        assert (needs.saved_bytes, needs.offloaded_bytes) == (each.saved, each.offloaded)
        assert each.recompute == took.recomputed
        assert each.copies == pytest.approx(took.exposed)
        assert each.price == pytest.approx(took.step - without()[1].step, abs=1e-9)
        assert found.bound == tuner.bound(each.saved + each.offloaded)
        assert found.bound <= each.recompute + 1e-9 * tuner.forward
        assert each.rules.count("\n") <= 16
        moved += each.offloaded > 0
    assert moved > 1


@pytest.mark.parametrize(
    ("bandwidth", "figure"),
    [(FAST, "peak"), (SLOW, "peak"), *(slow(each, "saved") for each in (FAST, MIDDLING, SLOW)), slow(MIDDLING, "peak")],
)
def test_more_memory_never_costs_time_and_copies_never_do(bandwidth: float, figure: str) -> None:
    tuner, plain = offloading(bandwidth), tuner_of(BLOCKS)
    low, high = tuner.smallest(Budget(figure, 0)), without()[1]  # type: ignore[arg-type]
    before = inf
    for share in SHARES:
        least = tuner.besides.memory(low, Budget(figure, 0))  # type: ignore[arg-type]
        limit = least + float(share) * (tuner.besides.memory(high, Budget(figure, 0)) - least)  # type: ignore[arg-type]
        budget = Budget(figure, limit)  # type: ignore[arg-type]
        found, other = tuner._picked(budget), plain._picked(budget)
        assert tuner.besides.memory(found, budget) <= limit
        assert found.price <= before + 1e-9 * tuner.forward
        before = found.price
        if other is not None:
            assert found.price <= other.price + 1e-9 * tuner.forward


def test_a_budget_that_nothing_recomputed_meets_is_met_with_copies() -> None:
    smallest = without()[0]
    found = offloading(FAST).tuned(Budget("peak", smallest.peak - 1))
    assert found.chosen.offloaded > 0
    assert found.chosen.peak < smallest.peak


def test_over_a_fast_link_less_runs_again() -> None:
    smallest, fastest = without()
    middle = Budget("peak", (smallest.peak + fastest.peak) / 2)
    found, plain = offloading(FAST)._picked(middle), tuner_of(BLOCKS)._picked(middle)
    assert found.price < 0.5 * plain.price


def test_over_a_slow_link_nothing_is_moved_unless_it_must_be() -> None:
    smallest, tuner = without()[0], offloading(SLOW)
    for budget in budgets():
        if budget.limit >= smallest.peak:
            found = tuner._picked(budget)
            assert not found.offloaded
            assert found == tuner_of(BLOCKS)._picked(budget)


@pytest.mark.parametrize("share", [0, 0.3, 0.6])
def test_each_line_decides_something(share: float) -> None:
    low, high = offloading(FAST).smallest(Budget("peak", 0)).peak, without()[1].peak
    found = offloading(FAST)._picked(Budget("peak", low + share * (high - low)))
    whole, lines = fates_under(found.rules), found.rules.splitlines(keepends=True)
    for at in range(len(lines)):
        rest = "".join(lines[:at] + lines[at + 1 :])
        assert not rest or fates_under(rest) != whole, f"`{lines[at]}` decides nothing"


def fates_under(text: str) -> tuple[tuple[int, ...], ...]:
    needs = saved_and_recomputed(plan(parse(text), stacked(BLOCKS), JOINT))
    return needs.saved, needs.recomputed, needs.offloaded, needs.undecided


@pytest.mark.slow
def test_what_is_composed_of_blocks_that_copy_is_what_is_simulated() -> None:
    tuner = offloading(MIDDLING)
    made, seen = tuner.spaces[0].candidates(Budget("peak", inf)), 0
    peak, _, recompute, copies = made.figures
    moving = [at for at, fates in enumerate(made.patterns) if Option.OFFLOAD in fates]
    for at in range(0, len(made.rows), 7):
        if made.rows[at, 0] not in moving:
            continue
        text = made.text(at)
        found = None if text is None else tuner.evaluation.of(text)
        if found is not None:
            seen += 1
            assert -made.slack <= found.peak - int(peak[at]) <= made.slack
            assert recompute[at] == pytest.approx(found.recompute)
            assert copies[at] <= found.copies + made.slack / MIDDLING, "never much more than it waits"
    assert seen > 10


def test_a_share_of_the_forward_holds_what_is_waited_for_too() -> None:
    tuner = offloading(MIDDLING)
    found = [tuner.tuned(Budget("recompute time", share)) for share in (0.0, 0.1, 0.5)]
    for share, each in zip((0.0, 0.1, 0.5), found, strict=True):
        assert each.chosen.price <= share * tuner.forward


@pytest.fixture(scope="module")
def flat() -> Flat:
    return flat_of("mlp")


def tuned_on(facts: Facts, share: float) -> Candidate:
    device = DeviceProfile("small", {"float32": Rate.constant(1e9)}, Rate.constant(1e9), host_bandwidth=1e12)
    tuner = Tuner(facts, node_times(facts, device), FLAT, offload=True)
    plain = Tuner(facts, node_times(facts, device), FLAT)
    least = tuner.smallest(Budget("saved", 0)).saved
    budget = Budget("saved", least + share * (plain.save_all.saved - least))
    found, other = tuner._picked(budget), plain._picked(budget)
    assert found.saved <= budget.limit
    assert other is None or found.price <= other.price
    return found


def test_a_traced_step_that_copies_has_the_bits_that_it_had(flat: Flat) -> None:
    found = tuned_on(collect(flat.gm), 0.3)
    assert found.offloaded > 0
    same_bits(flat, found.rules)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "t5", "vit", "mixtral", "tutorial", "llama3_8b", "fsdp", "resnet50"])
def test_real_models_fit_at_twelve_budgets_and_copies_never_cost_time(name: str) -> None:
    profile = read_device("h100-sxm")
    facts = read_any(f"docs/graphs/{name}.graph")
    capabilities = JOINT if facts.kind is GraphKind.JOINT else FLAT
    times = node_times(facts, profile)
    tuner, plain = Tuner(facts, times, capabilities, offload=True), Tuner(facts, times, capabilities)
    low, high = tuner.smallest(Budget("peak", 0)), tuner.save_all
    assert high is not None
    before = inf
    for share in np.linspace(0, 1, 12):
        budget = Budget("peak", low.peak + float(share) * (high.peak - low.peak))
        found, other = tuner._picked(budget), plain._picked(budget)
        assert found.peak <= budget.limit
        assert found.rules.count("\n") <= 16
        assert found.price <= before + 1e-9 * tuner.forward
        assert other is None or found.price <= other.price + 1e-9 * tuner.forward
        before = found.price
