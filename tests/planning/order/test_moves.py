"""Segments, and what prefetches and delays come to: by hand, and against a slow and obvious evaluator."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.graph.blocks import blocks_of
from policylang.graph.facts import Facts, Flag, GraphKind
from policylang.planning.order.dependencies import Role, dependencies, roles_of, unknown_operators
from policylang.planning.order.moves import MoveRequest, Moves, move_collectives
from policylang.planning.order.segments import Segments, segments
from tests.planning.order.sharded_steps import sharded_step
from tests.support.textgraph import facts_of

drawing = settings(max_examples=60, deadline=None)
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
@drawing
def test_blocks_in_the_order_in_which_each_half_runs_them(drawn: dict[str, int]) -> None:
    found = staged(sharded_step(**drawn))
    blocks = drawn["blocks"]
    forward = [-1] * drawn["embedding"] + [*range(blocks)] + [-1]  # the loss stands behind the last block
    backward = [-1] * drawn["head"] + [*reversed(range(blocks))] + [-1] * drawn["embedding"]
    ways = [[block for block, way in zip(found.block, found.direction, strict=True) if way == each] for each in (0, 1)]
    assert ways == [forward, backward]


def test_a_collective_is_of_the_stage_that_uses_or_makes_what_it_moves() -> None:
    facts = sharded_step(blocks=2, regathers=True)
    found = staged(facts)
    rows = {name: row for name, row in facts.index.items() if "gather_" in name or "scatter_" in name}
    of = {name: found.block[found.segment_of[row]] for name, row in rows.items()}
    assert of == {
        "gather_0": 0,
        "gather_1": 1,
        "gather_1_again": 1,
        "gather_0_again": 0,
        "scatter_0": 0,
        "scatter_1": 1,
    }


def test_what_runs_again_belongs_to_the_stage_that_it_serves() -> None:
    facts = sharded_step(blocks=2, regathers=True)
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


def test_a_gather_starts_before_the_block_before_computes() -> None:
    facts = sharded_step(blocks=3)
    found = prefetched(facts, 1)
    assert words(facts, found.order[:14]) == (
        "cast_0 gather_0 wait_0 cast_1 gather_1 norm_0 mm_0 add_0 wait_1 cast_2 gather_2 norm_1 mm_1 add_1"
    )
    assert found.left == {0: {facts.index["gather_0"]: "it would start before the forward does"}}


def test_two_blocks_ahead_is_no_further_than_where_the_half_starts() -> None:
    facts = sharded_step(blocks=3)
    found = prefetched(facts, 2)
    assert words(facts, found.order[:8]) == "cast_0 gather_0 wait_0 cast_1 gather_1 cast_2 gather_2 norm_0"


def test_in_the_backward_it_goes_by_the_order_of_the_backward() -> None:
    facts = sharded_step(blocks=3, regathers=True, casts=False)
    requests = [MoveRequest(row, 0, 1) for row in collectives(facts, "again")]
    found = move_collectives(facts, dependencies(facts), staged(facts), requests, [])
    order = words(facts, found.order)
    assert "gather_2_again wait_2_again gather_1_again dx_2 dw_2" in order
    assert "wait_1_again gather_0_again dx_1" in order
    assert found.left == {0: {facts.index["gather_2_again"]: "it would start before the backward does"}}


def test_the_first_gather_of_a_stage_stands_with_its_head() -> None:
    facts = sharded_step(blocks=2, head=True, regathers=True, casts=False)
    found = move_collectives(
        facts, dependencies(facts), staged(facts), [MoveRequest(facts.index["gather_1_again"], 0, 1)], []
    )
    assert "gather_1_again dx_head" in words(facts, found.order)


def test_a_scatter_is_awaited_behind_the_next_block() -> None:
    facts = sharded_step(blocks=3)
    requests = [MoveRequest(row, 0, 1) for row in collectives(facts, "scatter")]
    found = move_collectives(facts, dependencies(facts), staged(facts), [], requests)
    assert words(facts, found.order).endswith(
        "dx_2 dw_2 scatter_2 dadd_2 dx_1 dw_1 scatter_1 dadd_1 reduced_2 dx_0 dw_0 scatter_0 dadd_0 reduced_1 reduced_0"
    )
    assert not found.left


def test_what_reads_at_once_is_named() -> None:
    facts = sharded_step(blocks=2, activations=True)
    found = move_collectives(facts, dependencies(facts), staged(facts), [], [MoveRequest(facts.index["tp_1"], 0, 1)])
    assert found.left == {0: {facts.index["tp_1"]: "`norm_1` reads it at once"}}


@given(options, st.integers(1, 3), st.integers(1, 3), st.sets(st.integers(0, 3)))
@drawing
def test_against_the_evaluator(drawn: dict[str, int], ahead: int, later: int, held: Collection[int]) -> None:
    facts = sharded_step(**drawn)
    rows = collectives(facts, "_")
    kept = {rows[at % len(rows)] for at in held if at}
    needs, found = dependencies(facts, kept), staged(facts)
    prefetches = [
        MoveRequest(row, 0, ahead) for row in rows if "gather" in facts.names[row] or "tp" in facts.names[row]
    ]
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


@pytest.mark.parametrize("kind", ["prefetch", "delay"])
def test_a_kept_collective_stays(kind: str) -> None:
    facts = sharded_step(blocks=3)
    row = facts.index["gather_1" if kind == "prefetch" else "scatter_1"]
    requests = [MoveRequest(row, 0, 1)]
    both = (requests, []) if kind == "prefetch" else ([], requests)
    found = move_collectives(facts, dependencies(facts, {row}), staged(facts), *both, kept={row})
    assert found.left == {0: {row: "it is kept in order"}}
    assert found.behind_kept == {0: {row: row}}
    assert found.order == sorted(found.order)


def test_a_wait_that_a_prefetched_gather_needs_is_not_delayed_past_it() -> None:
    facts = facts_of(
        """
        %x = input
        %a = aten.mm.default(%x, %x) layers.0 flops=9
        %scatter = _c10d_functional.reduce_scatter_tensor.default(%a) layers.0 group=dp:4 collective
        %wait = _c10d_functional.wait_tensor.default(%scatter) layers.0
        %b = aten.mm.default(%a, %x) layers.1 flops=9
        %c = aten.mm.default(%b, %x) layers.2 flops=9
        %cast = prims.convert_element_type.default(%wait) layers.3
        %gather = _c10d_functional.all_gather_into_tensor.default(%cast) layers.3 group=dp:4 collective
        %await = _c10d_functional.wait_tensor.default(%gather) layers.3
        %d = aten.mm.default(%c, %await) layers.3 flops=9
        output(%d)
        """
    )
    prefetch, delay = MoveRequest(facts.index["gather"], 0, 1), MoveRequest(facts.index["scatter"], 1, 2)
    alone = move_collectives(facts, dependencies(facts), staged(facts), [], [delay])
    assert words(facts, alone.order) == "a scatter b c wait cast gather await d"
    both = move_collectives(facts, dependencies(facts), staged(facts), [prefetch], [delay])
    assert words(facts, both.order) == "a scatter wait b cast gather c await d"
    assert both.crossed == [(prefetch, delay)]
    assert both.left == {1: {facts.index["scatter"]: "`gather` needs it earlier"}}


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
    assert list(zip(found.direction, found.block, strict=True)) == [
        *((1, 1), (1, 0), (2, 0), (2, 1), (3, 1), (3, 0), (4, 0), (4, 1), (5, 1), (5, 0)),
    ]
