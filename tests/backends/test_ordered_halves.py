"""Scheduling lines on one half of a partition, as a trainer applies them that cuts its graphs itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import default_partition, make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

import policylang
from policylang.errors import PolicyGraphError, PolicyMatchError
from tests.support.compiled import fresh_dynamo
from tests.support.flat_graphs import copy_graph
from tests.support.sharded import ALL_GATHER, REDUCE_SCATTER, fake_ranks, sharded_stack

LAYERS = 3
WAIT = torch.ops._c10d_functional.wait_tensor.default
AHEAD = "bucket all_gather per block; prefetch all_gather 1 block ahead"
LATER = "bucket reduce_scatter per block; delay reduce_scatter 1 block"
DEVICE = "device h100-sxm"


@pytest.fixture(scope="module")
def cut() -> Iterator[tuple[fx.GraphModule, fx.GraphModule]]:
    halves: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        halves.append(copy_graph(gm))
        return make_boxed_func(gm.forward)

    with fake_ranks(4), fresh_dynamo():
        model = sharded_stack(4, LAYERS, width=8)
        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=default_partition)
        torch.compile(model, backend=backend)(torch.ones(4, 8)).square().mean().backward()
        yield halves[0], halves[1]


def names(gm: fx.GraphModule, *targets: object) -> list[str]:
    return [node.name for node in gm.graph.nodes if node.target in targets]


def test_a_policy_of_scheduling_lines_alone_is_carried_out(cut: tuple[fx.GraphModule, fx.GraphModule]) -> None:
    forward, backward = map(copy_graph, cut)
    policylang.apply(forward, policylang.parse(AHEAD))
    _, second, third = names(forward, ALL_GATHER)
    order = [node.name for node in forward.graph.nodes]
    products = names(forward, torch.ops.aten.mm.default)
    assert order.index(second) < order.index(products[0])
    assert order.index(products[0]) < order.index(third) < order.index(products[2])
    (account,) = policylang.report(forward).orders
    assert [(line.matched, line.moved, line.buckets) for line in account.lines] == [(6, 6, 3), (3, 2, 0)]
    assert (account.traced.collectives, account.planned.collectives) == (6, 3)
    policylang.apply(backward, policylang.parse(LATER))
    assert len(names(backward, REDUCE_SCATTER)) == LAYERS
    assert "bucket reduce_scatter per block" in str(policylang.report(backward))


def test_what_is_expected_of_the_step_is_held_against_the_half(cut: tuple[fx.GraphModule, fx.GraphModule]) -> None:
    forward = copy_graph(cut[0])
    text = f"{AHEAD}; {DEVICE}; expect exposed <= 100%; expect peak <= 1 GiB; expect saved <= 1 MiB; save matmul"
    policylang.apply(forward, policylang.parse(text))
    report = policylang.report(forward)
    assert [(each.text, each.status) for each in report.expectations] == [
        ("expect exposed <= 100%", "held"),
        ("expect peak <= 1 GiB", "held"),
    ]
    (note,) = [note for note in report.notes if "APL329" in note]
    assert "2 lines decide nothing here" in note
    before = str(cut[0].graph)
    refused = copy_graph(cut[0])
    with pytest.raises(PolicyMatchError, match="expect exposed <= 1 ns"):
        policylang.apply(refused, policylang.parse(f"{AHEAD}; {DEVICE}; expect exposed <= 1 ns"))
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
def test_what_cannot_be_is_said_and_nothing_is_changed(
    cut: tuple[fx.GraphModule, fx.GraphModule], text: str, said: str
) -> None:
    forward = copy_graph(cut[0])
    with pytest.raises(PolicyMatchError) as raised:
        policylang.apply(forward, policylang.parse(text))
    assert said in str(raised.value)
    assert str(forward.graph) == str(cut[0].graph)


def test_rules_alone_have_no_place_on_a_half(cut: tuple[fx.GraphModule, fx.GraphModule]) -> None:
    with pytest.raises(PolicyGraphError, match="the lines that rewrite or order collectives are carried out"):
        policylang.apply(copy_graph(cut[0]), policylang.parse("save matmul"))
