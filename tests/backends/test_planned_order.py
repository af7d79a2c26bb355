"""Orders that are carried out on graphs: exactly, with the same bits, and not at all where anything is wrong."""

from __future__ import annotations

from functools import cache

import pytest
from attrs import evolve
from torch import fx

import policylang
from policylang.audit.order import audit_order
from policylang.backends.flat.path import FlatPath
from policylang.backends.surgery.planned_order import put_in_order
from policylang.errors import PolicyAuditError
from policylang.graph.reading.collect import collect
from policylang.planning.schedule.order_plan import OrderPlan
from tests.support.flat_graphs import Flat, assert_bitwise_equal, flat_graph
from tests.support.models import ZOO
from tests.support.orders import KEEP, drawn_order, names_in, order_of


@cache
def flat(model: str) -> Flat:
    return flat_graph(ZOO[model]())


def carried_out(gm: fx.GraphModule, order: OrderPlan, text: str = "undecided -> save") -> None:
    path, policy = FlatPath(), policylang.parse(text)
    plan = evolve(path.plan(collect(gm), policy), order=order)
    path.carry_out(gm, plan, {})
    path.put_in_order(gm, plan, {})


@pytest.mark.parametrize("model", ["mlp", "llama", "resnet"])
def test_any_order_is_carried_out_exactly_and_gives_the_same_bits(model: str) -> None:
    expected = flat(model).fresh().run()
    for seed in range(3):
        graph = flat(model).fresh()
        facts = collect(graph.gm)
        rows = drawn_order(facts, seed)
        carried_out(graph.gm, order_of(facts, rows))
        assert names_in(graph.gm) == [facts.names[row] for row in rows]
        assert names_in(graph.gm) != names_in(flat(model).gm)
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
