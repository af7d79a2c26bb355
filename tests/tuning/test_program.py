"""The integer program against every choice there is, put through the planner."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable
from functools import cache
from itertools import pairwise
from math import fsum, inf
from pathlib import Path
from random import Random
from typing import Any

import pytest
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.api.load import load, parse
from policylang.errors import PolicyError
from policylang.graph import snapshot
from policylang.graph.blocks import blocks_of
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind
from policylang.language.devices.profile import DeviceProfile
from policylang.language.devices.reading import read_device
from policylang.language.files import bundled_policies
from policylang.language.syntax import Policy
from policylang.planning.capabilities import EAGER, FLAT, JOINT, Capabilities
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from policylang.planning.schedule import leaves_block
from policylang.simulation.node_times import NodeTimes, node_times
from policylang.simulation.streams import step_time
from policylang.tuning.choices import Choices, choices_of
from policylang.tuning.program import Program, bound_of
from policylang.tuning.tuner import Tuner
from tests.support.drawn import slow
from tests.support.joint import capture_joints
from tests.support.models import ZOO
from tests.support.process import python
from tests.support.random_flat import random_flat
from tests.support.textgraph import CHAIN, GraphBuilder, facts_of
from tests.tracing.test_against_eager import trace
from tests.tuning.small_graphs import DEVICE, every_choice, joint_graph, planned, random_times

ROOT = Path(__file__).parent.parent.parent
SNAPSHOTS = ROOT / "tests" / "data" / "snapshots"
NO_REPLAY = evolve(JOINT, replays_random=False)
randoms = st.randoms(use_true_random=False)


def chain_times(facts: Facts, **seconds: float) -> NodeTimes:
    return NodeTimes(DEVICE, [seconds.get(name, 0.0) for name in facts.names], {}, {})


@frozen
class Choice:
    """What the columns that are 1 come to: rows of memory that is kept, and the producers that are recomputed."""

    saved: int
    seconds: float
    kept: frozenset[int]
    recomputed: frozenset[int]


def chosen(choices: Choices, columns: Collection[int]) -> Choice:
    facts, on = choices.facts, frozenset(columns)
    kept = frozenset(choices.rows[column] for column in on if choices.keeps[choices.rows[column]] == column)
    again = {choices.rows[column] for column in on} - kept
    again |= {choices.rows[column] for column in on if choices.runs[choices.rows[column]] == column}
    roots, tags = facts.storage_roots, facts.user_tags
    for row in facts.forward:  # a view is recomputed with its base
        base = facts.owners[roots[row]]
        if roots[row] != row and roots[row] not in kept and (base in again or tags[base] == "MUST_RECOMPUTE"):
            again.add(facts.owners[row])
    seconds = fsum(choices.seconds[column] for column in columns)
    return Choice(sum(choices.sizes[column] for column in columns), seconds, kept, frozenset(again))


def program_of(facts: Facts, times: NodeTimes, path: Capabilities, **more: Any) -> Program:
    """The program, solved to the end."""
    return Program(choices_of(facts, times, path, **more), mip_rel_gap=0.0, mip_max_nodes=10_000)


def best(program: Program, limit: float) -> Choice | None:
    columns = program.within(limit)
    return None if columns is None else chosen(program.choices, columns)


def shown(program: Program, limits: Iterable[float]) -> list[tuple[int, float] | None]:
    found = [best(program, limit) for limit in limits]
    return [None if each is None else (each.saved, each.seconds) for each in found]


def test_a_chain_is_worked_out_by_hand() -> None:
    facts = facts_of(CHAIN)
    program = program_of(facts, chain_times(facts, a=1, b=2, c=3), JOINT)
    assert shown(program, (300, 299, 200, 199, 100, 0)) == [(300, 0), (200, 1), (200, 1), (100, 3), (100, 3), (0, 6)]
    a, b, c = (facts.index[name] for name in "abc")
    found = [chosen(program.choices, columns) for columns in reversed(program.vertices())]
    assert [(sorted(each.kept), sorted(each.recomputed)) for each in found] == [
        ([a, b, c], []),
        ([b, c], [a]),
        ([c], [a, b]),
        ([], [a, b, c]),
    ]


def test_what_is_to_be_kept_is_kept() -> None:
    facts = facts_of(CHAIN)
    program = program_of(facts, chain_times(facts, a=1, b=2, c=3), JOINT, keep=[facts.index["b"]])
    assert shown(program, (300, 200, 100, 99)) == [(300, 0), (200, 1), (100, 4), None]
    assert [program.bound(limit) for limit in (1000, 250, 150, 100, 99)] == pytest.approx([0, 1, 4, 4, inf])


def test_without_a_backward_nothing_is_kept() -> None:
    facts = facts_of("%x = input bytes=4\n%a = aten.sin.default(%x) bytes=4\noutput(%a)")
    assert bound_of(choices_of(facts, chain_times(facts, a=1), JOINT), 0) == 0


def least(found: Collection[tuple[int, float]], limit: int) -> float:
    return min((seconds for saved, seconds in found if saved <= limit), default=inf)


@settings(max_examples=25)
@given(randoms)
def test_it_is_the_best_of_all_choices_in_any_number_of_bytes_and_the_planner_agrees(random: Random) -> None:
    facts = joint_graph(random)
    times = random_times(facts, random)
    program = program_of(facts, times, NO_REPLAY)
    every = set(every_choice(facts, times, NO_REPLAY))
    for limit in {saved for saved, _ in every} if program.choices.rows else ():
        found = best(program, limit)
        assert found is not None
        assert found.seconds == pytest.approx(least(every, limit))
        assert program.bound(limit) == pytest.approx(found.seconds, abs=1e-4)
        saved, seconds, _ = planned(facts, times, NO_REPLAY, found.recomputed)
        assert (saved, seconds) == (found.saved, found.seconds)


@settings(max_examples=25)
@given(randoms)
def test_nothing_is_below_it_where_the_backward_has_dead_ends(random: Random) -> None:
    facts = joint_graph(random, dead_ends=True)
    times = random_times(facts, random)
    choices = choices_of(facts, times, NO_REPLAY)
    every = set(every_choice(facts, times, NO_REPLAY))
    assert all(bound_of(choices, saved) <= least(every, saved) + 1e-6 for saved, _ in every)


@settings(max_examples=25)
@given(randoms, st.lists(st.integers(0, 1000), min_size=10, max_size=24), st.sampled_from([2, 4, 4, 6]))
def test_nothing_is_below_it_on_flat_graphs_of_several_regions(random, numbers, segments) -> None:
    facts = collect(random_flat(numbers, segments).gm)
    if len({facts.owners[row] for row in facts.forward}) > 9:
        return
    times = random_times(facts, random)
    choices, every = choices_of(facts, times, FLAT), set(every_choice(facts, times, FLAT))
    assert all(bound_of(choices, saved) <= least(every, saved) + 1e-6 for saved, _ in every)


def test_what_two_regions_make_again_is_priced_once() -> None:
    facts = two_regions()
    times = chain_times(facts, a=1)
    program = program_of(facts, times, FLAT)
    found = best(program, 0)
    assert found is not None
    saved, seconds, _ = planned(facts, times, FLAT, found.recomputed)
    assert shown(program, (100, 0)) == [(100, 0), (0, 1)]
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


@cache
def traced(name: str) -> tuple[Facts, NodeTimes]:
    """A Llama of two layers as a joint graph, a GPT-2 of two, with dropout, as a flat one."""
    facts = snapshot.load(SNAPSHOTS / f"{name}.graph")
    device = read_device("h100-sxm")
    assert isinstance(device, DeviceProfile)
    return facts, node_times(facts, device)


SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)


def limits_of(program: Program) -> list[int]:
    fewest, *_, most = (sum(program.choices.sizes[each] for each in columns) for columns in program.vertices())
    return [round(fewest + share * (most - fewest)) for share in SHARES]


@pytest.mark.parametrize(("name", "path"), [slow("joint", JOINT), ("flat", FLAT)])
def test_it_falls_and_the_planner_agrees_with_each_choice(name: str, path: Capabilities) -> None:
    facts, times = traced(name)
    program, before = program_of(facts, times, path), inf
    for limit in limits_of(program):
        found = best(program, limit)
        assert found is not None
        assert found.saved <= limit
        assert found.seconds < before
        assert program.bound(limit) == pytest.approx(found.seconds, abs=1e-6 * sum(times.seconds))
        assert program.bound(limit) <= found.seconds * (1 + 1e-9)
        saved, seconds, _ = planned(facts, times, path, found.recomputed)
        assert saved == found.saved
        assert seconds == pytest.approx(found.seconds, rel=1e-12)
        before = found.seconds


def test_the_lower_hull_bends_one_way() -> None:
    facts, times = traced("joint")
    program = Program(choices_of(facts, times, JOINT))
    points = [chosen(program.choices, columns) for columns in program.vertices()]
    assert len(points) > 4
    slopes = [(here.seconds - there.seconds) / (there.saved - here.saved) for here, there in pairwise(points)]
    assert all(here > there > 0 for here, there in pairwise(slopes))


@pytest.mark.parametrize(("name", "path"), [slow("joint", JOINT), ("flat", FLAT)])
def test_no_policy_beats_it(name: str, path: Capabilities) -> None:
    facts, times = traced(name)
    program = Program(choices_of(facts, times, path))
    texts = [f"recompute everything\nsave every {n} {operator}" for n in ("2nd", "3rd") for operator in ("mm", "mul")]
    texts += ["save everything", "recompute everything", "recompute everything in block\nsave matmul"]
    written = [parse(f"{text}\nundecided -> save") for text in texts]
    written += [evolve(load(each.name), undecided=written[0].undecided) for each in bundled_policies()]
    for policy in written:
        made = plan(policy, facts, path)
        seconds = step_time(facts, made.schedule, times).recomputed
        assert program.bound(saved_and_recomputed(made).saved_bytes) <= seconds * (1 + 1e-9) + 1e-15


def test_in_eager_it_is_what_a_block_that_runs_again_comes_to() -> None:
    facts, times = traced("joint")
    tuner = Tuner(facts, times, EAGER)

    def cost_of(policy: Policy) -> tuple[float, float]:
        found = saved_and_recomputed(plan(policy, facts, EAGER))
        return tuner.bound(found.saved_bytes), sum(times.seconds[row] for row in found.recomputed)

    for policy in (load("llama3_sac"), load("every_2nd_layer"), load("torchtitan_op_sac"), parse("save everything")):
        bound, seconds = cost_of(policy)
        assert bound <= seconds * (1 + 1e-9) + 1e-15
    bound, everything = cost_of(parse("recompute everything in block\nundecided -> save"))
    assert bound == pytest.approx(everything), "inputs of blocks and what lies outside are no bytes to spend"
    program = Program(tuner.spaces[0].choices(()))
    assert chosen(program.choices, program.vertices()[0]).seconds == pytest.approx(everything)


@pytest.mark.slow
def test_what_blocks_hand_on_stays_kept_on_a_model() -> None:
    facts, times = traced("joint")
    blocks = blocks_of(facts)
    crossing = [row for row in facts.forward if blocks.block_of[row] >= 0 and leaves_block(facts, row, blocks.block_of)]
    program, free = (Program(choices_of(facts, times, JOINT, keep=keep)) for keep in (crossing, ()))
    for limit in limits_of(program):
        found = best(program, limit)
        assert found is not None
        assert not any(facts.owners[row] in found.recomputed for row in crossing)
        assert free.bound(limit) <= found.seconds


def test_the_tags_of_the_user_hold_unless_they_are_overridden() -> None:
    facts = facts_of(CHAIN)
    tagged = evolve(facts, user_tags=["MUST_RECOMPUTE" if name == "c" else None for name in facts.names])
    times = chain_times(facts, a=1, b=2, c=3)
    assert shown(program_of(tagged, times, JOINT), (300, 100, 0)) == [(200, 3), (100, 4), (0, 6)]
    assert shown(program_of(tagged, times, JOINT, override=True), (300, 200, 0)) == [(300, 0), (200, 1), (0, 6)]


@pytest.mark.slow
def test_hash_seeds_change_nothing() -> None:
    facts, times = traced("joint")
    script = (
        "import sys, json; from policylang.graph import snapshot\n"
        "from policylang.language.devices.reading import read_device\n"
        "from policylang.planning.capabilities import JOINT\n"
        "from policylang.simulation.node_times import node_times\n"
        "from policylang.tuning.choices import choices_of\n"
        "from policylang.tuning.program import Program\n"
        "facts = snapshot.load(sys.argv[1]); times = node_times(facts, read_device('h100-sxm'))\n"
        "program = Program(choices_of(facts, times, JOINT))\n"
        "assert 'torch' not in sys.modules\n"
        "print(json.dumps([program.vertices(), program.within(10**7), program.bound(10**7)]))\n"
    )
    out = python("-c", script, SNAPSHOTS / "joint.graph", PYTHONHASHSEED="4321").stdout
    program = Program(choices_of(facts, times, JOINT))
    here = [program.vertices(), program.within(10**7), program.bound(10**7)]
    assert json.loads(out) == json.loads(json.dumps(here))


def test_without_the_solver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    facts = facts_of(CHAIN)
    with pytest.raises(PolicyError) as caught:
        Program(choices_of(facts, chain_times(facts, a=1), JOINT))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "APL619"
    assert diagnostic.help == "install it with `pip install highspy`"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ZOO))
def test_on_every_architecture_the_planner_agrees_with_each_choice(name: str) -> None:
    device = read_device("h100-sxm")
    graphs = [(joint.gm, JOINT) for joint in capture_joints(*ZOO[name]())]
    graphs.append((trace(ZOO[name]()).gm, FLAT))
    for gm, path in graphs:
        facts = collect(gm)
        times = node_times(facts, device)
        program = Program(choices_of(facts, times, path))
        for columns in program.vertices() if program.choices.rows else ():
            found = chosen(program.choices, columns)
            saved, seconds, _ = planned(facts, times, path, found.recomputed)
            assert saved == found.saved
            assert seconds == pytest.approx(found.seconds, rel=1e-9)
