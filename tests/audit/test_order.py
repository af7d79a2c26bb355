"""What an audit reads: the order of a graph and of generated code, and every node as a slow reader has it."""

import ast
import json
import operator
import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import policylang
from policylang import trace_step
from policylang.audit.graphs import audit_flat, read, read_halves
from policylang.audit.order import (
    ELSEWHERE,
    CodeAudit,
    CommunicationStep,
    audit_order,
    between,
    differences,
    displaced,
    read_code,
)
from policylang.audit.outcome import Found
from policylang.backends.flat import rematerialise
from policylang.graph import marks
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, Flag, Phase
from policylang.language.plain_data import from_plain, to_plain
from policylang.operators.calls import argument, describe, nodes_in
from policylang.planning.graph_edit import Edit, Edits, NewNode, Proof
from policylang.planning.liveness import backward_needs
from policylang.planning.plan import OrderPlan
from tests.backends.test_partition_cases import traced
from tests.support.decided import decided
from tests.support.flat_graphs import copy_graph
from tests.support.orders import drawn_order, order_of
from tests.support.process import python
from tests.support.random_flat import random_flat
from tests.support.run_partition import Traced
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
    gather, before = next(node for node in calls(gm, ALL_GATHER) if node > product), product.prev
    gather.append(product)
    return f"`{product.name}` runs behind `{gather.name}`, where the plan has it behind `{before.name}`"


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
        (start_earlier, "APL418"), (wait_ahead, "APL418"), (product_later, "APL418"), (one_more, "APL417"),
        (another_group, "APL417"), (gone, "APL417"), (swapped, "APL417"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)  # fmt: skip
def test_what_somebody_changed_is_named(step, change, code) -> None:
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


# as Inductor of torch 2.13 generated it of a function of every kind of collective, without sizes and comments
ALL_KINDS = """
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        cpp_fused_all_reduce_mul_0(arg0_1, buf0)
        torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0')
        buf3 = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default([arg0_1, arg1_1], 2, '0')
        buf4 = buf3[0]
        assert_size_stride(buf4, (8, 4), (4, 1), 'torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default')
        buf5 = buf3[1]
        del buf3
        buf9 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        extern_kernels.mm(arg1_1, arg1_1, out=buf9)
        torch.ops._c10d_functional.wait_tensor.default(buf4)
        cpp_fused_all_reduce_coalesced_broadcast_slice_1(buf9, buf4, buf12, buf18, buf13)
        del buf9
        torch.ops._c10d_functional.all_reduce_coalesced_.default([buf12, buf13], 'sum', '0')
        buf17 = torch.ops._c10d_functional.all_to_all_single.default(arg1_1, [2, 2], [2, 2], '1')
        torch.ops._c10d_functional.wait_tensor.default(buf0)
        torch.ops._c10d_functional.wait_tensor.default(buf13)
        torch.ops._c10d_functional.wait_tensor.default(reinterpret_tensor(buf5, (4, 8), (1, 4), 0))
        torch.ops._c10d_functional.wait_tensor.default(arg0_1)
        return (buf0, buf4, buf5, buf12, buf13, buf17, )
"""


PARTITIONS = """
def partition_0(args):
    arg0, arg1 = args
    args.clear()
    triton_poi_fused_0.run(arg0, buf1, 16, stream=stream0)
    return (buf1, )
def partition_1(args):
    buf0, buf1 = args
    with torch.cuda._DeviceGuard(0):
        torch.ops._c10d_functional.wait_tensor.default(buf0)
        extern_kernels.mm(buf0, buf1, out=buf2)
    return (buf2, )
class Runner:
    def call(self, args):
        arg0, arg1 = args
        buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(arg0, 2, '0')
        partition0_args = [arg0, arg1]
        (buf1,) = self.partitions[0](partition0_args)
        partition1_args = [buf0, buf1]
        (buf2,) = self.partitions[1](partition1_args)
        buf3 = torch.ops._c10d_functional.reduce_scatter_tensor.default(buf2, 'sum', 2, '0')
        buf4 = buf3; del buf3  # reuse
        torch.ops._c10d_functional.wait_tensor.default(buf4)
        return (buf4, )
"""
OF_A_NAMESPACE = """
def call(args):
    buf0 = torch.ops.mine.exchange.default(a, '0')
    torch.ops.aten.sort.default(buf0)
"""
FILLED = """
def call(args):
    torch.ops._c10d_functional.all_gather_into_tensor_out.default(arg0, 2, '0', out=buf0)
    buf1 = empty_strided_cpu((4, ), (1, ), torch.float32)
    torch.ops._c10d_functional.wait_tensor.default(buf0)
"""


@pytest.mark.parametrize(
    ("source", "operators", "expected"),
    [
        (ALL_KINDS, (), [
            "start 0 all_reduce 0 1", "start 1 all_gather_into_tensor_coalesced 0 0",
            "wait 1 all_gather_into_tensor_coalesced - 1", "start 2 all_reduce_coalesced 0 1",
            "start 3 all_to_all_single 1 0", "wait 0 all_reduce - 0", "wait 2 all_reduce_coalesced - 0",
            "wait 1 all_gather_into_tensor_coalesced - 0", f"wait {ELSEWHERE} wait_tensor - 0"]),
        (PARTITIONS, (), [
            "start 0 all_gather_into_tensor 0 0", "wait 0 all_gather_into_tensor - 1",
            "start 1 reduce_scatter_tensor 0 1", "wait 1 reduce_scatter_tensor - 0"]),
        (OF_A_NAMESPACE, (), []),
        (OF_A_NAMESPACE, ("mine.exchange",), ["start 0 exchange 0 0"]),
        (FILLED, (), ["start 0 all_gather_into_tensor 0 0", "wait 0 all_gather_into_tensor - 0"]),
    ],
    ids=["every kind", "partitions", "unknown namespace", "of the plan", "filled result"],
)  # fmt: skip
def test_collectives_are_read_off_generated_code(source: str, operators: tuple[str, ...], expected: list[str]) -> None:
    assert expected == [
        f"{'start' if step.starts else 'wait'} {step.number} {step.operator.rpartition('.')[2]} "
        f"{step.group or '-'} {step.kernels}"
        for step in read_code(source, operators)
    ]


@pytest.mark.parametrize(
    "source", ["#include <torch/csrc/inductor/cpp_wrapper/cpu.h>\nvoid f() {}", "x = 1\n", "(" * 9]
)
def test_what_is_not_the_wrapper_in_python_is_not_read(source: str) -> None:
    assert read_code(source) is None


def test_a_half_in_another_language_is_told_to_be_unread() -> None:
    audit = CodeAudit({"forward": [PLANNED], "backward": [()]})
    (unread,) = audit.check("forward", "#include <cpp_wrapper.h>")
    assert unread.code == "APL347"
    assert [(each.half, each.status) for each in audit.reports()] == [("forward", "not read")]


def test_code_is_held_to_the_partition_that_it_is_of() -> None:
    other = gathers("s0", "w0")
    audit = CodeAudit({"forward": [PLANNED, other], "backward": []})
    source = """
def call(args):
    buf0 = torch.ops._c10d_functional.all_gather_into_tensor.default(arg0, 2, '0')
    torch.ops._c10d_functional.wait_tensor.default(buf0)
"""
    assert not audit.check("forward", source, other)
    (difference,) = audit.check("forward", source, PLANNED)
    assert difference.code == "APL345"
    again = from_plain(CodeAudit, json.loads(json.dumps(to_plain(audit))))
    assert again.planned == audit.planned
    assert [step.kernels for step in again.planned["forward"][0]] == [step.kernels for step in PLANNED]


def gathers(*order: str) -> tuple[CommunicationStep, ...]:
    """``s0`` starts the first gather, ``w0`` awaits it, and a number is of the products in between."""
    steps, kernels = [], 0
    for word in order:
        if word.isdecimal():
            kernels = int(word)
            continue
        starts, number = word[0] == "s", int(word[1:])
        step = CommunicationStep(starts, number, "_c10d_functional.all_gather_into_tensor", "0" if starts else "")
        steps.append(evolve(step, kernels=kernels, alone=kernels, name=f"gather_{number}"))
        kernels = 0
    return tuple(steps)


PLANNED = gathers("s0", "2", "s1", "w0", "1", "w1")


def test_what_runs_beside_a_collective_is_counted_up_to_its_first_wait() -> None:
    assert between(gathers("3", "s0", "2", "s1", "w0", "1", "w1", "4", "w1")) == {0: 2, 1: 1}


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (gathers("s0", "5", "s1", "w0", "2", "w1"), ()),
        (
            gathers("s0", "w0", "s1", "w1"),
            ("step 1 of its communication is the wait for", "the start of", "`gather_1`"),
        ),
        (
            gathers("s0", "s1", "w0"),
            ("step 3 of its communication is missing", "the wait for all_gather_into_tensor 1"),
        ),
        ((*PLANNED, *gathers("s2")), ("step 4 of its communication is the start of", "the plan has no more there")),
        (
            gathers("s0", "s1", "w0", "w1"),
            ("nothing is computed", "`gather_0` and 1 other collective", "2 products there"),
        ),
        (gathers("s0", "1", "s1", "w0", "w1"), ("nothing is computed", "`gather_1`;", "1 product there")),
    ],
)
def test_differences_are_named(code: tuple[CommunicationStep, ...], said: tuple[str, ...]) -> None:
    found = [each.message for each in differences(PLANNED, code, "backward")]
    assert len(found) == bool(said)
    for words in said:
        assert words in found[0]
        assert "in the code of the backward" in found[0]


def test_another_group_is_another_order_and_one_that_is_not_named_is_not() -> None:
    other = (evolve(PLANNED[0], group="7"), *PLANNED[1:])
    (found,) = differences(PLANNED, other, "forward")
    assert "over group `7`; the plan has group `0` there" in found.message
    assert not list(differences(PLANNED, (evolve(PLANNED[0], group=""), *PLANNED[1:]), "forward"))


ORDERED = Flag.RANDOM | Flag.READS_MUTATED | Flag.WRITES | Flag.EFFECTFUL | Flag.COLLECTIVE


class SlowReader:
    """Of a flat graph without copies between device and host."""

    def __init__(self, facts: Facts, graph: fx.Graph) -> None:
        self.facts = facts
        self.nodes = list(graph.nodes)
        self.at = self.nodes.index

    def keeper(self, node: Any, piece: int) -> fx.Node | None:
        if isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == piece:
            source = node.args[0]
            if isinstance(source, fx.Node) and str(source.target) == "run_and_save_rng_state":
                return source
        return None

    def row(self, node: fx.Node) -> int:
        if self.keeper(node, 0) is not None:
            return -1
        named = self.keeper(node, 1) or node
        return self.facts.index.get(self.origin(named) or named.name, -1)

    def origin(self, node: fx.Node) -> str | None:
        return marks.custom(node.meta).get(marks.RECOMPUTED)

    def second(self, node: fx.Node) -> bool:
        return self.origin(node) is not None and node.op == "call_function"

    def late(self, node: fx.Node) -> bool:
        row = self.row(node)
        return self.origin(node) is not None or (row >= 0 and self.facts.phases[row] == Phase.BACKWARD)

    def forward_reads(self, late: bool) -> list[tuple[int, int]]:
        """Position of a reader, and the row that it reads of the forward or of the inputs."""
        return [
            (at, self.row(read))
            for at, node in enumerate(self.nodes)
            if self.late(node) is late
            for read in node.all_input_nodes
            if self.row(read) >= 0 and not self.late(read)
        ]

    def crossing(self) -> dict[int, int]:
        reads = self.forward_reads(late=True)
        return {row: max(at for at, each in reads if each == row) for _, row in reads}

    def held(self) -> dict[int, int]:
        roots = self.facts.storage_roots
        reads = [(at, roots[row]) for at, row in self.forward_reads(late=False)]
        return {root: max(at for at, each in reads if each == root) for _, root in reads}

    def saved(self) -> list[int]:
        facts = self.facts
        forward = (row for row in self.crossing() if facts.phases[row] == Phase.FORWARD)
        return sorted(row for row in forward if not facts.has(row, Flag.SYMBOLIC))

    def recomputed(self) -> list[int]:
        return [self.row(node) for node in self.nodes if self.second(node)]

    def first_runs(self) -> list[fx.Node]:
        called = (node for node in self.nodes if node.op == "call_function" and self.row(node) >= 0)
        return [node for node in called if not self.second(node)]

    def twice(self) -> list[int]:
        forward = [self.at(node) for node in self.first_runs() if not self.late(node)]
        again = [node for node in self.nodes if self.second(node)]

        def shares_a_part(node: fx.Node, earlier: fx.Node) -> bool:
            start, end = self.at(earlier), self.at(node)
            return start < end and self.row(earlier) == self.row(node) and not any(start < at < end for at in forward)

        return [self.row(node) for node in again if any(shares_a_part(node, other) for other in again)]

    def redrawn(self) -> list[int]:
        found = []
        for node in filter(self.second, self.nodes):
            replays = str(node.target) == "run_with_rng_state"
            draws = bool(describe(node.target).flags & Flag.RANDOM) or replays
            keeper = self.keeper(node.args[0], 0) if replays else None
            kept = self.row(keeper) if keeper is not None else -1
            if draws and self.facts.has(self.row(node), Flag.RANDOM) and kept != self.row(node):
                found.append(self.row(node))
        return found

    def rewritten(self) -> list[int]:
        return [
            self.row(node)
            for node in self.nodes
            if self.second(node)
            and any(not self.second(each) for each in nodes_in(argument(node, describe(node.target).written)))
        ]

    def swapped(self) -> set[str]:
        facts = self.facts
        rows = [self.row(node) for node in self.first_runs()]
        ordered = [row for row in rows if facts.flags[row] & ORDERED and facts.owners[row] == row]
        return {facts.names[row] for at, row in enumerate(ordered) if any(before > row for before in ordered[:at])}

    def early(self) -> list[tuple[str, str]]:
        return [
            (node.name, read.name)
            for node in self.nodes
            for read in node.all_input_nodes
            if self.at(read) > self.at(node)
        ]

    def unknown(self) -> list[str]:
        called = (node for node in self.nodes if node.op == "call_function")
        return [node.name for node in called if self.row(node) < 0 and self.keeper(node, 0) is None]


numbers = st.lists(st.integers(0, 63), min_size=12, max_size=90)
choices = st.lists(st.booleans(), min_size=1, max_size=40)
spoilings = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 999), st.integers(0, 999)), max_size=4)


def spoil(graph: fx.Graph, how: int, one: int, other: int) -> None:
    """A node read elsewhere, moved, copied, or its mark taken off or put on: any of which may be harmless."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    node, place = nodes[one % len(nodes)], nodes[other % len(nodes)]
    if how == 0 and node.all_input_nodes:
        node.replace_input_with(node.all_input_nodes[0], place)
    elif how == 1:
        place.prepend(node)
    elif how == 2:
        with graph.inserting_before(place):
            graph.node_copy(node)
    elif how == 3:
        node.meta = {key: value for key, value in node.meta.items() if key != "custom"}
    elif how == 4:
        node.meta = {**node.meta, "custom": {**marks.custom(node.meta), marks.RECOMPUTED: place.name}}


def assert_same_reading(facts: Facts, graph: fx.Graph) -> None:
    found, slow = read(facts, graph), SlowReader(facts, graph)
    assert found.order == [node.name for node in slow.nodes]
    assert found.crossing == slow.crossing()
    assert found.held == slow.held()
    assert found.saved == slow.saved()
    assert found.recomputed == slow.recomputed()
    assert found.twice == slow.twice()
    assert found.redrawn == slow.redrawn()
    assert found.rewritten == slow.rewritten()
    assert set(found.swapped) == slow.swapped()
    assert sorted(found.early) == sorted(slow.early())
    assert found.unknown == slow.unknown()


@given(numbers, choices, st.integers(2, 6), spoilings)
@settings(max_examples=25, suppress_health_check=[HealthCheck.data_too_large])
def test_reads_what_the_definitions_say(drawn, recompute, segments, spoiled) -> None:
    gm = random_flat(drawn, segments).gm
    facts = collect(gm)
    plan = decided(facts, lambda owner: recompute[owner % len(recompute)])
    rematerialise(gm, plan)
    assert_same_reading(facts, gm.graph)
    assert audit_flat(plan, gm.graph).agrees
    for how, one, other in spoiled:
        spoil(gm.graph, how, one, other)
        assert_same_reading(facts, gm.graph)


@cache
def joint() -> Traced:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = nn.functional.dropout((x @ weight).sin().cos() + x, 0.5)
        return x.exp() * torch.rand_like(x)

    return traced(forward, torch.rand(4, 4), torch.rand(4, 4))


def assert_same_halves(facts: Facts, found: Found, forward: fx.Graph, backward: fx.Graph, outputs: int) -> None:
    """By names alone, but for what is drawn again, which has none."""
    names = facts.names
    kept = [value.name for value in forward.output_node().args[0][outputs:]]
    taken = {node.name for node in backward.nodes if node.op == "placeholder"}
    crossing = {name for name in kept if name in taken and name in facts.index}
    is_input = {name for name in crossing if facts.phases[facts.index[name]] == Phase.INPUT}
    assert {names[row] for row in found.crossing} == crossing
    assert {names[row] for row in found.saved} == crossing - is_input
    returned = {names[row]: place for row, (place, _) in found.places.items()}
    assert returned == {name: outputs + at for at, name in enumerate(kept) if name in crossing}
    called = [facts.index.get(node.name, -1) for node in backward.nodes if node.op == "call_function"]
    again = [row for row in called if row >= 0 and facts.phases[row] == Phase.FORWARD]
    found_again, planned = (
        [row for row in each if not facts.has(row, Flag.RANDOM)] for each in (found.recomputed, again)
    )
    assert found_again == planned
    for graph in (forward, backward):
        order = {node: at for at, node in enumerate(graph.nodes)}
        early = {
            (node.name, read.name) for node in graph.nodes for read in node.all_input_nodes if order[read] > order[node]
        }
        assert early <= set(found.early)


@given(st.lists(st.sampled_from(["save", "recompute"]), min_size=6, max_size=6), spoilings)
@settings(max_examples=25)
def test_reads_two_halves_as_the_definitions_say(fates: list[str], spoiled: list[tuple[int, int, int]]) -> None:
    what = ("mm", "sin", "cos", "add", "random", "exp")
    text = "\n".join(["undecided -> save", *(f"{fate} {name}" for fate, name in zip(fates, what, strict=True))])
    graph = joint()
    partition = graph.partition(text)
    plan, forward, backward = partition.plan, partition.forward.graph, partition.backward.graph
    needs = backward_needs(plan.facts, plan.decisions)
    for how, one, other in [(5, 0, 0), *spoiled]:
        spoil(backward if one % 2 else forward, how, one // 2, other)
        found = read_halves(plan, needs, forward, backward, num_fwd_outputs=graph.num_fwd_outputs)
        assert_same_halves(plan.facts, found, forward, backward, graph.num_fwd_outputs)


PACKAGE = Path(policylang.__file__).parent
AUDITED = ("policylang.backends", "policylang.tracing", "policylang.simulation")
REPORTS = {"Audit", "partition_report", "plan_report"}
WHO_CALLS_IT = {
    "backends/applied_plans.py": {"CodeAudit"},
    "backends/eager/region.py": {"audit_eager"},
    "backends/flat.py": {"audit_flat"},
    "backends/joint.py": {"audit", "audit_copies", "audit_order", "read_halves"},
    "backends/path.py": {"audit_order"},
    "backends/torch_compile/inductor.py": {"CodeAudit"},
}
"""By file what it calls, beside the class of what an audit comes to and the functions that make reports."""


def imports(file: Path) -> set[tuple[str, str]]:
    """Module and name of every import of a file, those within functions included."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {(node.module or "", name.name) for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {(name.name, "") for name in node.names}
    return found


def test_it_imports_nothing_that_it_audits() -> None:
    files = sorted((PACKAGE / "audit").glob("*.py"))
    assert len(files) > 3
    for file in files:
        assert not [module for module, _ in imports(file) if module.startswith(AUDITED)], file.name


@pytest.mark.slow
def test_nothing_that_it_imports_does() -> None:
    modules = [f"policylang.audit.{file.stem}" for file in (PACKAGE / "audit").glob("*.py") if file.stem[0] != "_"]
    program = f"import importlib, sys; [importlib.import_module(name) for name in {modules}]; print(*sys.modules)"
    assert [name for name in python("-c", program).stdout.split() if name.startswith(AUDITED)] == []


def test_backends_call_it_at_the_end_and_take_nothing_else_from_it() -> None:
    found = {
        file.relative_to(PACKAGE).as_posix(): {
            name
            for module, name in imports(file)
            if module.startswith("policylang.audit") and module != "policylang.audit.report"
        }
        - REPORTS
        for file in (PACKAGE / "backends").rglob("*.py")
    }
    assert {file: names for file, names in found.items() if names} == WHO_CALLS_IT
