"""What comes out runs in the order of the plan's schedule, or in any other that is asked for, with the same bits."""

from typing import Any
from unittest import mock

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch import distributed as dist
from torch.distributed._functional_collectives import all_gather_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import policylang
from policylang.audit.order import audit_order
from policylang.backends.copies import copies_in
from policylang.backends.eager.checkpoint import sessions_of
from policylang.backends.flat import FlatPath
from policylang.backends.joint import JointPartitioner, Partition
from policylang.backends.rewriting import put_in_order
from policylang.errors import PolicyAuditError
from policylang.graph.collect import collect
from policylang.graph.facts import StepKind
from policylang.planning.graph_edit import Edits
from policylang.planning.order.rematerialised import rematerialised
from policylang.planning.plan import OrderPlan
from tests.graph.captured import flat_of, joint_of
from tests.support import orders
from tests.support.drawn import slow
from tests.support.flat_graphs import assert_bitwise_equal, copy_graph
from tests.support.models import Function
from tests.support.random_flat import random_flat, random_joint
from tests.support.run_partition import assert_same_result, traced
from tests.support.sharded import fake_ranks
from tests.support.shared_graphs import JOINT, ONE_DEVICE, shared_graph

BLOCKS = "optional recompute everything in block; optional save everything in block where crosses block"
SOME = (
    "undecided -> save",
    "optional recompute everything; undecided -> save",
    "undecided -> save; optional offload everything",
    "optional recompute everything; optional offload mm, addmm, gelu, convolution; undecided -> save",
)
POLICIES = (*SOME, f"{BLOCKS}; undecided -> save")


numbers = st.lists(st.integers(0, 63), min_size=12, max_size=150)
drawn_rules = st.sampled_from(
    [
        "undecided -> save\noptional recompute everything",
        "undecided -> save\noptional offload everything",
        "undecided -> auto",
        "undecided -> auto\noptional offload mul, frexp",
        "undecided -> save\noptional recompute sin, mul, getitem, frexp, native_dropout\noptional offload mm, t, cos",
        "undecided -> save\noptional recompute everything\noptional offload mul, frexp, native_dropout",
        "undecided -> save\noptional save everything as float8_e4m3fn per row\noptional offload mm",
        "undecided -> save\noptional recompute sin, getitem\noptional save mul, mm, t as bfloat16",
    ]
)
drawing = settings(max_examples=25, suppress_health_check=[HealthCheck.data_too_large])


def untagged(name: str) -> fx.GraphModule:
    """A recorded graph without the tags of whoever recorded it."""
    gm = shared_graph(name)
    for node in gm.graph.nodes:
        node.meta.pop("recompute", None)
    return gm


def assert_halves_in_order(partition: Partition) -> None:
    facts, schedule = partition.plan.facts, partition.schedule
    for half, backward in ((partition.forward, False), (partition.backward, True)):
        planned = orders.planned_half(schedule, facts, backward=backward)
        assert orders.half_steps(half.graph, facts, backward=backward) == planned


def assert_flat_in_order(gm: fx.GraphModule, text: str) -> None:
    plan = FlatPath().apply(gm, policylang.parse(text)).plan
    assert orders.flat_steps(gm.graph, plan.facts) == plan.schedule.names(plan.facts)


@pytest.mark.parametrize("text", [*POLICIES, "optional save matmul; undecided -> auto"])
@pytest.mark.parametrize(
    "model", ["llama", "mlp", *map(slow, ("resnet", "flex", "bart", "gpt2", "mixtral", "dropout"))]
)
def test_the_halves_of_models(model: str, text: str) -> None:
    assert_halves_in_order(joint_of(model).partition(text))


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("model", ["llama", "mlp", *map(slow, ("resnet", "bart", "gpt2", "dropout"))])
def test_flat_graphs_of_models(model: str, text: str) -> None:
    assert_flat_in_order(copy_graph(flat_of(model).gm), text)


@given(numbers, drawn_rules, st.integers(2, 6))
@drawing
def test_random_flat_graphs(drawn: list[int], text: str, segments: int) -> None:
    assert_flat_in_order(random_flat(drawn, segments).gm, text)


@example([0] * 21 + [11, 0, 0, 0, 0, 10, 0, 4, 0, 0, 0, 0, 14, 0, 0, 0, 14, 0, 0, 0, 2], "undecided -> auto")
@given(numbers, drawn_rules)
@drawing
def test_the_halves_of_random_graphs(drawn: list[int], text: str) -> None:
    partition = JointPartitioner(policylang.parse(text)).partition(random_joint(drawn), num_fwd_outputs=1)
    for half in (partition.forward, partition.backward):
        half.graph.lint()
    assert_halves_in_order(partition)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        slow(JOINT, "undecided -> recompute"),
        slow(ONE_DEVICE, "undecided -> save; optional offload mm"),
        slow(JOINT, "undecided -> save; optional offload mm"),
        slow(ONE_DEVICE, "undecided -> recompute"),
    ],
)
def test_the_halves_of_recorded_graphs(name: str, text: str) -> None:
    assert_halves_in_order(JointPartitioner(policylang.parse(text)).partition(untagged(name), num_fwd_outputs=1))


def turns(block: Any, x: Tensor) -> Tensor:
    hidden = block.first(x).sin().exp()
    return block.second(hidden.cos().sigmoid()) * hidden


class Ran(TorchDispatchMode):
    """Notes what runs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_an_eager_block_runs_again_in_its_own_order() -> None:
    block, x = Function(turns, first=nn.Linear(4, 4), second=nn.Linear(4, 4)), torch.randn(2, 4, requires_grad=True)
    contexts = policylang.context_fn(policylang.parse("recompute everything; save addmm"), block)

    def run() -> Tensor:
        found = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        assert isinstance(found, Tensor)
        return found

    for first_time in (True, False):
        output = run()
        with Ran() as ran:
            output.sum().backward()
        (plan,) = [
            kept.instructions.plan
            for session in sessions_of(block)
            for region in session.regions.values()
            for kept in region.kept.values()
        ]
        again = [plan.facts.targets[row] for row in plan.schedule.rows_of(StepKind.SECOND_RUN)]
        own = {"aten.sin.default", "aten.exp.default", "aten.cos.default", "aten.sigmoid.default"}
        assert [name for name in again if name in own] == sorted(own, key=again.index)
        seen = ran.names[: ran.names.index("aten.sigmoid.default") + 1]
        assert [name for name in seen if name in own] == [name for name in again if name in own], first_time


# --- any other order ---
@pytest.mark.parametrize("text", SOME)
@pytest.mark.parametrize("model", ["mlp", "dropout", slow("resnet"), slow("llama")])
def test_any_order_is_carried_out_exactly_and_gives_the_same_bits(model: str, text: str) -> None:
    expected = flat_of(model).fresh().run()
    path, policy = FlatPath(), policylang.parse(text)
    for seed in range(1 if model in ("mlp", "dropout") else 3):
        graph = flat_of(model).fresh()
        plan = path.plan(collect(graph.gm), policy)
        graph_as_run = rematerialised(plan.facts, plan.schedule)
        schedule = orders.drawn_schedule(graph_as_run.facts, graph_as_run.schedule, seed)
        order = OrderPlan(graph_as_run.facts, graph_as_run.schedule, Edits(), graph_as_run.facts, schedule, (), ())
        ordered = evolve(plan, order=order)
        path.lower(graph.gm, ordered, {})
        audit = path.audit(ordered, graph.gm.graph)
        assert audit.agrees
        path.put_in_order(graph.gm, ordered, {})
        copies = set(copies_in(graph.gm.graph.nodes).values())
        assert len(copies) == len({step[:2] for step in schedule if step[0] > StepKind.SECOND_RUN})
        names = [node.name for node in graph.gm.graph.nodes if node.op == "call_function" and node not in copies]
        assert [name for name in names if name in graph_as_run.facts.index] == orders.names_in_order(order)
        assert names != [node.name for node in flat_of(model).gm.graph.nodes if node.op == "call_function"]
        assert_bitwise_equal(graph.run(), expected)


@pytest.mark.parametrize("wrong", ["twice", "never", "before what it reads", "of another graph"])
def test_an_order_that_cannot_be_kept_leaves_the_graph_as_it_was(wrong: str) -> None:
    graph = flat_of("mlp").fresh()
    facts = collect(graph.gm)
    order = orders.order_of(facts)
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
        put_in_order(graph.gm, orders.KEEP, orders.order_of(facts, rows))
    assert str(graph.gm.graph) == before


@pytest.mark.parametrize("text", [*SOME[:3], "optional save mm, addmm; undecided -> auto"])
@pytest.mark.parametrize("model", ["dropout", slow("mlp"), slow("llama"), slow("resnet")])
def test_halves_in_any_order_give_the_same_bits(model: str, text: str) -> None:
    """Copies to the host and back follow the order that the halves get."""
    graph = traced(model)
    plain = graph.run(text)
    with mock.patch("policylang.planning.planner.plan_order", orders.drawing(3)):
        found = graph.run(f"{text}; optional keep order of collective")
    assert_same_result(found, plain)
    partition, usual = found.partition, plain.partition
    names, before = ([*map(orders.names_in, (each.forward, each.backward))] for each in (partition, usual))
    assert names != before
    assert partition.orders.keys() == {"forward", "backward"}
    for half, made in zip((partition.forward, partition.backward), partition.orders.values(), strict=True):
        there = {node.name for node in half.graph.nodes}
        planned = [name for name in orders.names_in_order(made.order) if name in there]
        assert [name for name in orders.names_in(half) if name in set(planned)] == planned
    assert_halves_in_order(partition)


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
    partition = JointPartitioner(policylang.parse(text)).partition(untagged(JOINT), num_fwd_outputs=1)
    for made, half in zip(partition.orders.values(), (partition.forward, partition.backward), strict=True):
        order = made.order
        assert orders.names_in(half) == orders.names_in_order(order)
        assert orders.names_in_order(order) != [order.facts.names[row] for _, row, _ in order.traced_schedule]
        assert audit_order(order, half.graph) == ()


def test_a_graph_that_was_traced_on_real_tensors_is_put_in_order() -> None:
    """``make_fx`` then records each value under a fake mode of its own."""

    def gathered(one: Tensor, other: Tensor) -> Tensor:
        return all_gather_tensor(one, 0, dist.group.WORLD).sum() + all_gather_tensor(other, 0, dist.group.WORLD).sum()

    with fake_ranks(4):
        graph = make_fx(gathered)(torch.ones(4), torch.ones(4))
        policylang.apply(graph, policylang.parse("bucket all_gather up to 1 KiB"))
        called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert sum("all_gather" in target for target in called) == 1
        assert graph(torch.ones(4), torch.ones(4)).shape == ()
