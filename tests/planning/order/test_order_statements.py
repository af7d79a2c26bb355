"""What scheduling lines come to on a step, segment by segment, and what is said if that is nothing."""

from collections.abc import Collection, Sequence

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import policylang
from policylang.graph.blocks import blocks_of
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag, GraphKind, StepKind
from policylang.language.devices.profile import DeviceProfile, Network, Rate
from policylang.planning.capabilities import EAGER, FLAT, HALF, JOINT, Capabilities
from policylang.planning.order.dependencies import Role, Segments, dependencies, roles_of, segments, unknown_operators
from policylang.planning.order.moves import MoveRequest, Moves, move_collectives
from policylang.planning.plan import Plan
from policylang.planning.planner import plan
from policylang.report.diagnostics import render_text
from policylang.simulation.memory import estimate_peak
from policylang.simulation.streams import step_time
from tests.planning.strategies import QUICK, graphs, sharded_step
from tests.support.orders import names_in_order
from tests.support.random_flat import random_flat
from tests.support.textgraph import facts_of

DEVICE = DeviceProfile(
    name="even",
    compute={"bfloat16": Rate.constant(1e12)},
    bandwidth=Rate.constant(1e15),
    networks=(Network(bandwidth=4e9, latency=0.0),),
)
"""A product takes a microsecond, as a gather does nearly."""


def planned(lines: str, facts: Facts | None = None, device: DeviceProfile | None = None, path=JOINT) -> Plan:
    return plan(policylang.parse(lines), facts or sharded_step(blocks=3), path, device=device)


def order(made: Plan) -> str:
    return " ".join(name for name in names_in_order(made.order) if not name.startswith(("mean", "cast")))


def test_a_gather_of_each_half_starts_a_block_ahead() -> None:
    made = planned("prefetch all_gather 1 block ahead", sharded_step(blocks=2, regathers=True, head=True))
    assert "gather_0 wait_0 gather_1 norm_0 mm_0 add_0 wait_1 gather_head norm_1" in order(made)
    assert "gather_head_again wait_head_again gather_1_again dx_head" in order(made)
    assert "wait_1_again gather_0_again dx_1" in order(made)
    (outcome,) = made.order.outcomes
    assert len(outcome.matched) == 6
    assert outcome.moved == ("gather_1", "gather_head", "gather_1_again", "gather_0_again")
    assert outcome.left == {
        "gather_0": "it would start before the forward does",
        "gather_head_again": "it would start before the backward does",
    }
    assert not made.diagnostics


def test_gathers_that_are_recomputed_are_prefetched_in_the_backward() -> None:
    made = planned("recompute (cast, all_gather) in block\nprefetch all_gather 1 block ahead")
    assert "gather_2_recomputed wait_2_recomputed gather_1_recomputed dx_2 dw_2" in order(made)
    assert "wait_1_recomputed gather_0_recomputed dx_1 dw_1" in order(made)
    run = names_in_order(made.order)
    assert run.index("cast_0_recomputed") < run.index("dx_1")


@pytest.mark.parametrize("rule", ["undecided -> save", "recompute (cast, all_gather) in block\nundecided -> save"])
def test_a_flat_graph_is_put_in_the_order_of_its_joint_graph(rule: str) -> None:
    joint = sharded_step(blocks=3)
    flat = evolve(joint, kind=GraphKind.FLAT)
    lines = f"{rule}\nprefetch all_gather 1 block ahead\ndelay reduce_scatter 1 block"
    assert order(planned(lines, flat, path=FLAT)) == order(planned(lines, joint))


def test_a_selector_goes_by_the_blocks_of_the_backward_too() -> None:
    made = planned("recompute (cast, all_gather) in block\nprefetch (all_gather in first block) 1 block ahead")
    assert made.order.outcomes[0].matched == ("gather_0", "gather_0_recomputed")
    assert made.order.outcomes[0].moved == ("gather_0_recomputed",)


def test_the_later_line_moves_what_both_name() -> None:
    lines = "prefetch all_gather 1 block ahead\nprefetch (all_gather in layers.2) 2 blocks ahead"
    made = planned(lines)
    assert "wait_0 gather_1 gather_2 norm_0" in order(made)
    assert [each.moved for each in made.order.outcomes] == [("gather_1",), ("gather_2",)]
    swapped = planned("\n".join(reversed(lines.split("\n"))))
    (taken,) = swapped.diagnostics
    assert (taken.code, taken.severity.value) == ("APL377", "warning")
    assert "moves 1" in taken.related[0].message


def test_nothing_crosses_what_nobody_knows_and_the_plan_names_it() -> None:
    made = planned("prefetch all_gather 1 block ahead", sharded_step(blocks=3, unknown=1))
    assert made.order.barriers == {"mylib.dispatch.default": 1}
    assert "mm_1 unknown_1 add_1 gather_2" in order(made)
    why = "`unknown_1` is before it, and what mylib.dispatch.default does is not known"
    assert made.order.outcomes[0].left["gather_2"] == why


# --- what is judged on the order ---
def test_expectations_are_of_the_step_in_its_new_order() -> None:
    facts = sharded_step(blocks=4, regathers=True)
    lines = "undecided -> save\nprefetch all_gather 1 block ahead\ndelay reduce_scatter 1 block\n"
    before, after = planned("undecided -> save", facts, DEVICE), planned(lines, facts, DEVICE)
    traced = step_time(before.facts, before.schedule, before.times)
    found = step_time(after.order.facts, after.order.schedule, after.order.times)
    assert found.exposed < traced.exposed / 2
    assert after.order.traced_times is not None
    limit = f"expect exposed <= {(found.exposed + traced.exposed) / 2 * 1e6:.4f} us\n"
    limit += f"expect step time <= {(found.step + traced.step) / 2 * 1e6:.4f} us"
    assert [each.status for each in planned("undecided -> save\n" + limit, facts, DEVICE).expectations] == [
        "failed",
        "failed",
    ]
    assert [each.status for each in planned(lines + limit, facts, DEVICE).expectations] == ["held", "held"]
    peaks = [estimate_peak(made.facts, made.schedule).bytes for made in (before, after.order)]
    assert peaks[0] < peaks[1]
    at_most = f"expect peak <= {peaks[0]} B"
    assert [each.status for each in planned("undecided -> save\n" + at_most, facts).expectations] == ["held"]
    assert [each.status for each in planned(lines + at_most, facts).expectations] == ["failed"]


def test_the_order_is_in_the_digest() -> None:
    lines = "prefetch all_gather 1 block ahead"
    assert planned(lines).digest == planned(lines).digest
    assert planned(lines).digest != planned(lines, sharded_step(blocks=3, unknown=1)).digest
    words = [list(planned(f"prefetch all_gather {blocks} ahead").order.words()) for blocks in ("1 block", "2 blocks")]
    assert words[0] != words[1]


def test_without_a_line_that_moves_the_order_is_that_of_the_graph() -> None:
    made = planned("recompute (cast, all_gather) in block\nkeep order of reduce_scatter")
    assert not made.order.moves
    assert list(made.order.schedule) == list(made.order.traced_schedule)


def test_copies_to_the_host_stay_two_apart() -> None:
    lines = "save everything in block\noffload mul in block\n"
    made = planned(lines + "prefetch all_gather 1 block ahead", sharded_step(blocks=4))
    steps = made.order.schedule.names(made.order.facts)
    assert made.order.outcomes[0].moved
    under_way = 0
    for kind, _, _ in steps:
        under_way += (kind == 2) - (kind == 3)
        assert 0 <= under_way <= 3
    assert sum(kind == 2 for kind, _, _ in steps) == sum(kind == 4 for kind, _, _ in steps) > 0


# --- what is wrong ---
MATRIX = "%x = input\n%a = aten.mm.default(%x, %x) layers.0 flops=9\noutput(%a)"
INSIDE = "%x = input\n%a = higher_order.local_map_hop(%x) layers.0\noutput(%a)"
READ_AT_ONCE = """
    %x = input
    %a = aten.mm.default(%x, %x) layers.0 flops=9
    %sum = _c10d_functional.all_reduce.default(%a) layers.0 group=tp:2 collective
    %wait = _c10d_functional.wait_tensor.default(%sum) layers.0
    %b = aten.mm.default(%wait, %x) layers.1 flops=9
    output(%b)
"""


@pytest.mark.parametrize(
    ("lines", "graph", "code", "said"),
    [
        ("prefetch all_gather 1 block ahead", MATRIX, "APL379", "orders collectives, and this graph has none"),
        ("bucket all_gather per block", MATRIX, "APL379", "orders collectives, and this graph has none"),
        ("keep order of all_gather", MATRIX, "APL379", "orders collectives, and this graph has none"),
        ("delay all_gather 1 block", INSIDE, "APL378", "higher_order.local_map_hop (1) run cannot be moved"),
        ("keep order of all_to_all", READ_AT_ONCE, "APL301", "matches nothing in this graph"),
        ("prefetch (all_gather in nowhere) 1 block ahead", READ_AT_ONCE, "APL301", "matches nothing in this graph"),
        ("delay all_reduce 1 block", READ_AT_ONCE, "APL373", "`sum`: `b` reads it at once"),
        ("delay all_reduce 5 blocks", READ_AT_ONCE, "APL375", "neither direction of this graph has more than 2"),
        (
            "prefetch all_reduce 1 block ahead",
            READ_AT_ONCE.replace("layers.0", "one").replace("layers.1", "two"),
            "APL375",
            "no blocks were found",
        ),
        ("prefetch all_reduce 1 block ahead", READ_AT_ONCE, "APL373", "it needs `a`, which runs later"),
        (
            "prefetch all_reduce 1 block ahead\nkeep order of all_reduce",
            READ_AT_ONCE,
            "APL376",
            "ask for opposite orders: `sum` is in both",
        ),
        (
            "bucket all_reduce up to 1 MiB\nkeep order of all_reduce",
            READ_AT_ONCE,
            "APL376",
            "ask for opposite orders: `sum` is in both",
        ),
    ],
)
def test_what_is_wrong_is_said(lines: str, graph: str, code: str, said: str) -> None:
    facts = facts_of(graph, GraphKind.FORWARD)
    made = planned(lines, facts, path=HALF)
    (found,) = made.diagnostics
    assert found.code == code, render_text([found])
    assert said in found.message
    assert found.span is not None
    optional = "\n".join(f"optional {line}" for line in lines.split("\n"))
    assert [each.code for each in planned(optional, facts, path=HALF).diagnostics] == ["APL376"] * (code == "APL376")


def test_a_selector_that_picks_something_else_is_an_error_that_names_it() -> None:
    facts = sharded_step(blocks=2, casts=False)
    (found,) = planned("prefetch (users of (all_gather or wait)) 1 block ahead", facts).diagnostics
    assert found.code == "APL371"
    assert "`mm_0` is none" in found.message
    assert "mm_0 (aten.mm.default)" in found.details


def test_what_would_all_start_before_its_half_is_an_error() -> None:
    (found,) = planned("prefetch all_gather 1 block ahead", sharded_step(blocks=1, regathers=True)).diagnostics
    assert found.code == "APL373"
    assert found.details == (
        "gather_0: it would start before the forward does",
        "gather_0_again: it would start before the backward does",
    )


def test_a_path_that_keeps_no_order_says_so() -> None:
    made = planned("delay all_gather 1 block", path=EAGER)
    assert "APL306" in [each.code for each in made.diagnostics]
    assert made.order is None


# --- overlap in its limits ---
def test_overlap_hides_what_order_can_hide() -> None:
    facts = sharded_step(blocks=4, regathers=True)
    made = planned("undecided -> save\noverlap collective", facts, DEVICE)
    before = step_time(made.order.traced, made.order.traced_schedule, made.order.traced_times)
    after = step_time(made.order.facts, made.order.schedule, made.order.times)
    assert after.exposed < before.exposed / 2
    assert made.order.outcomes[0].moved
    assert not made.diagnostics


def test_what_is_more_than_may_be_in_flight_stays_and_is_named() -> None:
    facts = sharded_step(blocks=3)
    made = planned("overlap collective up to 2 KiB in flight", facts, DEVICE)
    (outcome,) = made.order.outcomes
    assert outcome.left["gather_1"] == "it is 4 KiB, more than may be in flight"
    assert not any(name.startswith("gather") for name in outcome.moved)


@pytest.mark.parametrize("limit", ["up to 512 B in flight", "up to 512 B in flight within 1 GiB of peak"])
def test_a_limit_that_leaves_nothing_to_do_is_told_the_smallest_that_does(limit: str) -> None:
    lines = f"overlap reduce_scatter {limit}"
    (found,) = planned(lines, device=DEVICE).diagnostics
    assert (found.code, found.help) == ("APL374", "the smallest limit with which something moves is 4 KiB")
    assert found.span.one_line == "up to 512 B in flight"
    assert not planned(f"optional {lines}", device=DEVICE).diagnostics


def test_prefetched_and_kept_collectives_are_not_for_overlap_to_move() -> None:
    lines = "prefetch all_gather 1 block ahead\nkeep order of reduce_scatter\noverlap collective"
    made = planned(lines, device=DEVICE)
    assert [each.code for each in made.diagnostics] == ["APL377"]
    assert made.diagnostics[0].span.one_line == "overlap collective"
    assert made.order.outcomes[2].moved == ()


AT_ITS_PEAK = """
    %x = input
    %w = parameter bytes=2560 shape=1280 dtype=bf16
    %a = aten.mm.default(%x, %x) layers.0 flops=1_000_000 bytes=102400 dtype=bf16
    %b = aten.mm.default(%a, %x) layers.0 flops=1_000_000 bytes=102400 dtype=bf16
    %gather = _c10d_functional.all_gather_into_tensor.default(%w) layers.1 group=dp:4 collective bytes=10240
    %wait = _c10d_functional.wait_tensor.default(%gather) layers.1 bytes=10240
    %c = aten.mm.default(%b, %wait) layers.1 flops=1_000_000 bytes=1024 dtype=bf16
    output(%c)
"""


def test_a_peak_that_leaves_no_room_is_told_how_much_it_takes() -> None:
    facts = facts_of(AT_ITS_PEAK, GraphKind.FORWARD)
    tight = planned("overlap all_gather within 1 KiB of peak", facts, DEVICE, HALF)
    (found,) = tight.diagnostics
    assert found.code == "APL374"
    assert "moves nothing within 1 KiB of the peak" in found.message
    assert found.help == "the smallest limit with which something moves is 10 KiB"
    assert not tight.order.moves
    roomy = planned("overlap all_gather within 10 KiB of peak", facts, DEVICE, HALF)
    assert not roomy.diagnostics
    assert roomy.order.outcomes[0].moved == ("gather",)
    share = planned("overlap all_gather within 5% of peak", facts, DEVICE, HALF)
    assert share.order.outcomes[0].moved == ("gather",)


def test_a_line_that_a_kept_collective_leaves_nothing_to_do_names_both_unless_it_is_optional() -> None:
    facts = sharded_step(blocks=3, activations=True)
    kept = "keep order of (all_gather fed by add or all_gather in first block)"
    lines = f"prefetch (all_gather in layers.2 where from parameter) 2 blocks ahead\n{kept}"
    found = planned(lines, facts).diagnostics
    assert [each.code for each in found] == ["APL376"]
    assert "would have to cross `tp_" in found[0].message
    assert found[0].related[0].span.one_line == kept
    assert not planned(f"optional {lines}", facts).diagnostics


NEEDED_EARLIER = """
    %x = input
    %a = aten.mm.default(%x, %x) layers.0 flops=9
    %scatter = _c10d_functional.reduce_scatter_tensor.default(%a) layers.0 group=dp:4 collective
    %wait = _c10d_functional.wait_tensor.default(%scatter) layers.0
    %b = aten.mm.default(%a, %x) layers.1 flops=9
    %c = aten.mm.default(%b, %x) layers.2 flops=9
    %gather = _c10d_functional.all_gather_into_tensor.default(%wait) layers.3 group=dp:4 collective
    %await = _c10d_functional.wait_tensor.default(%gather) layers.3
    %d = aten.mm.default(%c, %await) layers.3 flops=9
    output(%d)
"""


def test_a_delay_of_nothing_but_what_prefetched_collectives_need_names_both() -> None:
    facts = facts_of(NEEDED_EARLIER, GraphKind.FORWARD)
    lines = "prefetch all_gather 1 block ahead\ndelay reduce_scatter 2 blocks"
    (found,) = planned(lines, facts, path=HALF).diagnostics
    assert found.code == "APL376"
    assert "`gather` needs what `scatter` brings" in found.message
    assert (found.span.one_line, found.related[0].span.one_line) == tuple(lines.split("\n"))
    assert not planned(lines.replace("delay", "optional delay"), facts, path=HALF).diagnostics


def test_a_delay_of_others_as_well_leaves_what_a_prefetched_collective_needs() -> None:
    """As on tensor-parallel graphs, where gathers of activations need what is scattered a block before."""
    free = "%s = _c10d_functional.reduce_scatter_tensor.default(%a) layers.0 group=dp:4 collective"
    await_it = "%w = _c10d_functional.wait_tensor.default(%s) layers.0"
    graph = NEEDED_EARLIER.replace("%b =", f"{free}\n    {await_it}\n    %b =").replace("output(%d)", "output(%d, %w)")
    facts = facts_of(graph, GraphKind.FORWARD)
    made = planned("prefetch all_gather 1 block ahead\ndelay reduce_scatter 2 blocks", facts, path=HALF)
    assert not made.diagnostics
    ahead, later = made.order.outcomes
    assert (ahead.moved, ahead.left) == (("gather",), {})
    assert (later.moved, later.left) == (("s",), {"scatter": "`gather` needs it earlier"})


drawing = settings(max_examples=12)
NAMED = ("collective", "all_gather", "(all_gather where from parameter)", "(all_gather in block)", "reduce_scatter")
FORMS = (
    "prefetch {} 1 block ahead", "prefetch {} 2 blocks ahead", "delay {} 1 block", "keep order of {}",
    "overlap {}", "overlap {} up to 16 B in flight", "overlap {} within 10% of peak", "overlap {} within 8 B of peak",
    "bucket {} per block", "bucket {} up to 1 KiB",
)  # fmt: skip
lines = st.lists(
    st.builds(
        lambda form, named, optional: optional * "optional " + form.format(named),
        st.sampled_from(FORMS),
        st.sampled_from(NAMED),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
    unique=True,
)
rules = st.sampled_from(["undecided -> save", "recompute everything", "recompute all_gather", "offload mm"])


def check(facts: Facts, text: str, path: Capabilities) -> None:
    try:
        policy = policylang.parse(text)
    except policylang.PolicyMeaningError:  # a line said twice
        return
    made = plan(policy, facts, path, device=QUICK)
    assert render_text(made.diagnostics) is not None
    order = made.order
    before = dependencies(order.facts).before
    calls = [row for row, op in enumerate(order.facts.ops) if op == "call_function"]
    place = {row: at for at, (kind, row, _) in enumerate(order.schedule) if kind == StepKind.FIRST_RUN}
    assert sorted(place) == calls
    assert all(place[each] < place[row] for row in calls for each in before[row] if each in place)
    if not order.moves:
        assert list(order.schedule) == list(order.traced_schedule)


@given(graphs(), lines, rules)
@drawing
def test_of_a_joint_graph(facts: Facts, drawn: list[str], rule: str) -> None:
    check(facts, "\n".join((rule, *drawn)), JOINT)


@given(st.lists(st.integers(0, 63), min_size=12, max_size=60), lines, rules)
@drawing
def test_of_a_flat_graph(numbers: list[int], drawn: list[str], rule: str) -> None:
    check(collect(random_flat(numbers, 4).gm), "\n".join((rule, *drawn)), FLAT)


drawing_moves = settings(max_examples=60)
options = st.fixed_dictionaries(
    {
        "blocks": st.integers(1, 4),
        **{name: st.booleans() for name in ("casts", "regathers", "head", "embedding", "activations", "labelled")},
        "unknown": st.integers(-3, 3),
    }
)


def staged(facts: Facts) -> Segments:
    return segments(facts, blocks_of(facts).block_of)


@given(options)
@drawing_moves
def test_blocks_in_the_order_in_which_each_half_runs_them(drawn: dict[str, int]) -> None:
    found = staged(sharded_step(**drawn))
    blocks = drawn["blocks"]
    forward = [-1] * drawn["embedding"] + [*range(blocks)] + [-1]  # the loss stands behind the last block
    backward = [-1] * drawn["head"] + [*reversed(range(blocks))] + [-1] * drawn["embedding"]
    ways = [[block for block, way in zip(found.block, found.direction, strict=True) if way == each] for each in (0, 1)]
    assert ways == [forward, backward]


def test_what_stage_a_collective_and_what_runs_again_belong_to() -> None:
    facts = sharded_step(blocks=2, regathers=True)
    found = staged(facts)
    rows = {name: row for name, row in facts.index.items() if "gather_" in name or "scatter_" in name}
    of = {name: found.block[found.segment_of[row]] for name, row in rows.items()}
    assert of == {
        "gather_0": 0, "gather_1": 1, "gather_1_again": 1, "gather_0_again": 0, "scatter_0": 0, "scatter_1": 1,
    }  # fmt: skip
    again = [facts.index["dx_0"]]
    found = segments(facts, blocks_of(facts).block_of, again)
    assert facts.names[found.first[-1]] == "dx_0"
    assert found.block[-1] == 0


# --- what moves ---
def collectives(facts: Facts, part: str) -> list[int]:
    return [row for row, name in enumerate(facts.names) if part in name and facts.flags[row] & Flag.COLLECTIVE]


def prefetched(facts: Facts, blocks: int) -> Moves:
    requests = [MoveRequest(row, 0, blocks) for row in collectives(facts, "gather")]
    return move_collectives(facts, dependencies(facts), staged(facts), requests, [])


def words(facts: Facts, rows: Sequence[int]) -> str:
    return " ".join(facts.names[row] for row in rows if not facts.names[row].startswith("mean"))


def test_two_blocks_ahead_is_no_further_than_where_the_half_starts() -> None:
    facts = sharded_step(blocks=3)
    found = prefetched(facts, 2)
    assert words(facts, found.order[:8]) == "cast_0 gather_0 wait_0 cast_1 gather_1 cast_2 gather_2 norm_0"


def test_a_scatter_is_awaited_behind_the_next_block() -> None:
    facts = sharded_step(blocks=3)
    requests = [MoveRequest(row, 0, 1) for row in collectives(facts, "scatter")]
    found = move_collectives(facts, dependencies(facts), staged(facts), [], requests)
    assert words(facts, found.order).endswith(
        "dx_2 dw_2 scatter_2 dadd_2 dx_1 dw_1 scatter_1 dadd_1 reduced_2 dx_0 dw_0 scatter_0 dadd_0 reduced_1 reduced_0"
    )
    assert not found.left


@given(options, st.integers(1, 3), st.integers(1, 3), st.sets(st.integers(0, 3)))
@drawing_moves
def test_against_the_evaluator(drawn: dict[str, int], ahead: int, later: int, held: Collection[int]) -> None:
    facts = sharded_step(**drawn)
    rows = collectives(facts, "_")
    kept = {rows[at % len(rows)] for at in held if at}
    needs, found = dependencies(facts, kept), staged(facts)
    gathers = (row for row in rows if "gather" in facts.names[row] or "tp" in facts.names[row])
    prefetches = [MoveRequest(row, 0, ahead) for row in gathers]
    delays = [MoveRequest(row, 1, later) for row in rows if "scatter" in facts.names[row]]
    made = move_collectives(facts, needs, found, prefetches, delays, kept, frozenset(unknown_operators(facts)))
    assert made.order == slow_order(facts, needs.before, found, prefetches, delays, kept, made)
    computed = [row for row in made.order if roles_of(facts)[row] == Role.COMPUTES]
    assert computed == sorted(computed)
    place = {row: at for at, row in enumerate(made.order)}
    assert all(place[each] < place[row] for row in made.order for each in needs.before[row] if each in place)


def slow_order(
    facts: Facts,
    before: Sequence[Sequence[int]],
    found: Segments,
    prefetches: Sequence[MoveRequest],
    delays: Sequence[MoveRequest],
    kept: Collection[int],
    made: Moves,
) -> list[int]:
    """Every call, with what is to be put before and behind it. Nodes times statements, and sets of all ancestors."""
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    role = roles_of(facts)
    ancestors: dict[int, set[int]] = {}
    for row in range(len(facts)):
        ancestors[row] = {each for source in before[row] for each in (source, *ancestors[source])}
    put: dict[int, tuple[int, int]] = {}
    for request in prefetches:
        used = found.uses[request.row]
        same = [at for at, way in enumerate(found.direction) if way == found.direction[used]]
        if used == same[0] or request.row in kept:
            assert request.row in made.left[0]
            continue
        target = found.first[max(same[0], used - request.blocks)]
        anchor = min(row for row in calls if found.direction_of[row] == found.direction_of[target])
        needed = {each for each in ancestors[request.row] if each >= target and each != anchor}
        cheap = all(
            (role[each] in (Role.NONE, Role.AROUND) and "unknown" not in facts.names[each])
            or any(put.get(of, (9**9, 0))[0] <= target for of in (each, *facts.inputs[each][:1]))
            for each in needed
        )
        if request.row < target:
            continue
        assert cheap is (request.row not in made.left.get(0, {}))
        if cheap:
            side = 1 if target == anchor and found.direction_of[target] else -1
            for each in (*needed, request.row):
                put[each] = min((target, side), put.get(each, (target, side)))
    for request in delays:
        if request.row in kept:
            assert request.row in made.left[1]
            continue
        same = [at for at, way in enumerate(found.direction) if way == found.direction[found.makes[request.row]]]
        target = found.last[min(same[-1], found.makes[request.row] + request.blocks)]
        (wait,) = facts.users[request.row]
        (mean,) = facts.users[wait]
        readers = [row for row in calls if wait in before[row] and row not in (mean,) and row <= target]
        if readers and not any(role[row] >= Role.AROUND for row in calls if wait < row < readers[0] and row != mean):
            assert request.row in made.left[1]
            continue
        where = (readers[0], -1) if readers else (target, 1)
        for each in (wait, mean):
            if where > (each, 0):
                put[each] = where
    order: list[int] = []
    for row in calls:
        order += sorted(each for each, place in put.items() if place == (row, -1))
        order += [row] * (row not in put)
        order += sorted(each for each, place in put.items() if place == (row, 1))
    return order


def test_a_step_of_two_batches_has_the_stages_of_each() -> None:
    """In turn forward, backward, forward, backward, the first backward before any forward."""
    text = "%x = input\n"
    last = "x"
    for number, way in enumerate(("backward", "", "backward", "", "backward")):
        for block in (0, 1) if not way else (1, 0):
            name = f"n_{number}_{block}"
            text += f"%{name} = aten.mm.default(%{last}, %x) layers.{block} flops=9 {way}\n"
            last = name
    found = staged(facts_of(f"{text}output(%{last})", GraphKind.FLAT))
    assert list(found.direction) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert list(found.block) == [1, 0, 0, 1, 1, 0, 0, 1, 1, 0]
