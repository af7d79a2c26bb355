"""Segments, and what prefetches and delays come to: by hand, and against a slow and obvious evaluator."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from policylang.graph.blocks import blocks_of
from policylang.graph.facts import Facts, Flag, GraphKind
from policylang.planning.order.dependencies import Role, Segments, dependencies, roles_of, segments, unknown_operators
from policylang.planning.order.moves import MoveRequest, Moves, move_collectives
from tests.planning.order.sharded_steps import sharded_step
from tests.support.textgraph import facts_of

drawing = settings(max_examples=60)
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
        *((1, 1), (1, 0), (2, 0), (2, 1), (3, 1), (3, 0), (4, 0), (4, 1), (5, 1), (5, 0))
    ]
