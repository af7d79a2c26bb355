"""What the audit of an order finds in a graph that somebody changed after the order was carried out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from policylang import trace_step
from policylang.audit.order import audit_order, displaced
from policylang.graph.collect import collect
from policylang.planning.graph_edit import Edit, Edits, NewNode, Proof
from policylang.planning.plan import OrderPlan
from tests.support.flat_graphs import copy_graph
from tests.support.hand_orders import drawn_order, order_of
from tests.support.sharded import ALL_GATHER, fake_ranks, sharded_stack

WAIT = torch.ops._c10d_functional.wait_tensor.default


def loss(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().sum()
    return found


@pytest.fixture(scope="module")
def step() -> Iterator[fx.GraphModule]:
    with fake_ranks(4):
        yield trace_step(sharded_stack(4, layers=2, width=8), loss, torch.ones(2, 8)).gm


def calls(gm: fx.GraphModule, target: object) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


def said(order: OrderPlan, gm: fx.GraphModule) -> list[tuple[str, str]]:
    return [(found.code, found.message) for found in audit_order(order, gm.graph)]


def start_earlier(gm: fx.GraphModule) -> str:
    gather = calls(gm, ALL_GATHER)[2]
    calls(gm, WAIT)[0].append(gather)
    (shard,) = gather.all_input_nodes
    if shard.op == "call_function":
        gather.prepend(shard)
    return f"`{gather.name}` starts behind `{calls(gm, WAIT)[0].name}`"


def wait_ahead(gm: fx.GraphModule) -> str:
    wait = calls(gm, WAIT)[1]
    wait.all_input_nodes[0].append(wait)
    products = calls(gm, torch.ops.aten.mm.default)
    products[-1].append(wait.all_input_nodes[0])
    products[-1].next.append(wait)
    return f"`{wait.name}` awaits `{wait.all_input_nodes[0].name}`"


def product_later(gm: fx.GraphModule) -> str:
    product = calls(gm, torch.ops.aten.mm.default)[0]
    gather = next(node for node in calls(gm, ALL_GATHER) if node > product)
    gather.append(product)
    return f"`{product.name}` runs behind `{gather.name}`"


def one_more(gm: fx.GraphModule) -> str:
    gather = calls(gm, ALL_GATHER)[0]
    with gm.graph.inserting_after(gather):
        more = gm.graph.call_function(ALL_GATHER, gather.args)
    return f"`{more.name}` (_c10d_functional.all_gather_into_tensor.default) is no collective of the plan"


def another_group(gm: fx.GraphModule) -> str:
    gather = calls(gm, ALL_GATHER)[0]
    gather.target = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
    return f"`{gather.name}` calls _c10d_functional.all_gather_into_tensor_coalesced.default"


def gone(gm: fx.GraphModule) -> str:
    gather, wait = calls(gm, ALL_GATHER)[0], calls(gm, WAIT)[0]
    name = gather.name
    wait.replace_all_uses_with(calls(gm, WAIT)[1])
    gm.graph.erase_node(wait)
    gm.graph.erase_node(gather)
    return f"the plan has `{name}` (_c10d_functional.all_gather_into_tensor.default), and the graph does not"


def swapped(gm: fx.GraphModule) -> str:
    first, second = calls(gm, WAIT)[:2]
    reader = next(iter(first.users))
    reader.replace_input_with(first, second)
    return f"`{reader.name}` reads `{second.name}`, where the plan has it read `{first.name}`"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (start_earlier, "APL418"),
        (wait_ahead, "APL418"),
        (product_later, "APL418"),
        (one_more, "APL417"),
        (another_group, "APL417"),
        (gone, "APL417"),
        (swapped, "APL417"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_what_somebody_changed_is_named(
    step: fx.GraphModule, change: Callable[[fx.GraphModule], str], code: str
) -> None:
    gm = copy_graph(step)
    order = order_of(collect(gm))
    assert audit_order(order, gm.graph) == ()
    expected = change(gm)
    found = said(order, gm)
    assert [message for each, message in found if each == code and expected in message], found


def test_a_bucket_that_is_not_there_is_named(step: fx.GraphModule) -> None:
    gm = copy_graph(step)
    order = order_of(collect(gm))
    first, second = calls(gm, ALL_GATHER)[:2]
    joined = NewNode("joined", "aten.cat.default", (), (4,), (1,), "float32", "cpu", "", first.name)
    edit = Edit(0, "bucket", (first.name, second.name), (), first.name, (joined,), (), (), Proof(4, ()))
    facts = order.facts
    row = facts.index[first.name]
    names = list(facts.names)
    names[row] = "joined"
    found = said(evolve(order, edits=Edits((edit,)), facts=evolve(facts, names=names)), gm)
    lacks = f"the bucket of `{first.name}`, `{second.name}` is not there: the graph lacks `joined`"
    assert ("APL417", lacks) in found


def test_every_shuffle_is_found(step: fx.GraphModule) -> None:
    facts = collect(step)
    for seed in range(5):
        order = order_of(facts, drawn_order(facts, seed))
        codes = {found.code for found in audit_order(order, step.graph)}
        assert codes == {"APL418"}


def test_what_draws_and_what_writes_keeps_its_turn() -> None:
    def run(x: Tensor) -> Tensor:
        kept = x.clone()
        first, second = torch.bernoulli(x), torch.rand_like(x)
        kept.add_(1)
        return (kept * first).sum() + second.sum() + x.cos().sum()

    gm = torch.fx.experimental.proxy_tensor.make_fx(run)(torch.rand(3))
    facts = collect(gm)
    calls = [row for row, op in enumerate(facts.ops) if op == "call_function"]
    by_name = {facts.targets[row].split(".")[1]: row for row in reversed(calls)}

    def moved(name: str, before: str) -> list[str]:
        rows = [row for row in calls if row != by_name[name]]
        rows.insert(rows.index(by_name[before]), by_name[name])
        order = order_of(facts, rows)
        position = {row: at for at, row in enumerate(rows)}
        graph = copy_graph(gm)
        nodes = {node.name: node for node in graph.graph.nodes}
        anchor = graph.graph.output_node()
        for row in sorted(position, key=position.__getitem__):
            anchor.prepend(nodes[facts.names[row]])
        return [found.message for found in audit_order(order, graph.graph) if found.code == "APL410"]

    assert moved("cos", "bernoulli") == []
    (found,) = moved("rand_like", "bernoulli")
    assert f"`{facts.names[by_name['bernoulli']]}` runs behind `{facts.names[by_name['rand_like']]}`" in found
    order = moved("add_", "bernoulli")
    assert order == []
    (found,) = moved("mul", "add_")
    assert f"`{facts.names[by_name['add_']]}` runs behind `{facts.names[by_name['mul']]}`" in found


def heaviest(places: list[int], weights: list[int]) -> int:
    """By trying every subset."""
    best = 0
    for size in range(len(places) + 1):
        for chosen in combinations(range(len(places)), size):
            rising = [places[at] for at in chosen]
            if rising == sorted(rising):
                best = max(best, sum(weights[at] for at in chosen))
    return best


@given(st.integers(0, 2**31), st.integers(0, 8))
def test_the_least_is_said_to_have_moved(seed: int, count: int) -> None:
    numbers = random.Random(seed)
    planned = list(range(count))
    found = numbers.sample(planned, count)
    weights = [numbers.choice((2, 3)) for _ in planned]
    moved = displaced(found, planned, weights.__getitem__)
    stays = [step for at, step in enumerate(found) if at not in {each.at for each in moved}]
    assert stays == sorted(stays)
    assert sum(weights[step] for step in stays) == heaviest(found, [weights[step] for step in found])
    for each in moved:
        before = [step for step in found[: each.at] if step in stays]
        assert each.behind == (found.index(before[-1]) if before else -1)
        smaller = [step for step in stays if step < found[each.at]]
        assert each.planned == (found.index(smaller[-1]) if smaller else -1)
