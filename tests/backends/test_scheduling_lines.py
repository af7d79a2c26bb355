"""Scheduling lines under ``torch.compile``, on flat graphs, and on a half that a trainer has cut itself."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import default_partition, make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import policylang
from policylang import trace_step
from policylang.audit.report import Report
from policylang.backends import applied_plans
from policylang.backends import copies as copy_operators
from policylang.backends.joint import partitions, unanswered
from policylang.errors import PolicyGraphError, PolicyMatchError
from policylang.graph.facts import StepKind
from policylang.language.plain_data import from_plain, to_plain
from tests.support.compiled import backend_for, fresh_dynamo
from tests.support.flat_graphs import copy_graph
from tests.support.models import broken
from tests.support.orders import half_steps, ordered_plan, planned_half
from tests.support.sharded import ALL_GATHER, REDUCE_SCATTER, fake_ranks, sharded_stack

LAYERS = 3
AHEAD = "bucket all_gather per block; bucket reduce_scatter per block; prefetch all_gather 1 block ahead"
GATHERS = "bucket all_gather per block; prefetch all_gather 1 block ahead"
SCATTERS = "bucket reduce_scatter per block; delay reduce_scatter 1 block"


@pytest.fixture(scope="module", autouse=True)
def many() -> Iterator[None]:
    with fake_ranks(4):
        yield


def compiled(text: str, model: nn.Module | None = None) -> tuple[list[applied_plans.Findings], Report]:
    with fresh_dynamo():
        made = backend_for(text)
        step = torch.compile(sharded_stack(4, LAYERS, width=8) if model is None else model, backend=made)
        step(torch.ones(4, 8)).square().mean().backward()
        return [found for graph in made.graphs for found in graph.findings], policylang.report(step)


def test_a_compiled_step_says_what_was_planned_and_what_each_half_does() -> None:
    text = f"recompute everything; undecided -> auto; {AHEAD}; delay reduce_scatter 1 block"
    (kept,), report = compiled(text)
    whole, forward, backward = report.orders
    assert (whole.half, forward.half, backward.half) == ("", "forward", "backward")
    assert [line.matched for line in whole.lines[:2]] == [4 * LAYERS, 2 * LAYERS]
    assert [line.buckets for line in whole.lines[:2]] == [2 * LAYERS, LAYERS]
    assert [(each.traced.collectives, each.planned.collectives) for each in report.orders] == [(18, 9), (6, 3), (12, 6)]
    assert [line.moved for line in forward.lines] == [6, 0, 2, 0]
    assert [line.moved for line in backward.lines] == [6, 6, 2, 2]
    assert from_plain(Report, json.loads(report.to_json())) == report
    assert sum(rewrite.gone for rewrite in report.rewrites) == 9
    moved = policylang.parse(f"# another line\n{text}")
    again = applied_plans.respelled(from_plain(applied_plans.Findings, json.loads(json.dumps(to_plain(kept)))), moved)
    assert {line.source for line in again.report.orders[1].lines} == {"<policy>:2"}


def test_copies_to_the_host_follow_the_order_of_the_halves() -> None:
    text = f"undecided -> save; offload mm, silu; optional offload all_gather; {AHEAD}; delay reduce_scatter 1 block"
    with partitions() as made:
        _, report = compiled(text)
    (partition,) = made
    assert report.offloaded.bytes
    assert StepKind.COPY_FROM_HOST in set(partition.schedule.kinds)
    facts = partition.plan.facts
    for half, name in ((partition.forward, "forward"), (partition.backward, "backward")):
        made, backward = partition.orders[name], name == "backward"
        joined = {name for edit in made.order.edits.done for name in edit.dead}
        planned = planned_half(partition.schedule, facts, backward=backward)
        expected = [step for step in planned if step[1] not in joined]
        assert len(expected) < len(planned)
        assert half_steps(half.graph, facts, backward=backward) == expected
        copies = sum(kind is StepKind.COPY_TO_HOST for kind, _, _ in planned)
        assert sum(node.target is copy_operators.OFFLOAD_OP for node in half.graph.nodes) == copies


def test_what_is_bucketed_may_wait_on_the_host() -> None:
    step = trace_step(sharded_stack(4, LAYERS, width=8), lambda model, x: model(x).square().sum(), torch.ones(2, 8))
    step.apply(policylang.parse(f"undecided -> save; offload all_gather; {AHEAD}"))
    report = policylang.report(step.gm)
    assert report.offloaded.bytes == 2 * (LAYERS - 1) * 512 + 512
    (account,) = report.orders
    assert account.planned.collectives == 2 * LAYERS


@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_line_has_to_find_something_in_one_graph_of_a_model(at: int) -> None:
    parts: list[nn.Module] = [nn.Linear(8, 8)]
    parts.insert(at, sharded_stack(4, 2, width=8))
    _, report = compiled(f"undecided -> save; {AHEAD}", broken(first=parts[0], second=parts[1]))
    assert [account.half for account in report.orders] == ["", "forward", "backward"]


def test_a_line_that_finds_nothing_in_any_graph_is_an_error() -> None:
    with pytest.raises(PolicyMatchError, match="`delay all_to_all 1 block` matches nothing in this graph"):
        compiled(f"undecided -> save; {AHEAD}; delay all_to_all 1 block")
    with pytest.raises(PolicyMatchError, match="orders collectives, and any of the 2 graphs of this model"):
        compiled(f"undecided -> save; {AHEAD}", broken(first=nn.Linear(8, 8), second=nn.Linear(8, 8)))


def test_a_line_that_finds_nothing_in_either_half_is_an_error() -> None:
    found = unanswered(ordered_plan(), ())
    assert [each.code for each in found] == ["APL419", "APL419"]
    assert found[0].message == (
        "`prefetch all_gather 1 block ahead` selects `bucket0` in the joint graph, and nothing in the "
        "forward or backward graph"
    )


@pytest.fixture(scope="module")
def cut() -> Iterator[tuple[fx.GraphModule, fx.GraphModule]]:
    halves: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        halves.append(copy_graph(gm))
        return make_boxed_func(gm.forward)

    with fresh_dynamo():
        model = sharded_stack(4, LAYERS, width=8)
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=default_partition)
        torch.compile(model, backend=backend)(torch.ones(4, 8)).square().mean().backward()
        yield halves[0], halves[1]


def names(gm: fx.GraphModule, *targets: object) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.target in targets]


@pytest.mark.slow
def test_a_policy_of_scheduling_lines_alone_is_carried_out(cut: tuple[fx.GraphModule, fx.GraphModule]) -> None:
    forward, backward = map(copy_graph, cut)
    policylang.apply(forward, policylang.parse(GATHERS))
    _, second, third = names(forward, ALL_GATHER)
    order = [node.name for node in forward.graph.nodes]
    products = names(forward, torch.ops.aten.mm.default)
    assert order.index(second) < order.index(products[0])
    assert order.index(products[0]) < order.index(third) < order.index(products[2])
    (account,) = policylang.report(forward).orders
    assert [(line.matched, line.moved, line.buckets) for line in account.lines] == [(6, 6, 3), (3, 2, 0)]
    assert (account.traced.collectives, account.planned.collectives) == (6, 3)
    policylang.apply(backward, policylang.parse(SCATTERS))
    assert len(names(backward, REDUCE_SCATTER)) == LAYERS
    assert "bucket reduce_scatter per block" in str(policylang.report(backward))


def test_what_is_expected_of_the_step_is_held_against_the_half(cut: tuple[fx.GraphModule, fx.GraphModule]) -> None:
    forward = copy_graph(cut[0])
    held, other = ["expect exposed <= 100%", "expect peak <= 1 GiB"], ["expect saved <= 1 MiB", "save matmul"]
    policylang.apply(forward, policylang.parse("; ".join([GATHERS, "device h100-sxm", *held, *other])))
    report = policylang.report(forward)
    assert [(each.text, each.status) for each in report.expectations] == [(text, "held") for text in held]
    (note,) = [note for note in report.notes if "APL329" in note]
    assert "2 lines decide nothing here" in note
    before = str(cut[0].graph)
    refused = copy_graph(cut[0])
    with pytest.raises(PolicyMatchError, match="expect exposed <= 1 ns"):
        policylang.apply(refused, policylang.parse(f"{GATHERS}; device h100-sxm; expect exposed <= 1 ns"))
    assert str(refused.graph) == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prefetch reduce_scatter 1 block ahead", "prefetch reduce_scatter 1 block ahead"),
        ("bucket all_to_all per block", "bucket all_to_all per block"),
        ("overlap collective", "APL370"),
        ("blocks elsewhere.*; prefetch all_gather 1 block ahead", "blocks elsewhere.*"),
    ],
)
def test_what_cannot_be_is_said_and_nothing_is_changed(cut, text, said) -> None:
    forward = copy_graph(cut[0])
    with pytest.raises(PolicyMatchError) as raised:
        policylang.apply(forward, policylang.parse(text))
    assert said in str(raised.value)
    assert str(forward.graph) == str(cut[0].graph)


def test_rules_alone_have_no_place_on_a_half(cut: tuple[fx.GraphModule, fx.GraphModule]) -> None:
    with pytest.raises(PolicyGraphError, match="lines that rewrite or order collectives are applied"):
        policylang.apply(copy_graph(cut[0]), policylang.parse("save matmul"))
