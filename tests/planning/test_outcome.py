"""What the backward needs and when: values saved, recomputed and offloaded, the schedule, and the cuts of stages."""

from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policylang
from policylang.graph.blocks import Chains
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag, GraphKind, InputKind, Phase, Schedule, StepKind, is_gradient
from policylang.planning.capabilities import FLAT, capabilities_for
from policylang.planning.liveness import BackwardCost, saved_and_recomputed
from policylang.planning.plan import schedule_of
from policylang.planning.planner import plan
from policylang.planning.schedule import Ahead, build_schedule
from policylang.planning.selection.selectors import Cuts
from tests.planning.strategies import JOINT, graphs, names, only
from tests.planning.strategies import planned as planned_by_rules
from tests.support.drawn import examples
from tests.support.random_flat import random_flat
from tests.support.textgraph import CHAIN as SCHEDULE_CHAIN
from tests.support.textgraph import GraphBuilder, facts_of

CHAIN = """
    %x = input bytes=32
    %w = parameter bytes=64
    %mm = aten.mm.default(%x, %w) layers.0 bytes=128 flops=300
    %view = aten.view.default(%mm) layers.0 view bytes=128
    %sin = aten.sin.default(%view) layers.0 bytes=128 shape=8x4 dtype=float32
    %mm_1 = aten.mm.default(%sin, %w) layers.1 bytes=256 flops=100
    ---
    %t = tangent
    %b = aten.mul.Tensor(%t, %sin)
    %b_1 = aten.mm.default(%b, %w)
    output(%mm_1, %b_1)
"""
VIEWS = """
    %x = input bytes=32
    %w = parameter bytes=64
    %mm = aten.mm.default(%x, %w) layers.0 bytes=300
    %view = aten.view.default(%mm) layers.0 view bytes=100
    %view_1 = aten.view.default(%mm) layers.1 view bytes=200
    %t_w = aten.t.default(%w) layers.1 view bytes=64
    ---
    %b = aten.mul.Tensor(%view, %view_1, %t_w)
    output(%mm, %b)
"""
PIECES = """
    %x = input
    %sdpa = aten._scaled_dot_product_flash_attention.default(%x) multi_output bytes=999
    %out = builtin.getitem(%sdpa) bytes=100
    %lse = builtin.getitem(%sdpa) bytes=10
    %seed = builtin.getitem(%sdpa) bytes=1
    ---
    %b = aten.mul.Tensor(%out, %lse)
    output(%out, %b)
"""
GATHER = """
    %w = parameter bytes=10
    %gather = _c10d_functional.all_gather_into_tensor.default(%w) collective group=dp:4 bytes=40
    %wait = _c10d_functional.wait_tensor.default(%gather) bytes=40
    ---
    %b = aten.mul.Tensor(%wait)
    output(%wait, %b)
"""
SIZES = """
    %x = input
    %s0 = input symbolic
    %size = aten.sym_size.int(%x) symbolic
    %view = aten.view.default(%x, %size) view
    ---
    %b = aten.mul.Tensor(%view, %s0)
    output(%view, %b)
"""
GRADIENT = """
    %x = input
    %sin = aten.sin.default(%x) bytes=8 gradient
    ---
    %t = tangent
    %b = aten.mul.Tensor(%t)
    output(%sin, %b)
"""
INTERLEAVED = """
    %x = input
    %a = aten.sin.default(%x) bytes=8
    %g = aten.mul.Tensor(%a) backward
    %b = aten.cos.default(%a) bytes=8
    %h = aten.mul.Tensor(%g, %b) backward
    output(%b, %h)
    ---
    %i = aten.mul.Tensor(%h)
"""
ALONE = "%x = input\n%sin = aten.sin.default(%x) bytes=8\noutput(%sin)"


def needed(text: str, rules: str) -> BackwardCost:
    return saved_and_recomputed(plan(policylang.parse(rules), facts_of(text), JOINT))


@pytest.mark.parametrize(
    ("text", "rules", "expected"),
    [
        pytest.param(
            *(CHAIN, "recompute everything\nsave mm"),
            {"saved": "mm", "recomputed": "view sin", "inputs": "w", "final": True},
            id="a recomputed value needs its inputs and a saved one ends the walk",
        ),
        pytest.param(
            *(CHAIN, "recompute everything"),
            {"saved": "", "recomputed": "mm view sin", "inputs": "x w", "saved_bytes": 0, "recomputed_flops": 300}
            | {"recomputed_flops_by_block": (300, 0)},
            id="recomputation goes back to the graph inputs",
        ),
        pytest.param(
            *(CHAIN, "save everything", {"saved": "sin", "saved_bytes": 128}),
            id="a value decided save that nothing reads is not saved",
        ),
        pytest.param(
            *(VIEWS, "save everything"),
            {"saved": "view view_1 t_w", "saved_bytes": 300, "saved_bytes_by_block": (300, 0)},
            id="a saved view keeps the memory it looks into once",
        ),
        pytest.param(*(PIECES, "save everything", {"saved": "out lse", "saved_bytes": 110}), id="pieces are saved"),
        pytest.param(
            *(PIECES, "recompute everything", {"recomputed": "sdpa out lse", "recomputed_bytes": 999}),
            id="pieces are recomputed with their operator",
        ),
        pytest.param(
            *(GATHER, "save all_gather_into_tensor", {"saved": "wait", "saved_bytes": 40}),
            id="of a collective the wait is saved when that is read",
        ),
        pytest.param(
            *(GATHER, "recompute all_gather_into_tensor", {"recomputed": "gather wait", "inputs": "w"}),
            id="a collective is recomputed with its wait",
        ),
        pytest.param(
            *(SIZES, "recompute everything", {"symbolic": "s0 size", "inputs": "x", "recomputed": "view"}),
            id="sizes are kept apart",
        ),
        pytest.param(
            *(CHAIN, "save mm", {"undecided": "view sin", "contingent": "mm", "saved": "", "final": False}),
            id="what is left to the partitioner is marked, and so is what hangs on it",
        ),
        pytest.param(*(GRADIENT, "save everything", {"saved": "sin"}), id="a forward value that is a gradient"),
        pytest.param(
            *(GRADIENT.replace("gradient", "feeds_backward"), "save everything", {"saved": ""}),
            id="a reader moved away",
        ),
        pytest.param(
            *(INTERLEAVED, "recompute everything\nsave sin", {"saved": "a", "recomputed": "b"}),
            id="backward nodes among the forward ones are read as backward",
        ),
        pytest.param(
            *(ALONE, "save everything", {"saved": "", "recomputed": "", "undecided": ""}),
            id="a graph without backward needs nothing",
        ),
    ],
)
def test_what_the_backward_needs(text: str, rules: str, expected: dict[str, Any]) -> None:
    facts, cost = facts_of(text), needed(text, rules)
    found = {name: getattr(cost, name) for name in expected}
    rows = ("saved", "recomputed", "inputs", "symbolic", "undecided", "contingent")
    assert {name: " ".join(names(facts, each)) if name in rows else each for name, each in found.items()} == expected


def test_the_forward_is_what_shares_are_of() -> None:
    assert needed(CHAIN, "recompute everything").forward("flops")[0] == 400


def test_a_value_is_where_its_outcome_says_by_the_steps_that_it_says() -> None:
    """On a flat graph, whose path offloads."""
    facts = facts_of(CHAIN.replace("%t = tangent", "%t = aten.ones.default()"), GraphKind.FLAT)
    made = plan(policylang.parse("undecided -> recompute\noffload sin"), facts, FLAT)
    cost = saved_and_recomputed(made)
    assert (names(facts, cost.offloaded), cost.saved, cost.recomputed, cost.saved_bytes) == (["sin"], (), (), 0)
    assert cost.offloaded_bytes == 128
    for rules in ("recompute everything", "recompute everything\nsave mm", "undecided -> recompute\noffload sin"):
        made = plan(policylang.parse(rules), facts, FLAT)
        steps = {(row, kind) for kind, row, _ in schedule_of(facts, made.decisions) if kind != StepKind.FIRST_RUN}
        needs = saved_and_recomputed(made).rows
        assert steps == {(row, kind) for outcome, rows in needs.items() for row in rows for kind in outcome.steps}


numbers = st.lists(st.integers(0, 63), min_size=12, max_size=90)
fates = st.lists(st.sampled_from(["keep", "again", "again", "move"]), min_size=1, max_size=40)
drawing = settings(max_examples=examples(25, 100))


def written(facts: Facts, schedule: Schedule) -> str:
    """``name`` runs, ``name*`` runs again, ``>name`` and ``name>`` start and await a copy to the host, ``<name`` and
    ``name<`` one back; a bar where the forward ends."""
    forms = ("{}", "{}*", ">{}", "{}>", "<{}", "{}<")
    words, before = [], 0
    for kind, name, region in schedule.names(facts):
        words += ["|"] * (region != before)
        words.append(forms[kind].format(name))
        before = region
    return " ".join(words)


def planned(recomputed: str = "", offloaded: str = "", text: str = SCHEDULE_CHAIN) -> str:
    facts = facts_of(text)
    rows = ([facts.index[name] for name in names.split()] for names in (recomputed, offloaded))
    return written(facts, build_schedule(facts, *rows))


def test_what_runs_again_runs_right_before_what_needs_it() -> None:
    assert planned() == "a b c loss | dc db da"
    assert planned("a b") == "a b c loss | dc a* b* db da"
    assert planned("a b c") == "a b c loss | a* b* c* dc db da"


def test_copies_are_two_apart() -> None:
    assert planned("", "a b c") == "a b >a c >b loss a> >c b> c> | <c c< <b <a dc b< db a< da"
    assert planned("c", "b") == "a b c >b loss b> | <b b< c* dc db da"


def decided(facts: Facts, drawn: list[str]) -> tuple[list[int], list[int]]:
    """One fate for an owner; what is moved is one row of a memory, made by the forward and read by the backward alone
    from then on."""
    roots = facts.storage_roots
    again, moved = [], []
    for row in facts.forward:
        fate = drawn[facts.owners[row] % len(drawn)]
        if facts.flags[row] & (Flag.SYMBOLIC | Flag.WRITES | Flag.EFFECTFUL) and not facts.flags[row] & Flag.REPEATABLE:
            continue
        if fate == "again":
            again.append(row)
        elif fate == "move" and roots[row] == row and not facts.flags[row] & Flag.MULTI_OUTPUT:
            moved.append(row)
    return again, moved


@given(graphs(), fates)
@drawing
def test_partitions_are_scheduled_as_the_sentences_say(facts: Facts, drawn: list[str]) -> None:
    again, moved = decided(facts, drawn)
    assert list(build_schedule(facts, again, moved)) == reference_schedule(facts, again, moved)


@given(numbers, fates, st.integers(2, 6))
@drawing
def test_flat_graphs_are_scheduled_as_the_sentences_say_and_nothing_is_read_before_it_is_there(drawn, chosen, segments):
    facts = collect(random_flat(drawn, segments).gm)
    again, moved = decided(facts, chosen)
    assert list(build_schedule(facts, again, moved)) == reference_schedule(facts, again, moved)
    # Whatever is decided: a step of the backward reads the second value where there is one, else the first.
    there = {(row, 0) for row, op in enumerate(facts.ops) if op != "call_function"}
    for kind, row, region in build_schedule(facts, again, moved):
        if kind <= StepKind.SECOND_RUN:
            for source in facts.inputs[row]:
                assert {(source, region), (source, 0)} & there or facts.phases[source] == facts.phases[row]
        there.add((row, region))


@given(numbers, fates, st.integers(2, 6), st.lists(st.integers(-1, 3), min_size=1, max_size=9), st.integers(1, 3))
@drawing
def test_copies_back_start_so_many_blocks_ahead(drawn, chosen, segments, blocks, ahead) -> None:
    facts = collect(random_flat(drawn, segments).gm)
    again, moved = decided(facts, chosen)
    block_of = [blocks[row * len(blocks) // len(facts)] for row in range(len(facts))]
    found = list(build_schedule(facts, again, moved, Ahead(ahead, block_of)))
    assert found == reference_schedule(facts, again, moved, (ahead, block_of))


POLICIES = ("undecided -> recompute", "save mm\nundecided -> recompute", "recompute every 2nd everything")


@given(numbers, st.sampled_from(POLICIES), st.integers(2, 6))
@drawing
def test_what_is_counted_as_recomputed_is_what_the_schedule_runs_again(drawn, text, segments) -> None:
    """A value that the rest of the forward holds is read as it is: it counts as recomputed no more than what it is
    computed from."""
    facts = collect(random_flat(drawn, segments).gm)
    made = plan(policylang.parse(text), facts, capabilities_for(facts.kind, None))
    needs = saved_and_recomputed(made)
    assert list(needs.recomputed) == sorted(set(made.schedule.rows_of(StepKind.SECOND_RUN)))
    read = {source for row, phase in enumerate(facts.phases) if phase == Phase.BACKWARD for source in facts.inputs[row]}
    read = read.union(*(facts.inputs[row] for row in needs.recomputed))
    kept = {row for row in read if facts.forward_mask[row] and not facts.flags[row] & Flag.SYMBOLIC}
    assert kept.difference(needs.recomputed).issuperset(needs.saved)


# A slow maker of schedules, written from the sentences of the documentation, to hold the fast one against.
Steps = list[tuple[int, int, int]]
RUN, AGAIN = StepKind.FIRST_RUN, StepKind.SECOND_RUN
IN_FLIGHT = 2


def reference_schedule(
    facts: Facts, again: Collection[int], moved: Collection[int], ahead: tuple[int, list[int]] | None = None
) -> Steps:
    """``ahead``: so many blocks, and the block of each row."""
    if facts.kind is GraphKind.FLAT:
        return with_copies(facts, pieces_behind(facts, flat(facts, again), only=AGAIN), moved, ahead)
    return pieces_behind(facts, with_copies(facts, partition(facts, again), moved, ahead), only=None)


def calls(facts: Facts, phase: Phase) -> list[int]:
    return [row for row in range(len(facts)) if facts.ops[row] == "call_function" and facts.phases[row] == phase]


# --- partitions ------------------------------------------------------------------------------------------------------
def partition(facts: Facts, again: Collection[int]) -> Steps:
    forward, backward = halves(facts, again)
    everything = [row for row in range(len(facts)) if facts.ops[row] == "call_function"]
    steps: Steps = [(RUN, row, 0) for row in everything if row in forward]
    later = [row for row in everything if row in backward]
    if any(facts.phases[row] == Phase.FORWARD for row in later):
        later = late(facts, later)
    ran = {row for _, row, _ in steps}
    for row in later:
        second = facts.phases[row] == Phase.FORWARD or row in ran
        steps.append((AGAIN if second else RUN, row, 1))
    return steps


def halves(facts: Facts, again: Collection[int]) -> tuple[set[int], set[int]]:
    """What runs in the forward and in the backward: has an effect, is returned, or is read by what runs there."""
    forward: set[int] = set()
    backward: set[int] = set()
    for row in range(len(facts)):
        flags = facts.flags[row]
        writes = flags & Flag.WRITES and not flags & Flag.REPEATABLE
        if flags & (Flag.RANDOM | Flag.EFFECTFUL) or writes:
            (backward if facts.phases[row] == Phase.BACKWARD else forward).add(row)
        if facts.phases[row] == Phase.OUTPUT:
            for source in facts.inputs[row]:
                gradient = facts.kind is GraphKind.JOINT and is_gradient(facts, source) and source in again
                late_result = facts.phases[source] == Phase.BACKWARD or gradient
                if late_result:
                    backward.add(source)
                if not late_result or facts.flags[source] & Flag.FORWARD_OUTPUT:
                    forward.add(source)
    for _ in range(len(facts)):
        for row in sorted(forward):
            forward |= set(facts.inputs[row])
        for row in sorted(backward):
            for source in facts.inputs[row]:
                here = facts.phases[source] == Phase.BACKWARD or source in again
                (backward if here else forward).add(source)
    return forward, backward


def late(facts: Facts, rows: list[int]) -> list[int]:
    """Nothing that can wait runs before what needs it."""
    hasty: set[int] = {row for row in range(len(facts)) if facts.input_kinds[row] == InputKind.TANGENT}
    effect = Flag.RANDOM | Flag.EFFECTFUL | Flag.WRITES
    for row in rows:
        if hasty & set(facts.inputs[row]):
            hasty.add(row)
    acts = {row for row in rows if facts.phases[row] == Phase.BACKWARD and facts.flags[row] & effect}
    order: list[int] = []
    output = [row for row in range(len(facts)) if facts.phases[row] == Phase.OUTPUT]
    for reader in [*(row for row in rows if row in hasty | acts), *output]:
        wanted: set[int] = set()
        reached = {reader}
        while reached:
            sources = {source for row in reached for source in facts.inputs[row]}
            if reader in output and reached == {reader}:
                sources = {s for s in sources if facts.phases[s] == Phase.BACKWARD or is_gradient(facts, s)}
            reached = (sources & set(rows)) - hasty - acts - set(order) - wanted
            wanted |= reached
        order += sorted(wanted)
        if reader not in output:
            order.append(reader)
    return order


def pieces_behind(facts: Facts, steps: Steps, only: StepKind | None) -> Steps:
    if facts.kind not in (GraphKind.JOINT, GraphKind.FLAT):
        return steps
    runs = (RUN, AGAIN) if only is None else (only,)
    found = list(steps)
    for step in reversed(steps):
        kind, row, region = step
        if kind not in runs or facts.targets[row] != "builtin.getitem" or not facts.inputs[row]:
            continue
        source = [at for at, other in enumerate(found) if other[1:] == (facts.inputs[row][0], region)]
        source = [at for at in source if found[at][0] in runs]
        if source:
            moved_with_it = family(facts, found, step, runs)
            for each in moved_with_it:
                found.remove(each)
            made = [at for at, other in enumerate(found) if other[1:] == (facts.inputs[row][0], region)]
            at = next(at for at in made if found[at][0] in runs)
            found[at + 1 : at + 1] = moved_with_it
    return found


def family(facts: Facts, steps: Steps, step: tuple[int, int, int], runs: Collection[int]) -> Steps:
    """A piece, and the pieces of it that stand behind it already."""
    found = [step]
    for other in steps:
        read = facts.inputs[other[1]][:1]
        piece = facts.targets[other[1]] == "builtin.getitem" and other[0] in runs and other[2] == step[2]
        if piece and read and read[0] in [row for _, row, _ in found]:
            found.append(other)
    return found


# --- flat graphs -----------------------------------------------------------------------------------------------------
def unit(facts: Facts, row: int) -> list[int]:
    """All that runs again with a row."""
    if not facts.flags[row] & Flag.REPEATABLE:
        return [row]
    owner = facts.owners[row]
    return [r for r in range(len(facts)) if facts.owners[r] == owner and facts.flags[r] & Flag.REPEATABLE]


def keeps_writing(facts: Facts, row: int) -> bool:
    flags = facts.flags[row]
    if not flags & Flag.WRITES:
        return False
    if not flags & Flag.REPEATABLE:
        return True
    return not flags & Flag.VIEW and (facts.owners[row] == row or bool(flags & Flag.MULTI_OUTPUT))


def kept_rows(facts: Facts, again: Collection[int]) -> set[int]:
    """The forward rows that run: not recomputed, with an effect, or read by such a row; of a unit all that comes before
    the row that runs, or reads of it."""
    forward = calls(facts, Phase.FORWARD)
    kept = {row for row in forward if row not in again}
    kept |= {row for row in forward if facts.flags[row] & (Flag.RANDOM | Flag.EFFECTFUL)}
    kept |= {row for row in forward if keeps_writing(facts, row)}
    kept |= {row for row in range(len(facts)) if facts.phases[row] == Phase.OUTPUT}
    for _ in range(len(facts)):
        for row in sorted(kept):
            if facts.phases[row] != Phase.BACKWARD:
                kept |= set(facts.inputs[row])
                units = [unit(facts, each) for each in (row, *facts.inputs[row])]
                kept |= {each for members in units for each in members if each < row}
    return kept


def flat(facts: Facts, again: Collection[int]) -> Steps:
    kept, roots = kept_rows(facts, again), facts.storage_roots
    steps: Steps = []
    region, inside, done = 0, False, set[int]()
    for row in range(len(facts)):
        if facts.ops[row] != "call_function":
            continue
        if facts.phases[row] != Phase.BACKWARD:
            if row in kept:
                steps.append((RUN, row, 0))
                inside = False
            continue
        if not inside:
            region, inside, done = region + 1, True, set()
        following = [r for r in range(row + 1, len(facts)) if facts.phases[r] == Phase.FORWARD and r in kept]
        end = min([r for r in following if facts.ops[r] == "call_function"], default=len(facts))
        last = max(r for r in range(row, end) if facts.phases[r] == Phase.BACKWARD)
        found: set[int] = set()
        pending = [source for source in facts.inputs[row] if source in again]
        while pending:
            source = pending.pop()
            readers = [
                r
                for r in range(last + 1, len(facts))
                if facts.phases[r] != Phase.BACKWARD
                and (r in kept or facts.ops[r] == "output")
                and roots[source] in [roots[read] for read in facts.inputs[r]]
            ]
            if source in done or (source in kept and readers):
                continue
            found |= set(unit(facts, source))
            done |= set(unit(facts, source))
            pending += [read for each in unit(facts, source) for read in facts.inputs[each] if read in again]
        steps += [(AGAIN, each, region) for each in sorted(found)]
        steps.append((RUN, row, region))
    return steps


# --- copies to the host and back -------------------------------------------------------------------------------------
def blocks_before(steps: Steps, region: int, first: int, ahead: tuple[int, list[int]]) -> int | None:
    """Where the block begins that runs so many before the one of a step; None for a step outside the blocks."""
    count, block_of = ahead
    if first == len(steps) or block_of[steps[first][1]] < 0:
        return None
    begun: list[int] = []
    for _, row, where in steps:
        if where == region and block_of[row] >= 0 and block_of[row] not in begun:
            begun.append(block_of[row])
    wanted = begun[max(begun.index(block_of[steps[first][1]]) - count, 0)]
    return next(at for at, (_, row, where) in enumerate(steps) if where == region and block_of[row] == wanted)


def with_copies(
    facts: Facts, steps: Steps, moved: Collection[int], ahead: tuple[int, list[int]] | None = None
) -> Steps:
    roots = facts.storage_roots
    reads: dict[int, list[tuple[int, int]]] = {}  # region → value and step that reads it first, in order
    for at, (_, row, region) in enumerate(steps):
        for source in facts.inputs[row] if region else ():
            if source in moved and source not in [value for value, _ in reads.setdefault(region, [])]:
                reads[region].append((source, at))
    if facts.kind is GraphKind.JOINT:
        for row in range(len(facts)):
            for source in facts.inputs[row] if facts.phases[row] == Phase.OUTPUT else ():
                known = [value for value, _ in reads.setdefault(1, [])]
                if source in moved and is_gradient(facts, source) and source not in known:
                    reads[1].append((source, len(steps)))
    wanted = {value for found in reads.values() for value, _ in found}
    leaving = []
    for value in wanted:
        touches = [
            (at, (row, *facts.inputs[row]).index(each))
            for at, (_, row, region) in enumerate(steps)
            if not region
            for each in (row, *facts.inputs[row])
            if roots[each] == roots[value] and each in calls(facts, Phase.FORWARD)
        ]
        if touches:
            leaving.append((*max(touches), value))
    leaving.sort()
    backward = next((at for at, step in enumerate(steps) if step[2]), len(steps))
    found: Steps = []
    for at in range(len(steps) + 1):
        if at == backward:
            found += [(StepKind.WAIT_TO_HOST, value, 0) for _, _, value in leaving[-IN_FLIGHT:]]
        for region, values in reads.items():
            begin = next((place for place, step in enumerate(steps) if step[2] == region), len(steps))
            for number, (value, first) in enumerate(values):
                start = begin if number < IN_FLIGHT else values[number - IN_FLIGHT][1]
                if ahead is not None and (early := blocks_before(steps, region, first, ahead)) is not None:
                    start = early
                if at == start:
                    found.append((StepKind.COPY_FROM_HOST, value, region))
                if at == first:
                    found.append((StepKind.WAIT_FROM_HOST, value, region))
        if at < len(steps):
            found.append(steps[at])
        for number, (last, _, value) in enumerate(leaving):
            if last == at:
                if number >= IN_FLIGHT:
                    found.append((StepKind.WAIT_TO_HOST, leaving[number - IN_FLIGHT][2], 0))
                found.append((StepKind.COPY_TO_HOST, value, 0))
    return found


def cuts_of(facts: Facts) -> Cuts:
    return Cuts(facts, Chains(facts))


def behind(facts: Facts, size: float) -> list[str]:
    """The last node before each cut."""
    return [facts.names[facts.forward[place - 1]] for place in cuts_of(facts).positions(size)]


def crossing(facts: Facts, size: float) -> list[str]:
    mask = cuts_of(facts).crossing(size)
    return [facts.names[row] for row in range(len(facts)) if mask[row]]


CUTS_CHAIN = facts_of("%x = input bytes=1000\n%n0 = aten.sin.default(%x) bytes=10\n" + "\n".join(
    f"%n{i} = aten.sin.default(%n{i - 1}) bytes=10" for i in range(1, 10)
))  # fmt: skip


def test_a_stage_holds_as_much_as_it_may_where_all_cuts_are_alike():
    """100 bytes in ten values: of equal cuts the latest, at which the stage has made just 30."""
    assert cuts_of(CUTS_CHAIN).produced == 100
    assert behind(CUTS_CHAIN, 30) == ["n2", "n5", "n8"]
    assert crossing(CUTS_CHAIN, 30) == ["n2", "n5", "n8"]
    assert behind(CUTS_CHAIN, 39) == ["n2", "n5", "n8"]
    assert behind(CUTS_CHAIN, 50) == ["n4"]


@pytest.mark.parametrize(("gib", "stages"), [(1, 1), (2, 1), (4, 2), (16, 4), (100, 10)])
def test_auto_makes_as_many_stages_as_each_has_gib(gib: int, stages: int):
    """As AutoParallel counts: the square root of what the forward makes, both in GiB, weights left out."""
    builder = GraphBuilder()
    builder.add("w", "parameter", (), bytes=2**40)
    builder.add("gathered", "prims.convert_element_type.default", (0,), bytes=2**40)
    builder.add("x", "input", (), bytes=2**40)
    for i in range(gib):
        builder.add(f"n{i}", "aten.sin.default", (len(builder.rows) - 1,), bytes=2**30)
    facts = builder.facts(CUTS_CHAIN.kind)
    cuts = cuts_of(facts)
    assert cuts.stage(None) == (gib * 2**60) ** 0.5
    assert len(cuts.positions(cuts.stage(None))) == (stages if gib == 2 else stages - 1)
    assert cuts.crossing(None) == cuts.crossing(cuts.stage(None))


@pytest.mark.parametrize("size", [100, 101, 10**12])
def test_a_forward_that_makes_no_more_than_one_stage_has_no_cut(size):
    assert behind(CUTS_CHAIN, size) == []
    assert crossing(CUTS_CHAIN, size) == []


Stages = tuple[float, list[str] | None, list[str]]
"""A size, the last node before each cut where that is asked, and what crosses them."""


@pytest.mark.parametrize(
    ("text", "produced", "stages"),
    [
        pytest.param(
            """
            %x = input
            %thin_early = aten.mm.default(%x) bytes=1
            %wide = aten.mm.default(%thin_early) bytes=50
            %thin = aten.mm.default(%wide) bytes=2
            %wide_again = aten.mm.default(%thin) bytes=40
            %end = aten.mm.default(%wide_again) bytes=30
            """,
            123,  # at 100 behind `wide` (51 made, 50 alive), `thin` (53, 2) or `wide_again` (93, 40)
            [(100, ["thin"], ["thin"])],
            id="a stage ends where the least is alive in its second half",
        ),
        pytest.param(
            """
            %x = input
            %residual = aten.mm.default(%x) bytes=10
            %norm = aten.mul.Tensor(%residual) bytes=10
            %up = aten.mm.default(%norm) bytes=10
            %sum = aten.add.Tensor(%residual, %up) bytes=10
            %head = aten.mm.default(%sum) bytes=10
            """,
            50,  # the second stage: behind `norm` two values are alive, behind `up` as well
            [(20, ["residual", "up"], ["residual", "up"]), (30, None, ["residual", "up"]), (40, None, ["sum"])],
            id="what a residual skips over is alive too",
        ),
        pytest.param(
            """
            %x = input
            %a = aten.mm.default(%x) bytes=10
            %huge = aten.mm.default(%a) bytes=1000
            %flat = aten.view.default(%huge) view
            %b = aten.mm.default(%flat) bytes=10
            %c = aten.mm.default(%b) bytes=10
            """,
            1030,
            [(100, ["flat"], ["huge"])],
            id="one node that makes too much is a stage of its own",
        ),
        pytest.param(
            """
            %x = input
            %a = aten.mm.default(%x) bytes=10
            %huge = aten.mm.default(%a) bytes=1000
            %flat = aten.view.default(%huge) view
            %size = aten.sym_size.int(%flat) symbolic bytes=8
            """,
            1010,
            [(100, [], [])],
            id="nothing is cut off behind the last value",
        ),
        pytest.param(
            """
            %x = input bytes=1000
            %looked_at = aten.view.default(%x) view bytes=1000
            %base = aten.mm.default(%looked_at) bytes=10
            %flat = aten.view.default(%base) view bytes=10
            %turned = aten.t.default(%flat) view bytes=10
            %b = aten.mm.default(%turned) bytes=10
            %c = aten.add.Tensor(%b, %looked_at) bytes=10
            """,
            30,  # behind `flat` as behind `turned`: `base` is read by the next node through a view
            [(10, ["turned", "b"], ["base", "b"])],
            id="the value that carries the memory crosses and its views do not",
        ),
        pytest.param(
            """
            %x = input
            %reduce = _c10d_functional.all_reduce.default(%x) collective bytes=10
            %done = _c10d_functional.wait_tensor.default(%reduce) bytes=10
            %b = aten.mm.default(%done) bytes=10
            %c = aten.mm.default(%b) bytes=10
            """,
            30,
            [(10, None, ["reduce", "done", "b"])],
            id="a wait crosses with its collective",
        ),
        pytest.param(
            """
            %x = input
            %norm = aten.native_layer_norm.default(%x) multi_output bytes=30
            %out = builtin.getitem(%norm) bytes=20
            %mean = builtin.getitem(%norm) bytes=10
            %b = aten.mm.default(%out) bytes=30
            %c = aten.mm.default(%b) bytes=30
            ---
            %bw = aten.mul.Tensor(%mean)
            """,
            90,
            [(30, ["mean", "b"], ["norm", "out", "b"])],
            id="of several results those that are read later cross with their operator",
        ),
        pytest.param(
            """
            %x = input
            %pair = aten.native_layer_norm.default(%x) multi_output bytes=20
            %out = builtin.getitem(%pair) bytes=10
            %b = aten.mm.default(%out) bytes=10
            %rest = builtin.getitem(%pair) bytes=10
            %c = aten.add.Tensor(%b, %rest) bytes=10
            """,
            40,  # `rest` is picked late and was there all the time
            [(20, ["out"], ["pair", "out", "rest"])],
            id="results are made when their operator runs",
        ),
        pytest.param(
            """
            %x = input bytes=10
            %w = parameter bytes=100
            %half = prims.convert_element_type.default(%w) bytes=50
            %gather = _c10d_functional.all_gather_into_tensor.default(%half) collective bytes=400 group=dp:8
            %weight = _c10d_functional.wait_tensor.default(%gather) bytes=400
            %a = aten.mm.default(%x, %weight) bytes=10
            %b = aten.mm.default(%a, %weight) bytes=10
            %c = aten.mm.default(%b, %weight) bytes=10
            """,
            30,
            [(10, None, ["a", "b"])],
            id="weights are neither made nor alive",
        ),
    ],
)
def test_where_a_forward_is_cut_and_what_crosses(text: str, produced: int, stages: list[Stages]):
    facts = facts_of(text)
    assert cuts_of(facts).produced == produced
    for size, before, over in stages:
        assert before is None or behind(facts, size) == before
        assert crossing(facts, size) == over


def test_a_rule_saves_what_crosses_and_recomputes_a_stage_at_a_time():
    builder = GraphBuilder()
    builder.add("x", "input", ())
    for i in range(100):
        builder.add(f"n{i}", "aten.sin.default", (len(builder.rows) - 1,), bytes=8)
    for i in reversed(range(100)):
        builder.add(f"b{i}", "aten.cos.default", (builder.index[f"n{i}"],), backward=True)
    facts = builder.facts(facts_of("%x = input\n---\n%t = tangent").kind)
    made = planned_by_rules(facts, "recompute everything; save everything where crosses cut per 80")
    assert made.diagnostics == ()
    outcome = saved_and_recomputed(made)
    assert names(facts, outcome.saved) == [f"n{i}" for i in range(9, 99, 10)]
    assert outcome.saved_bytes == 9 * 8
    assert len(outcome.recomputed) == 91


@pytest.mark.parametrize(
    ("selector", "size", "details"),
    [
        ("everything", "4096", ("everything: 10 nodes", "4096: 0 of them; the forward makes 100 B and has no cut")),
        (
            *("everything", "auto"),
            ("everything: 10 nodes", "auto: 0 of them; the forward makes 100 B and has no cut at stages of 320 KiB"),
        ),
        ("cos", "30", ("cos: 0 nodes", "30: 0 of them; the forward makes 100 B and has 3 cuts")),
    ],
)
def test_a_rule_that_nothing_crosses_for_is_told_what_there_is_to_cut(selector, size, details):
    made = planned_by_rules(CUTS_CHAIN, f"recompute everything; save {selector} where crosses cut per {size}")
    assert only(made.diagnostics, "APL301").details == (details[0], f"where crosses cut per {details[1]}")
