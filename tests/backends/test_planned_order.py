"""Orders that are carried out on graphs: exactly, with the same bits, and not at all where anything is wrong."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest
from attrs import evolve

import policylang
from policylang.audit.order import audit_order
from policylang.backends.flat.path import FlatPath
from policylang.backends.joint.path import JointPartitioner
from policylang.backends.surgery.copy_insertion import copies_in
from policylang.backends.surgery.planned_order import put_in_order
from policylang.errors import PolicyAuditError
from policylang.graph.collect import collect
from policylang.graph.schedule import StepKind
from policylang.planning.graph_edit import Edits
from policylang.planning.order.as_run import run
from policylang.planning.schedule.order_plan import OrderPlan
from tests.support.carried_out import half_steps, planned_half
from tests.support.flat_graphs import Flat, assert_bitwise_equal, flat_graph
from tests.support.hand_orders import KEEP, drawing, drawn_schedule, names_in, order_of
from tests.support.models import ZOO
from tests.support.run_partition import Traced, assert_same_result, trace
from tests.support.shared_graphs import JOINT, shared_graph


@cache
def flat(model: str) -> Flat:
    return flat_graph(ZOO[model]())


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


TEXTS = (
    "undecided -> save",
    "optional recompute everything; undecided -> save",
    "optional recompute everything; optional offload mm, addmm, gelu, convolution; undecided -> save",
    "undecided -> save; optional offload everything",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("model", ["mlp", "dropout", slow("resnet"), slow("llama")])
def test_any_order_is_carried_out_exactly_and_gives_the_same_bits(model: str, text: str) -> None:
    expected = flat(model).fresh().run()
    path, policy = FlatPath(), policylang.parse(text)
    for seed in range(1 if model in ("mlp", "dropout") else 3):
        graph = flat(model).fresh()
        plan = path.plan(collect(graph.gm), policy)
        as_run = run(plan.facts, plan.schedule)
        schedule = drawn_schedule(as_run.facts, as_run.schedule, seed)
        order = OrderPlan(as_run.facts, as_run.schedule, Edits(), as_run.facts, schedule, (), ())
        ordered = evolve(plan, order=order)
        path.carry_out(graph.gm, ordered, {})
        audit = path.audit(ordered, graph.gm.graph)
        assert audit.agrees
        path.put_in_order(graph.gm, ordered, {})
        copies = set(copies_in(graph.gm.graph.nodes).values())
        assert len(copies) == len({step[:2] for step in schedule if step[0] > StepKind.SECOND_RUN})
        names = [node.name for node in graph.gm.graph.nodes if node.op == "call_function" and node not in copies]
        assert [name for name in names if name in as_run.facts.index] == order.order()
        assert names != [node.name for node in flat(model).gm.graph.nodes if node.op == "call_function"]
        assert_bitwise_equal(graph.run(), expected)


@pytest.mark.parametrize("wrong", ["twice", "never", "before what it reads", "of another graph"])
def test_an_order_that_cannot_be_kept_leaves_the_graph_as_it_was(wrong: str) -> None:
    graph = flat("mlp").fresh()
    facts = collect(graph.gm)
    order = order_of(facts)
    rows = list(order.schedule.rows)
    if wrong == "twice":
        rows.append(rows[0])
    elif wrong == "never":
        rows.pop()
    elif wrong == "before what it reads":
        rows.reverse()
    else:
        facts = evolve(facts, names=[*facts.names[:-2], "elsewhere", facts.names[-1]])
    before = str(graph.gm.graph)
    with pytest.raises(PolicyAuditError, match=r"APL408|order"):
        put_in_order(graph.gm, KEEP, order_of(facts, rows))
    assert str(graph.gm.graph) == before


def test_the_audit_names_what_a_later_pass_moved() -> None:
    graph = flat("mlp").fresh()
    facts = collect(graph.gm)
    order = order_of(facts)
    assert audit_order(order, graph.gm.graph) == ()
    nodes = [node for node in graph.gm.graph.nodes if node.op == "call_function"]
    nodes[8].append(nodes[2])
    (found,) = audit_order(order, graph.gm.graph)
    assert found.code == "APL418"
    assert f"`{nodes[2].name}` runs behind `{nodes[8].name}`" in found.message
    assert f"where the plan has it behind `{nodes[1].name}`" in found.message


PATCHED = "policylang.planning.planner.plan_order"


@cache
def traced(model: str) -> Traced:
    return trace(*ZOO[model]())


@pytest.mark.parametrize(
    "text",
    [
        "undecided -> save",
        "optional recompute everything; undecided -> save",
        "undecided -> save; optional offload everything",
        "optional save mm, addmm; undecided -> auto",
    ],
)
@pytest.mark.parametrize("model", ["dropout", slow("mlp"), slow("llama"), slow("resnet")])
def test_halves_in_any_order_give_the_same_bits(model: str, text: str) -> None:
    """Copies to the host and back follow the order that the halves get."""
    graph = traced(model)
    plain = graph.run(text)
    with mock.patch(PATCHED, drawing(3)):
        found = graph.run(f"{text}; optional keep order of collective")
    assert_same_result(found, plain)
    partition, usual = found.partition, plain.partition
    assert partition is not None
    assert usual is not None
    assert [names_in(half) for half in (partition.forward, partition.backward)] != [
        names_in(half) for half in (usual.forward, usual.backward)
    ]
    assert partition.orders.keys() == {"forward", "backward"}
    for half, made in zip((partition.forward, partition.backward), partition.orders.values(), strict=True):
        assert made.order is not None
        planned = [name for name in made.order.order() if name in {node.name for node in half.graph.nodes}]
        assert [name for name in names_in(half) if name in set(planned)] == planned
    schedule, facts = partition.schedule, partition.plan.facts
    assert schedule is not None
    for half, backward in ((partition.forward, False), (partition.backward, True)):
        assert half_steps(half.graph, facts, backward=backward) == planned_half(schedule, facts, backward=backward)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "undecided -> save; prefetch (all_gather where from parameter) 1 block ahead; delay reduce_scatter 1 block",
        "undecided -> save; must_recompute chain through all_gather where from parameter; "
        "overlap collective up to 4 GiB in flight; device h100-sxm",
    ],
)
def test_the_halves_of_a_graph_of_128_ranks_are_put_in_order(text: str) -> None:
    gm = shared_graph(JOINT)
    for node in gm.graph.nodes:
        node.meta.pop("recompute", None)
    partition = JointPartitioner(policylang.parse(text)).partition(gm, num_fwd_outputs=1)
    for made, half in zip(partition.orders.values(), (partition.forward, partition.backward), strict=True):
        order = made.order
        assert order is not None
        assert names_in(half) == order.order()
        assert order.order() != [order.facts.names[row] for _, row, _ in order.traced_schedule]
        assert audit_order(order, half.graph) == ()
