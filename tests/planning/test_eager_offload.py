"""The plan of a whole model in eager, where values wait on the host: by hand, and against a slow schedule."""

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policylang
from policylang.graph.facts import Facts, Phase, StepKind
from policylang.language.devices.profile import DeviceProfile, Rate
from policylang.language.devices.reading import read_device
from policylang.planning.capabilities import EAGER, JOINT, Capabilities
from policylang.planning.inspection.breakdown import breakdown, copies_of_rules
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.planning.schedule import Checkpoints, held_and_rerun, host_memory, pool_bytes
from policylang.report.plan_json import plan_json
from policylang.report.plan_page import plan_page
from policylang.report.plan_text import plan_text
from policylang.simulation.memory import simulate
from policylang.simulation.node_times import node_times
from policylang.simulation.streams import walk
from tests.planning.test_outcome import written
from tests.planning.test_peak_values import assert_memory_is_that_of_the_slow_account
from tests.support.drawn import examples
from tests.support.textgraph import facts_of

MODEL = """
    %x = input shape=2 dtype=float32
    %w = parameter shape=2 dtype=float32
    %e = aten.embedding.default(%w, %x) embed shape=2 dtype=float32
    %a0 = aten.mm.default(%e, %w) layers.0 shape=2 dtype=float32
    %b0 = aten.cos.default(%a0) layers.0 shape=2 dtype=float32
    %c0 = aten.mm.default(%b0, %w) layers.0 shape=2 dtype=float32
    %a1 = aten.mm.default(%c0, %w) layers.1 shape=2 dtype=float32
    %b1 = aten.cos.default(%a1) layers.1 shape=2 dtype=float32
    %c1 = aten.mm.default(%b1, %w) layers.1 shape=2 dtype=float32
    %a2 = aten.mm.default(%c1, %w) layers.2 shape=2 dtype=float32
    %b2 = aten.cos.default(%a2) layers.2 shape=2 dtype=float32
    %c2 = aten.mm.default(%b2, %w) layers.2 shape=2 dtype=float32
    %l = aten.mm.default(%c2, %w) head shape=2 dtype=float32
    ---
    %g = tangent shape=2 dtype=float32
    %gc2 = aten.mul.Tensor(%g, %c2) head shape=2 dtype=float32
    %gb2 = aten.mul.Tensor(%gc2, %b2) layers.2 shape=2 dtype=float32
    %ga2 = aten.mul.Tensor(%gb2, %a2, %c1) layers.2 shape=2 dtype=float32
    %gb1 = aten.mul.Tensor(%ga2, %b1) layers.1 shape=2 dtype=float32
    %ga1 = aten.mul.Tensor(%gb1, %a1, %c0) layers.1 shape=2 dtype=float32
    %gb0 = aten.mul.Tensor(%ga1, %b0) layers.0 shape=2 dtype=float32
    %ga0 = aten.mul.Tensor(%gb0, %a0, %e) layers.0 shape=2 dtype=float32
    output(%l, %ga0)
"""
BLOCKS = "blocks layers.*\nrecompute everything in block\n"
CROSSING = f"{BLOCKS}offload everything in block where crosses block\n"


def planned(text: str, path: Capabilities = EAGER, graph: str = MODEL) -> Plan:
    return plan(policylang.parse(text), facts_of(graph), path)


def outcomes(made: Plan) -> tuple[str, str, str]:
    """The names of what is saved, offloaded and recomputed."""
    found = saved_and_recomputed(made)
    saved, offloaded, recomputed = (
        " ".join(made.facts.names[row] for row in rows) for rows in (found.saved, found.offloaded, found.recomputed)
    )
    return saved, offloaded, recomputed


def test_what_crosses_blocks_is_decided_by_the_rule_and_leaves_as_the_next_block_begins() -> None:
    made = planned(CROSSING)
    assert outcomes(made) == ("e c2", "c0 c1", "a0 b0 a1 b1 a2 b2")
    assert written(made.facts, made.schedule) == (
        "e a0 b0 c0 >c0 a1 b1 c1 >c1 a2 b2 c2 l | "
        "gc2 c0> c1> <c1 <c0 c1< a2* b2* gb2 ga2 c0< a1* b1* gb1 ga1 a0* b0* gb0 ga0"
    )
    (note,) = made.diagnostics
    assert (note.code, note.message) == (
        "APL313",
        "`offload everything in block where crosses block` leaves 1 forward value on the device, `c2`: "
        "its block returns c2, and what follows the blocks holds it",
    )


def test_what_is_made_inside_leaves_behind_its_last_reader_and_is_awaited_where_it_is_met() -> None:
    made = planned(f"{CROSSING}offload cos in block outside last block\n")
    assert outcomes(made) == ("e c2", "b0 c0 b1 c1", "a0 a1 a2 b2")
    assert written(made.facts, made.schedule) == (
        "e a0 b0 c0 >b0 >c0 a1 b1 c1 b0> >b1 c0> >c1 a2 b2 c2 l | "
        "gc2 b1> c1> <c1 <c0 <b1 c1< a2* b2* gb2 ga2 <b0 c0< a1* b1< gb1 ga1 a0* b0< gb0 ga0"
    )


def test_copies_back_start_as_far_ahead_as_the_policy_says() -> None:
    made = planned(f"{BLOCKS}offload cos in block\nprefetch offloaded 2 blocks ahead\n")
    assert written(made.facts, made.schedule).partition("| ")[2] == (
        "gc2 b1> b2> <b2 <b1 <b0 a2* b2< gb2 ga2 a1* b1< gb1 ga1 a0* b0< gb0 ga0"
    )


def test_on_a_graph_copies_back_start_as_far_ahead_too() -> None:
    text = f"{BLOCKS}offload mm in block where crosses block\nprefetch offloaded {{}} ahead\n"
    one, two = (planned(text.format(each), JOINT) for each in ("1 block", "2 blocks"))
    assert written(one.facts, one.schedule).partition("| ")[2] == (
        "<c2 c2< gc2 <c1 c1< <c0 a2* b2* gb2 ga2 c0< a1* b1* gb1 ga1 a0* b0* gb0 ga0"
    )
    assert written(two.facts, two.schedule) == written(one.facts, one.schedule)  # of three blocks none is farther away


def test_a_budget_is_spent_over_the_whole_model_in_the_order_of_its_blocks() -> None:
    made = planned(f"{BLOCKS}offload cos in block up to 16 B per rank\n")
    assert outcomes(made)[1] == "b0 b1"


def test_a_recomputation_of_what_crosses_is_not_carried_out() -> None:
    made = planned(f"{CROSSING}recompute mm in block\n")
    assert outcomes(made) == ("e c0 c1 c2", "", "a0 b0 a1 b1 a2 b2")
    crossing = made.decisions[made.facts.index["c0"]]
    assert crossing.reason == "what a block returns: the next checkpoint holds it"


VIEW = "%v0 = aten.view.default(%c0) layers.0 view shape=2"
VIEWED = MODEL.replace("%a1 = aten.mm.default(%c0", f"{VIEW}\n    %a1 = aten.mm.default(%v0")
VIEWED = VIEWED.replace("%a1, %c0)", "%a1, %v0)")


def test_a_view_that_crosses_is_taken_again_from_the_memory_that_came_back() -> None:
    made = planned(CROSSING, graph=VIEWED)
    assert outcomes(made)[:2] == ("e c2", "c0 c1")
    assert "c0< v0* a1* b1*" in written(made.facts, made.schedule)
    steps = [name for kind, name, _ in made.schedule.names(made.facts) if kind == StepKind.FIRST_RUN]
    assert _alive_of(made)["gc2"] == _alive_of(planned(CROSSING))["gc2"]
    assert steps.count("v0") == 1


def _alive_of(made: Plan) -> dict[str, int]:
    found = simulate(made.facts, made.schedule)
    return {made.facts.names[row]: live for row, live in zip(found.rows, found.live, strict=True)}


def test_memory_of_the_device_goes_and_that_of_the_host_comes() -> None:
    saved, moved = planned(f"{BLOCKS}save cos in block\n"), planned(f"{CROSSING}offload cos in block\n")
    before, after = _alive_of(saved), _alive_of(moved)
    assert before["gc2"] - after["gc2"] == 24  # b0, c0 and b1 are on the host by then, c1 and b2 on their way
    assert moved.host_memory == 40
    assert saved.host_memory == 0


def test_the_pool_rounds() -> None:
    graph = MODEL.replace("shape=2 ", "shape=3 ")
    made = planned(CROSSING, graph=graph)
    assert pool_bytes(12) == 16
    assert made.host_memory == 32
    for limit, holds in (("32 B", True), ("31 B", False)):
        (outcome,) = planned(f"{CROSSING}expect host memory <= {limit}\n", graph=graph).expectations
        assert (outcome.status == "held") == holds
        assert outcome.found == "32 B"


def test_memory_of_a_host_is_that_of_the_ranks_that_the_device_says() -> None:
    text = f"{CROSSING}expect host memory per host <= 128 B\n"
    (unknown,) = planned(text).expectations
    assert unknown.status == "failed"
    assert "how many ranks share a host" in unknown.found
    (known,) = planned(f"device h100-sxm\n{text}").expectations
    assert (known.status, known.found) == ("held", "128 B")


def test_exposed_time_counts_copies() -> None:
    device = DeviceProfile("slow", {}, Rate.constant(8.0), host_bandwidth=4.0)
    made = planned(CROSSING)
    walked = walk(made.facts, made.schedule, node_times(made.facts, device))
    # c1 is awaited as soon as its copy starts: 8 bytes at 4 a second; c0 arrives behind it, while a2 … ga2 compute
    assert walked.exposed == pytest.approx(2.0)


SLOW_DEVICE = """
name = "slow"
[compute]
float32 = 1.0
[memory]
bandwidth = 8.0
[host]
bandwidth = 4.0
"""


def test_each_line_says_what_it_copies_and_who_waits(tmp_path: Path) -> None:
    (tmp_path / "slow.toml").write_text(SLOW_DEVICE, encoding="utf-8")
    text = f"{CROSSING}offload cos in first block\n"
    profile = read_device(tmp_path / "slow.toml")
    assert isinstance(profile, DeviceProfile)
    made = plan(policylang.parse(text), facts_of(MODEL), EAGER, device=profile)
    crossing, inside = copies_of_rules(made).values()
    assert (crossing.source, crossing.out_bytes, crossing.back_bytes) == ("<policy>:3", 16, 16)
    assert (inside.source, inside.out_bytes, inside.back_bytes) == ("<policy>:4", 8, 8)
    # c1 takes 2 s from where it is wanted; all else arrives while blocks compute
    assert (crossing.waits, crossing.exposed, crossing.hidden) == ({"layers.2": 2.0}, 2.0, 6.0)
    assert (inside.waits, inside.exposed, inside.hidden) == ({}, 0.0, 4.0)
    assert [each.exposed for each in copies_of_rules(planned(text)).values()] == [None, None]
    found = breakdown(made)
    said = plan_text(found, ())
    assert re.search(r"host memory +24 B", said)
    assert re.search(r"<policy>:3 +16 B +16 B\n", plan_text(breakdown(planned(text)), ()))
    assert re.search(r"<policy>:3 +16 B +16 B +6 s +2 s +layers.2 2 s", said)
    data = json.loads(plan_json(found, (), ()))
    assert data["host_memory"] == 24
    assert data["copies"][0]["waits"] == {"layers.2": 2.0}
    page = plan_page(found, (), "a graph")
    assert "on the host: " in page
    assert '"host":[0,0,0,0,16,16,16,24,' in page.replace(" ", "")
    assert "on the host: " not in plan_page(breakdown(planned(BLOCKS)), (), "a graph")


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (BLOCKS, "APL301", "is about copies back from the host, and nothing is offloaded"),
        ("offload cos\n", "APL375", "counts in blocks, and no blocks were found in this graph"),
    ],
)
def test_a_line_about_copies_that_there_are_not(text: str, code: str, said: str) -> None:
    graph = MODEL if "blocks" in text else MODEL.replace("layers.", "part_")
    made = planned(f"{text}prefetch offloaded 2 blocks ahead\n", JOINT, graph)
    found = [each for each in made.diagnostics if each.code in ("APL301", "APL375")]
    assert [(each.code, each.message) for each in found] == [(code, f"`prefetch offloaded 2 blocks ahead` {said}")]
    optional = planned(f"{BLOCKS}optional prefetch offloaded 2 blocks ahead\n", JOINT)
    assert not optional.diagnostics


# --- any model, any decisions ----------------------------------------------------------------------------------------
def stack(drawn: Sequence[int]) -> Facts:
    """A stack of blocks: each reads what earlier ones made, its backward what it has made, and at times any block."""
    numbers = iter([*drawn, *[0] * 500])
    lines, made = ["%w = parameter shape=2 dtype=float32"], [["e"]]
    lines.append("%e = aten.embedding.default(%w) embed shape=2 dtype=float32")
    for block in range(2 + next(numbers) % 4):
        own: list[str] = []
        for at in range(1 + next(numbers) % 4):
            kind, reach = next(numbers) % 5, next(numbers)
            # of its own, of the block before, or of any
            near = own or made[-1]
            read = near[reach % len(near)] if kind < 3 else made[reach % len(made)][-1]
            name = f"n{block}_{at}"
            what = "aten.view.default(%{}) layers.{} view" if kind == 4 else "aten.cos.default(%{}) layers.{}"
            lines.append(f"%{name} = {what.format(read, block)} shape=2 dtype=float32")
            own.append(name)
        made.append(own)
    lines += [f"%l = aten.mm.default(%{made[-1][-1]}, %w) head shape=2 dtype=float32", "---"]
    lines.append("%g = tangent shape=2 dtype=float32")
    last = "g"
    for block in range(len(made) - 2, -1, -1):
        for at in range(1 + next(numbers) % 2):
            own, before = made[block + 1], made[next(numbers) % (block + 1)]
            read = own[next(numbers) % len(own)]
            more = f", %{before[-1]}" if next(numbers) % 3 == 0 else ""
            name = f"b{block}_{at}"
            lines.append(f"%{name} = aten.mul.Tensor(%{last}, %{read}{more}) layers.{block} shape=2 dtype=float32")
            last = name
    return facts_of("\n".join([*lines, f"output(%l, %{last})"]))


def slow_schedule(
    facts: Facts, points: Checkpoints, moved: Collection[int], again: Collection[int], ahead: int
) -> list[tuple[int, int, int]]:
    """As the sentences of the documentation say it, looked up anew for each step."""
    roots, steps = facts.storage_roots, list[tuple[int, int, int]]()
    holder = {root: next((row for row in moved if roots[row] == root), None) for root in roots}
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    forward = [row for row in calls if facts.phases[row] == Phase.FORWARD]
    count = len(points.reach)

    def reads(block: int) -> list[int]:
        return [*dict.fromkeys(holder[roots[row]] for row in points.given[block] if holder[roots[row]] is not None)]  # type: ignore[misc]

    def holds(block: int) -> list[int]:
        return [row for row in sorted(moved) if points.of[row] == block and row < points.reach[block]]

    # when each leaves: behind the last row of its block that touches it, or as the next block begins
    leaves: dict[tuple[int, bool], list[int]] = {}
    for row in forward:
        block = points.of[row]
        if block >= 0 and row == min(each for each in forward if points.of[each] == block):
            leaves[row, False] = [
                each
                for each in reads(block)
                if each not in holds(points.of[each]) and all(each not in reads(other) for other in range(block))
            ]
    for value in moved:
        if value in holds(points.of[value]) or all(value not in reads(block) for block in range(count)):
            touching = [
                row
                for row in forward
                if points.of[row] == points.of[value]
                and any(roots[each] == roots[value] for each in (row, *facts.inputs[row]))
            ]
            leaves.setdefault((max(touching), True), []).append(value)
    under_way: list[int] = []

    def leave(value: int) -> None:
        if len(under_way) == 2:
            steps.append((StepKind.WAIT_TO_HOST, under_way.pop(0), 0))
        steps.append((StepKind.COPY_TO_HOST, value, 0))
        under_way.append(value)

    recomputed = [block for block in range(count) if points.reach[block]]
    asked, taken = set[int](), set[int]()

    def take(value: int) -> None:
        if value not in taken:
            steps.append((StepKind.WAIT_FROM_HOST, value, 1))
        taken.add(value)

    for row in calls:
        late = facts.phases[row] == Phase.BACKWARD
        for block in [each for each in range(count) if points.first[each] == row]:
            while under_way:
                steps.append((StepKind.WAIT_TO_HOST, under_way.pop(0), 1))
            for other in [each for each in recomputed if each <= block][: -ahead - 2 : -1]:
                back = [each for each in dict.fromkeys((*reads(other), *holds(other))) if each not in asked]
                asked.update(back)
                steps += [(StepKind.COPY_FROM_HOST, each, 1) for each in back]
            for each in reads(block):
                take(each)
            views = set()
            for each in points.given[block]:
                while holder[roots[each]] not in (None, each):
                    views.add(each)
                    each = facts.inputs[each][0]
            steps += [(StepKind.SECOND_RUN, each, 1) for each in sorted(views)]
            for each in sorted({*holds(block), *again}):
                if points.of[each] == block and each < points.reach[block] and each in again:
                    steps.append((StepKind.SECOND_RUN, each, 1))
                elif points.of[each] == block and each < points.reach[block]:
                    take(each)
        for value in leaves.get((row, False), []):
            leave(value)
        steps.append((StepKind.FIRST_RUN, row, int(late)))
        for value in sorted(leaves.get((row, True), [])):
            leave(value)
    return steps


POLICIES = [
    f"{CROSSING}offload cos where crosses block\n",
    f"{BLOCKS}offload everything in block\n",
    f"{BLOCKS}save everything in block\noffload every 2nd cos per block\n",
    f"{BLOCKS}offload cos in every 2nd block up to 24 B per rank\n",
]
drawing = settings(max_examples=examples(40, 300))


def leniently_planned(text: str, facts: Facts, ahead: int) -> Plan:
    """Where a rule matches nothing, that is as it should be."""
    lines = [f"optional {line}" if line.startswith(("offload", "save")) else line for line in text.splitlines()]
    lines.append(f"optional prefetch offloaded {ahead} blocks ahead")
    return plan(policylang.parse("\n".join(lines)), facts, EAGER)


@given(st.lists(st.integers(0, 60), min_size=12, max_size=120), st.sampled_from(POLICIES), st.integers(1, 3))
@drawing
def test_any_model_is_scheduled_as_the_sentences_say(drawn: list[int], text: str, ahead: int) -> None:
    facts = stack(drawn)
    made = leniently_planned(text, facts, ahead)
    assert made.checkpoints is not None
    _, moved, again = held_and_rerun(facts, made.decisions, made.checkpoints)
    assert list(made.schedule) == slow_schedule(facts, made.checkpoints, moved, again, ahead)
    # every reader of the backward has the value: on the device, recomputed, or back from the host
    roots, there = facts.storage_roots, {row for row, op in enumerate(facts.ops) if op != "call_function"}
    left = set[int]()  # a block that runs still holds what it is given
    for kind, row, region in made.schedule:
        if kind <= StepKind.SECOND_RUN:
            now = there - left if region else there
            gone = [facts.names[each] for each in facts.inputs[row] if roots[each] not in now]
            assert not gone, (facts.names[row], gone)
            there.add(roots[row])
        elif kind == StepKind.WAIT_TO_HOST:
            left.add(roots[row])
        elif kind == StepKind.WAIT_FROM_HOST:
            left.discard(roots[row])
        assert region or kind <= StepKind.WAIT_TO_HOST
    assert max(host_memory(facts, made.schedule), default=0) == sum(pool_bytes(facts.bytes[row]) for row in moved)


@given(st.lists(st.integers(0, 60), min_size=12, max_size=120), st.sampled_from(POLICIES), st.integers(1, 3))
@drawing
def test_memory_is_what_a_slow_count_says(drawn: list[int], text: str, ahead: int) -> None:
    facts = stack(drawn)
    assert_memory_is_that_of_the_slow_account(facts, leniently_planned(text, facts, ahead).schedule)
