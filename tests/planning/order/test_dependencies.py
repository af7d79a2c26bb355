"""What has to run before what: by hand, against all pairs, and by running graphs in other orders that it allows."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag, GraphKind
from policylang.operators.names import is_unknown
from policylang.planning.order.dependencies import dependencies, directions
from tests.planning.strategies import graphs
from tests.support.flat_graphs import Flat, assert_bitwise_equal
from tests.support.random_flat import random_flat
from tests.support.textgraph import facts_of

drawing = settings(max_examples=15)


def closure(before: Sequence[Collection[int]]) -> list[set[int]]:
    found: list[set[int]] = []
    for rows in before:
        found.append(set(rows).union(*(found[row] for row in rows)))
    return found


def must_stay(facts: Facts, one: int, other: int, kept: Collection[int]) -> bool:
    """Whether two calls, the first of which stands first, may not change places by themselves."""
    flags, targets = facts.flags, facts.targets

    def both(flag: int) -> bool:
        return all(flags[row] & flag and targets[row] != "builtin.getitem" for row in (one, other))

    def held(row: int) -> bool:
        return bool(flags[row] & Flag.COLLECTIVE) or "wait_tensor" in targets[row] or barrier(row)

    def barrier(row: int) -> bool:
        source = facts.inputs[row][0] if facts.inputs[row] else -1
        awaits = "wait_tensor" in targets[row] and source in kept and flags[source] & Flag.COLLECTIVE
        return row in kept or bool(awaits) or is_unknown(targets[row], flags[row])

    direction, first = directions(facts), facts.ops.index("call_function")
    return (
        one in facts.inputs[other]
        or both(Flag.RANDOM | Flag.SEED)
        or both(Flag.EFFECTFUL)
        or (held(one) and held(other) and (barrier(one) or barrier(other)))
        or direction[one] != direction[other]
        or (one > first and all(direction[row] < direction[one] for row in range(first, one)))  # the first of its turn
    )


@given(graphs(), st.lists(st.integers(0, 40), max_size=2))
@drawing
def test_all_pairs(facts: Facts, drawn: list[int]) -> None:
    collectives = [row for row, flag in enumerate(facts.flags) if flag & Flag.COLLECTIVE]
    kept = {collectives[at % len(collectives)] for at in drawn} if collectives else set()
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    pairs = [set(reads) for reads in facts.inputs]
    for other in calls:
        pairs[other] |= {one for one in calls if one < other and must_stay(facts, one, other, kept)}
    found = dependencies(facts, kept)
    assert all(each < row for row, rows in enumerate(found.before) for each in rows)
    for row, (slow, fast) in enumerate(zip(closure(pairs), closure(found.before), strict=True)):
        assert slow <= fast
        if not any(flag & Flag.WRITES for flag in facts.flags):
            assert slow == fast, row


@given(st.lists(st.integers(0, 63), min_size=12, max_size=60), st.integers(2, 5), st.randoms(use_true_random=False))
@drawing
def test_any_order_that_it_allows_computes_the_same_bits(
    drawn: list[int], segments: int, chance: random.Random
) -> None:
    flat = random_flat(drawn, segments)
    facts = collect(flat.gm)
    expected, written = _run(flat.fresh())
    order = another_order(facts, chance)
    other = flat.fresh()
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    nodes = list(other.gm.graph.nodes)
    for row in order:
        copies[nodes[row]] = graph.node_copy(nodes[row], copies.__getitem__)
    found, rewritten = _run(other._replace(gm=fx.GraphModule(other.gm, graph)))
    assert_bitwise_equal(found, expected)
    assert_bitwise_equal(rewritten, written)


def _run(flat: Flat) -> tuple[list[Tensor], list[Tensor]]:
    return flat.run(), flat.inputs


def another_order(facts: Facts, chance: random.Random) -> list[int]:
    """A random one of those that are allowed; inputs first, the output last."""
    before = dependencies(facts).before
    waiting = {row: set(before[row]) for row, op in enumerate(facts.ops) if op == "call_function"}
    order = [row for row, op in enumerate(facts.ops) if op in ("placeholder", "get_attr")]
    done = set(order)
    while waiting:
        ready = [row for row, rows in waiting.items() if rows <= done]
        chosen = chance.choice(ready)
        del waiting[chosen]
        done.add(chosen)
        order.append(chosen)
    return [*order, *(row for row, op in enumerate(facts.ops) if op == "output")]


GATHERS = """
    %w = parameter
    %v = parameter
    %g = _c10d_functional.all_gather_into_tensor.default(%w) group=dp:4 collective
    %wait = _c10d_functional.wait_tensor.default(%g)
    %x = {between}
    %h = _c10d_functional.all_gather_into_tensor.default(%v) group=dp:4 collective
    %await = _c10d_functional.wait_tensor.default(%h)
    %y = aten.mm.default(%wait, %await)
    output(%y)
"""


def gathers(between: str) -> Facts:
    return facts_of(GATHERS.replace("{between}", between), GraphKind.FORWARD)


@pytest.mark.parametrize(
    "between",
    [
        "mylib.all_reduce.default(%w)",
        "deepep.dispatch.default(%w)",
        "mylib.moe.default(%w) group=ep:4 collective",
        "mylib.log.default(%w) effectful",
        "mypackage.steps.inner.call(%w)",
        "higher_order.local_map_hop(%w)",
        "higher_order.with_effects(%w) effectful",
        "_c10d_functional.isend.default(%w) group=pp:4 collective",
        "c10d.recv_.default(%w) effectful",
        "symm_mem.nccl_put.default(%w)",
        "streams.wait_event.default(%w)",
    ],
)
def test_nothing_that_communicates_crosses_what_nobody_knows(between: str) -> None:
    facts = gathers(between)
    found = dependencies(facts)
    target = facts.targets[facts.index["x"]]
    assert found.barriers == {target: 1}
    before = closure(found.before)
    assert facts.index["x"] in before[facts.index["h"]]
    assert {facts.index["g"], facts.index["wait"]} <= before[facts.index["x"]]


@pytest.mark.parametrize(
    "between",
    [
        "aten.sin.default(%w)",
        "mylib.rms_norm.default(%w)",
        "higher_order.flex_attention(%w)",
        "aten._assert_async.default(%w) effectful",
        "symm_mem.fused_all_gather_matmul.default(%w) group=tp:4 collective",
        "torch.sym_max(%w)",
        "aten.permute.default(%w) view",
    ],
)
def test_what_is_known_is_no_barrier(between: str) -> None:
    facts = gathers(between)
    found = dependencies(facts)
    assert not found.barriers
    assert facts.index["x"] not in closure(found.before)[facts.index["h"]]


def test_a_collective_reads_until_it_is_awaited() -> None:
    facts = facts_of(
        """
        %w = parameter
        %g = _c10d_functional.all_gather_into_tensor.default(%w) group=dp:4 collective
        %wait = _c10d_functional.wait_tensor.default(%g)
        %x = aten.copy_.default(%w, %w) writes
        output(%wait)
        """,
        GraphKind.FORWARD,
    )
    assert facts.index["wait"] in dependencies(facts).before[facts.index["x"]]
