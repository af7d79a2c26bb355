"""The lower hull against every choice there is, put through the planner, and against an exact solver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from itertools import pairwise
from math import inf
from pathlib import Path
from random import Random

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.api.load import load, parse
from policylang.errors import PolicyError
from policylang.graph import snapshot
from policylang.graph.blocks import BlockTable, blocks_of
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import read_device
from policylang.language.files import bundled_policies
from policylang.planning.capabilities import EAGER, FLAT, JOINT, Capabilities
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from policylang.planning.schedule import leaves_block
from policylang.simulation.node_times import NodeTimes, node_times
from policylang.simulation.streams import step_time
from policylang.tuning.choices import NONE, choices_of
from policylang.tuning.lower_hull import bound_at, hull_of, lower_hull
from tests.support.joint import capture_joints
from tests.support.models import ZOO
from tests.support.random_flat import random_flat
from tests.support.textgraph import CHAIN, GraphBuilder, facts_of
from tests.tracing.test_against_eager import trace
from tests.tuning.small_graphs import DEVICE, every_choice, joint_graph, lower_hull_of, planned, random_times

ROOT = Path(__file__).parent.parent.parent
SNAPSHOTS = ROOT / "tests" / "data" / "snapshots"
NO_REPLAY = evolve(JOINT, replays_random=False)
randoms = st.randoms(use_true_random=False)


def chain_times(facts: Facts, **seconds: float) -> NodeTimes:
    return NodeTimes(DEVICE, [seconds.get(name, 0.0) for name in facts.names], {}, {})


def shown(hull) -> list[tuple[int, float]]:
    return [(point.saved, point.seconds) for point in hull]


def test_a_chain_is_worked_out_by_hand() -> None:
    facts = facts_of(CHAIN)
    hull = lower_hull(facts, chain_times(facts, a=1, b=2, c=3), JOINT)
    assert shown(hull) == [(300, 0), (200, 1), (100, 3), (0, 6)]
    a, b, c = (facts.index[name] for name in "abc")
    assert [(sorted(point.kept), sorted(point.recomputed)) for point in hull] == [
        ([a, b, c], []),
        ([b, c], [a]),
        ([c], [a, b]),
        ([], [a, b, c]),
    ]


def test_what_is_to_be_kept_is_kept() -> None:
    facts = facts_of(CHAIN)
    hull = lower_hull(facts, chain_times(facts, a=1, b=2, c=3), JOINT, keep=[facts.index["b"]])
    assert shown(hull) == [(300, 0), (200, 1), (100, 4)]
    assert all(facts.index["b"] in point.kept for point in hull)


def test_between_two_points_the_bound_is_straight_and_below_the_last_there_is_none() -> None:
    facts = facts_of(CHAIN)
    hull = lower_hull(facts, chain_times(facts, a=1, b=2, c=3), JOINT, keep=[facts.index["b"]])
    assert [bound_at(hull, saved) for saved in (1000, 300, 250, 200, 150, 100, 99)] == [0, 0, 0.5, 1, 2.5, 4, inf]


def test_without_a_backward_nothing_is_kept() -> None:
    facts = facts_of("%x = input bytes=4\n%a = aten.sin.default(%x) bytes=4\noutput(%a)")
    hull = lower_hull(facts, chain_times(facts, a=1), JOINT)
    assert shown(hull) == [(0, 0)]
    assert hull[0].kept == hull[0].recomputed == frozenset()


@settings(max_examples=25)
@given(randoms)
def test_it_is_the_hull_of_all_choices_and_each_point_is_what_the_planner_makes_of_it(random: Random) -> None:
    facts = joint_graph(random)
    times = random_times(facts, random)
    hull = lower_hull(facts, times, NO_REPLAY)
    assert shown(hull) == lower_hull_of(set(every_choice(facts, times, NO_REPLAY)))
    for point in hull:
        saved, seconds, needs = planned(facts, times, NO_REPLAY, point.recomputed)
        assert (saved, seconds) == (point.saved, point.seconds)
        assert point.kept == {facts.owners[row] for row in needs.saved}
        assert point.recomputed == {facts.owners[row] for row in needs.recomputed}
        # The other way to write it: all is recomputed, and what is kept is saved.
        others = frozenset(facts.owners[row] for row in facts.forward) - point.kept
        assert planned(facts, times, NO_REPLAY, others)[:2] == (point.saved, point.seconds)


@settings(max_examples=25)
@given(randoms)
def test_nothing_is_below_it_where_the_backward_has_dead_ends(random: Random) -> None:
    facts = joint_graph(random, dead_ends=True)
    times = random_times(facts, random)
    hull = lower_hull(facts, times, NO_REPLAY)
    assert all(bound_at(hull, saved) <= seconds for saved, seconds in every_choice(facts, times, NO_REPLAY))


@settings(max_examples=25)
@given(randoms, st.lists(st.integers(0, 1000), min_size=10, max_size=24), st.sampled_from([2, 4, 4, 6]))
def test_nothing_is_below_it_on_flat_graphs_of_several_regions(
    random: Random, numbers: list[int], segments: int
) -> None:
    facts = collect(random_flat(numbers, segments).gm)
    if len({facts.owners[row] for row in facts.forward}) > 9:
        return
    times = random_times(facts, random)
    hull = lower_hull(facts, times, FLAT)
    assert all(bound_at(hull, saved) <= seconds for saved, seconds in every_choice(facts, times, FLAT))


def test_what_two_regions_make_again_is_priced_once() -> None:
    facts = two_regions()
    times = chain_times(facts, a=1)
    hull = lower_hull(facts, times, FLAT)
    saved, seconds, _ = planned(facts, times, FLAT, hull[-1].recomputed)
    assert shown(hull) == [(100, 0), (0, 1)]
    assert (saved, seconds) == (0, 2)


def two_regions() -> Facts:
    """One value that the backward reads before and after more of the forward."""
    builder = GraphBuilder()
    x = builder.add("x", "input", ())
    a = builder.add("a", "aten.sin.default", (x,), bytes=100)
    loss = builder.add("loss", "aten.sum.default", (a,), bytes=1)
    da = builder.add("da", "aten.mul.Tensor", (a,), backward=True)
    more = builder.add("more", "aten.sum.default", (x,), bytes=1)
    db = builder.add("db", "aten.mul.Tensor", (a,), backward=True)
    builder.add("output", "output", (loss, more, da, db))
    return builder.facts(GraphKind.FLAT)


def by_branch_and_bound(facts: Facts, times: NodeTimes, limit: int) -> float:
    """The least seconds of a whole choice that keeps at most so many bytes."""
    import highspy

    choices = choices_of(facts, times, JOINT)
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    columns = [highs.addVariable(0, 1, type=highspy.HighsVarType.kInteger) for _ in choices.rows]
    for kept, runs, asked in choices.clauses:
        there = sum(columns[each] for each in (kept, runs) if each != NONE)
        highs.addConstr(there >= (1 if asked == NONE else columns[asked]))
    highs.addConstr(sum(size * column for size, column in zip(choices.sizes, columns, strict=True)) <= limit)
    whole = sum(choices.seconds) / 1e6  # in millionths of all that may run again: tolerances are absolute
    highs.minimize(sum(each / whole * column for each, column in zip(choices.seconds, columns, strict=True)))
    return float(highs.getInfo().objective_function_value) * whole


@cache
def traced(name: str) -> tuple[Facts, NodeTimes]:
    """A Llama of two layers as a joint graph, a GPT-2 of two, with dropout, as a flat one."""
    facts = snapshot.load(SNAPSHOTS / f"{name}.graph")
    device = read_device("h100-sxm")
    assert isinstance(device, DeviceProfile)
    return facts, node_times(facts, device)


@pytest.mark.slow
def test_an_exact_solver_is_never_below_the_bound_and_meets_it_at_its_points() -> None:
    facts, times = traced("joint")
    hull = lower_hull(facts, times, JOINT)
    budgets = [hull[0].saved * part // 8 for part in (1, 3, 6)]
    found = [by_branch_and_bound(facts, times, budget) for budget in budgets]
    for budget, seconds in zip(budgets, found, strict=True):
        assert seconds >= bound_at(hull, budget) * (1 - 1e-4)
    middle = hull[len(hull) // 2]
    assert by_branch_and_bound(facts, times, middle.saved) == pytest.approx(middle.seconds, rel=1e-4)


@pytest.mark.parametrize(("name", "path"), [("joint", JOINT), ("flat", FLAT)])
def test_it_falls_and_bends_one_way_and_the_planner_agrees_with_each_point(name: str, path: Capabilities) -> None:
    facts, times = traced(name)
    hull = lower_hull(facts, times, path)
    assert len(hull) > 4
    slopes = [(there.seconds - here.seconds) / (here.saved - there.saved) for here, there in pairwise(hull)]
    assert all(0 < here < there for here, there in pairwise(slopes))
    for point in hull:
        saved, seconds, _ = planned(facts, times, path, point.recomputed)
        assert saved == point.saved
        assert seconds == pytest.approx(point.seconds, rel=1e-12)


@pytest.mark.parametrize(("name", "path"), [("joint", JOINT), ("flat", FLAT)])
def test_no_policy_beats_it(name: str, path: Capabilities) -> None:
    facts, times = traced(name)
    hull = lower_hull(facts, times, path)
    texts = [f"recompute everything\nsave every {n} {operator}" for n in ("2nd", "3rd") for operator in ("mm", "mul")]
    texts += ["save everything", "recompute everything", "recompute everything in block\nsave matmul"]
    written = [parse(f"{text}\nundecided -> save") for text in texts]
    written += [evolve(load(each.name), undecided=written[0].undecided) for each in bundled_policies()]
    for policy in written:
        made = plan(policy, facts, path)
        seconds = step_time(facts, made.schedule, times).recomputed
        assert bound_at(hull, saved_and_recomputed(made).saved_bytes) <= seconds * (1 + 1e-9)


def test_no_policy_beats_it_in_eager_either_where_blocks_run_again_whole() -> None:
    facts, times = traced("joint")
    for policy in (load("llama3_sac"), load("every_2nd_layer"), load("torchtitan_op_sac"), parse("save everything")):
        made = plan(policy, facts, EAGER)
        blocks = BlockTable(made.block_of, made.block_names)
        hull, loose = lower_hull(facts, times, EAGER, blocks=blocks), lower_hull(facts, times, EAGER)
        found = saved_and_recomputed(made)
        seconds = sum(times.seconds[row] for row in found.recomputed) * (1 + 1e-9)
        assert (
            bound_at(loose, found.saved_bytes) <= bound_at(hull, found.saved_bytes) * (1 + 1e-9) <= seconds * (1 + 1e-9)
        )


def test_what_blocks_hand_on_stays_kept_on_a_model() -> None:
    facts, times = traced("joint")
    blocks = blocks_of(facts)
    crossing = [row for row in facts.forward if blocks.block_of[row] >= 0 and leaves_block(facts, row, blocks.block_of)]
    hull, free = (lower_hull(facts, times, JOINT, keep=keep) for keep in (crossing, ()))
    assert not any(facts.owners[row] in point.recomputed for row in crossing for point in hull)
    assert all(bound_at(free, point.saved) <= point.seconds * (1 + 1e-9) for point in hull)


def test_the_tags_of_the_user_hold_unless_they_are_overridden() -> None:
    facts = facts_of(CHAIN)
    tagged = evolve(facts, user_tags=["MUST_RECOMPUTE" if name == "c" else None for name in facts.names])
    times = chain_times(facts, a=1, b=2, c=3)
    assert shown(lower_hull(tagged, times, JOINT)) == [(200, 3), (100, 4), (0, 6)]
    assert shown(lower_hull(tagged, times, JOINT, override=True)) == [(300, 0), (200, 1), (100, 3), (0, 6)]


def test_the_order_of_the_columns_changes_nothing() -> None:
    facts, times = traced("joint")
    choices = choices_of(facts, times, JOINT)
    order = list(range(len(choices.rows)))
    Random(3).shuffle(order)
    place = {column: at for at, column in enumerate(order)} | {NONE: NONE}
    clauses = [tuple(place[each] for each in clause) for clause in choices.clauses]
    Random(4).shuffle(clauses)
    shuffled = evolve(
        choices,
        seconds=[choices.seconds[column] for column in order],
        sizes=[choices.sizes[column] for column in order],
        rows=[choices.rows[column] for column in order],
        clauses=clauses,
        keeps=[place[each] for each in choices.keeps],
        runs=[place[each] for each in choices.runs],
    )
    for here, there in zip(hull_of(choices), hull_of(shuffled), strict=True):
        assert (here.saved, here.seconds, here.kept, here.recomputed) == (
            there.saved,
            there.seconds,
            there.kept,
            there.recomputed,
        )


def test_hash_seeds_change_nothing() -> None:
    facts, times = traced("joint")
    script = (
        "import sys, json; from policylang.graph import snapshot\n"
        "from policylang.language.devices.reading import read_device\n"
        "from policylang.planning.capabilities import JOINT\n"
        "from policylang.simulation.node_times import node_times\n"
        "from policylang.tuning.lower_hull import lower_hull\n"
        "facts = snapshot.load(sys.argv[1]); times = node_times(facts, read_device('h100-sxm'))\n"
        "hull = lower_hull(facts, times, JOINT)\n"
        "assert 'torch' not in sys.modules\n"
        "print(json.dumps([[p.saved, p.seconds.hex(), sorted(p.kept), sorted(p.recomputed)] for p in hull]))\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4321", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, str(SNAPSHOTS / "joint.graph")]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    here = lower_hull(facts, times, JOINT)
    assert json.loads(out) == [
        [point.saved, point.seconds.hex(), sorted(point.kept), sorted(point.recomputed)] for point in here
    ]


def test_without_the_solver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    facts = facts_of(CHAIN)
    with pytest.raises(PolicyError) as caught:
        lower_hull(facts, chain_times(facts, a=1), JOINT)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "APL619"
    assert diagnostic.help == "install it with `pip install highspy`"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ZOO))
def test_on_every_architecture_the_planner_agrees_with_each_point(name: str) -> None:
    device = read_device("h100-sxm")
    graphs = [(joint.gm, JOINT) for joint in capture_joints(*ZOO[name]())]
    graphs.append((trace(ZOO[name]()).gm, FLAT))
    for gm, path in graphs:
        facts = collect(gm)
        times = node_times(facts, device)
        for point in lower_hull(facts, times, path):
            saved, seconds, _ = planned(facts, times, path, point.recomputed)
            assert saved == point.saved
            assert seconds == pytest.approx(point.seconds, rel=1e-9)
