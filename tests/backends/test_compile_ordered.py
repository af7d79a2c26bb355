"""Lines that order collectives, under ``torch.compile`` and on flat graphs: what is said, and what goes along."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import policylang
from policylang import trace_step
from policylang.audit.summary.report import Report, report_from_dict
from policylang.backends import records
from policylang.backends.half import unanswered
from policylang.backends.joint import partitions
from policylang.errors import PolicyMatchError
from policylang.graph.schedule import StepKind
from tests.support.carried_out import half_steps, planned_half
from tests.support.compiled import fresh_dynamo
from tests.support.ordered import ordered_plan
from tests.support.sharded import fake_ranks, sharded_stack

LAYERS = 3
AHEAD = "bucket all_gather per block; bucket reduce_scatter per block; prefetch all_gather 1 block ahead"


@pytest.fixture(scope="module", autouse=True)
def many() -> Iterator[None]:
    with fake_ranks(4):
        yield


def compiled(text: str, model: nn.Module | None = None) -> tuple[list[records.Findings], Report]:
    with fresh_dynamo():
        made = policylang.backend(policylang.parse(text), inner="aot_eager")
        step = torch.compile(sharded_stack(4, LAYERS, width=8) if model is None else model, backend=made)
        step(torch.ones(4, 8)).square().mean().backward()
        return [found for graph in made.graphs for found in graph.findings], policylang.report(step)


def test_a_compiled_step_says_what_was_planned_and_what_each_half_does() -> None:
    text = f"recompute everything; undecided -> auto; {AHEAD}; delay reduce_scatter 1 block"
    (kept,), report = compiled(text)
    whole, forward, backward = report.orders
    assert (whole.half, forward.half, backward.half) == ("", "forward", "backward")
    assert [(line.matched, line.buckets) for line in whole.lines[:2]] == [
        (4 * LAYERS, 2 * LAYERS),
        (2 * LAYERS, LAYERS),
    ]
    assert [(each.traced.collectives, each.planned.collectives) for each in report.orders] == [(18, 9), (6, 3), (12, 6)]
    assert [line.moved for line in forward.lines] == [6, 0, 2, 0]
    assert [line.moved for line in backward.lines] == [6, 6, 2, 2]
    assert report_from_dict(json.loads(report.to_json())) == report
    assert sum(rewrite.gone for rewrite in report.rewrites) == 9
    moved = policylang.parse(f"# another line\n{text}")
    again = records.findings_from_json(json.loads(json.dumps(records.findings_to_json(kept))), moved)
    assert {line.source for line in again.report.orders[1].lines} == {"<policy>:2"}


def test_copies_to_the_host_follow_the_order_of_the_halves() -> None:
    text = f"undecided -> save; offload mm, silu; optional offload all_gather; {AHEAD}; delay reduce_scatter 1 block"
    with partitions() as made:
        _, report = compiled(text)
    (partition,) = made
    assert report.offloaded is not None
    assert report.offloaded.bytes
    assert partition.schedule is not None
    assert StepKind.COPY_FROM_HOST in set(partition.schedule.kinds)
    facts = partition.plan.facts
    for half, backward in ((partition.forward, False), (partition.backward, True)):
        there = half_steps(half.graph, facts, backward=backward)
        planned = planned_half(partition.schedule, facts, backward=backward)
        assert there == [step for step in planned if step in set(there)]


def test_what_is_bucketed_may_wait_on_the_host() -> None:
    step = trace_step(sharded_stack(4, LAYERS, width=8), lambda model, x: model(x).square().sum(), torch.ones(2, 8))
    step.apply(policylang.parse(f"undecided -> save; offload all_gather; {AHEAD}"))
    report = policylang.report(step.gm)
    assert report.offloaded is not None
    assert report.offloaded.bytes == 2 * (LAYERS - 1) * 512 + 512
    (account,) = report.orders
    assert account.planned.collectives == 2 * LAYERS


class Broken(nn.Module):
    """Two graphs, one of which has collectives."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        found: Tensor = self.second(x)
        return found


@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_line_has_to_find_something_in_one_graph_of_a_model(at: int) -> None:
    parts: list[nn.Module] = [nn.Linear(8, 8)]
    parts.insert(at, sharded_stack(4, 2, width=8))
    _, report = compiled(f"undecided -> save; {AHEAD}", Broken(*parts))
    assert [account.half for account in report.orders] == ["", "forward", "backward"]


def test_a_line_that_finds_nothing_in_any_graph_is_an_error() -> None:
    with pytest.raises(PolicyMatchError, match="`delay all_to_all 1 block` matches nothing in this graph"):
        compiled(f"undecided -> save; {AHEAD}; delay all_to_all 1 block")
    with pytest.raises(PolicyMatchError, match="orders collectives, and any of the 2 graphs of this model"):
        compiled(f"undecided -> save; {AHEAD}", Broken(nn.Linear(8, 8), nn.Linear(8, 8)))


def test_a_line_that_finds_nothing_in_either_half_is_an_error() -> None:
    found = unanswered(ordered_plan(), ())
    assert [each.code for each in found] == ["APL419", "APL419"]
    assert found[0].message == (
        "`prefetch all_gather 1 block ahead` picks `bucket0` in the joint graph, and nothing in either half"
    )


@pytest.mark.slow
def test_a_model_that_takes_no_gradients_runs_as_it_is() -> None:
    with fresh_dynamo(), torch.no_grad():
        made = policylang.backend(policylang.parse(f"undecided -> save; {AHEAD}"), inner="aot_eager")
        found = torch.compile(sharded_stack(4, 2, width=8), backend=made)(torch.ones(4, 8))
    assert found.shape == (4, 8)
