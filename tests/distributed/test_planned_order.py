"""Steps of sharded models whose collectives were joined and moved: real ranks, the same loss, the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from attrs import frozen
from functorch.compile import default_partition, make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor

import policylang
from policylang import trace_step
from policylang.audit.report import Report
from tests.support.compiled import fresh_dynamo
from tests.support.models import llama
from tests.support.ranks import run_ranks
from tests.support.sharded import ALL_GATHER, REDUCE_SCATTER, shard_parameters, sharded_stack

RANKS = 2
"""A sum of two is the same in either order, so that buckets of scatters give the same bits."""
LAYERS = 3
WEIGHTS = 2 * LAYERS
KEEP = "undecided -> save"
AGAIN = "undecided -> save; must_recompute chain through all_gather where from parameter"
BUCKETS = "bucket (all_gather where from parameter) per block; bucket reduce_scatter per block"
AHEAD = f"{BUCKETS}; prefetch (all_gather where from parameter) 1 block ahead; delay reduce_scatter 1 block"
OVERLAP = f"{BUCKETS}; overlap collective up to 1 GiB in flight; device h100-sxm"
ORDERS = (
    "prefetch (all_gather where from parameter) 1 block ahead",
    "delay reduce_scatter 1 block",
    "overlap collective; device h100-sxm",
    BUCKETS,
    AHEAD,
    OVERLAP,
)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x).square().mean()
    return found


def count(gm: fx.GraphModule, *targets: Any) -> int:
    return sum(node.target in targets for node in gm.graph.nodes)


def assert_same(ours: Sequence[Any], theirs: Sequence[Any], what: str) -> None:
    for one, other in zip(ours, theirs, strict=True):
        local = [each.to_local() if isinstance(each, DTensor) else each for each in (one, other)]
        assert torch.equal(*local), what


def flat_steps(rank: int, cases: Sequence[str], orders: Sequence[str]) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    for values in cases:
        plain = trace_step(sharded_stack(RANKS, LAYERS, width=8), loss, x)
        plain.apply(policylang.parse(values))
        loss_value, gradients = plain(x)
        traced = [node.name for node in plain.gm.graph.nodes]
        for text in orders:
            step = trace_step(sharded_stack(RANKS, LAYERS, width=8), loss, x)
            step.apply(policylang.parse(f"{values}; {text}"))
            found, others = step(x)
            assert_same([found, *others.values()], [loss_value, *gradients.values()], text)
            assert [node.name for node in step.gm.graph.nodes] != traced, text
            report = policylang.report(step.gm)
            assert report.audit.agrees
            (account,) = report.orders
            again = LAYERS if values == AGAIN else 0
            if "bucket" in text:
                assert count(step.gm, REDUCE_SCATTER) == LAYERS
                assert account.planned.collectives == count(step.gm, ALL_GATHER, REDUCE_SCATTER) <= 2 * LAYERS + again
            if "overlap" in text:
                assert account.planned.exposed < account.traced.exposed


def compiled(text: str, x: Tensor) -> tuple[list[Tensor], Report]:
    model = sharded_stack(RANKS, LAYERS, width=8)
    with fresh_dynamo():
        step = torch.compile(model, backend=policylang.backend(policylang.parse(text), inner="aot_eager"))
        found = step(x).square().mean()
        found.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(each is not None for each in gradients)
        return [found.detach(), *gradients], policylang.report(step)  # type: ignore[list-item]


def compiled_steps(rank: int, cases: Sequence[str], orders: Sequence[str]) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    for values in cases:
        plain, _ = compiled(values, x)
        for text in orders:
            found, report = compiled(f"{values}; {text}", x)
            assert_same(found, plain, text)
            assert [account.half for account in report.orders] == ["", "forward", "backward"]
            assert report.audit.agrees
            _, forward, backward = report.orders
            if "all_gather" in text or "overlap" in text:
                assert sum(line.moved for line in forward.lines)
            if "bucket" in text:
                assert forward.planned.collectives == LAYERS
                assert backward.planned.collectives <= 2 * LAYERS
            assert sum(line.moved for line in backward.lines) or "delay" not in text


def applied(text: str | None, x: Tensor) -> tuple[list[Any], list[fx.GraphModule]]:
    """The step that a trainer takes which cuts a graph itself, and applies an order to the halves."""
    halves: list[fx.GraphModule] = []

    def compile(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        if text is not None:
            policylang.apply(gm, policylang.parse(text))
        halves.append(gm)
        return make_boxed_func(gm.forward)

    model = sharded_stack(RANKS, LAYERS, width=8)
    with fresh_dynamo():
        backend = aot_autograd(fw_compiler=compile, bw_compiler=compile, partition_fn=default_partition)
        found = torch.compile(model, backend=backend)(x).square().mean()
        found.backward()
    return [found.detach(), *(parameter.grad for parameter in model.parameters())], halves


def halves_of_others(rank: int, orders: Sequence[str]) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    plain, (forward, backward) = applied(None, x)
    for text in orders:
        found, halves = applied(f"optional {'; optional '.join(text.split('; '))}; device h100-sxm", x)
        assert_same(found, plain, text)
        assert [node.name for node in halves[0].graph.nodes] != [node.name for node in forward.graph.nodes]
        assert [node.name for node in halves[1].graph.nodes] != [node.name for node in backward.graph.nodes]


def some(rank: int) -> None:
    flat_steps(rank, [AGAIN], [AHEAD])


def every(rank: int) -> None:
    flat_steps(rank, [KEEP, AGAIN], ORDERS)
    compiled_steps(rank, [KEEP, AGAIN], ORDERS)
    halves_of_others(rank, [AHEAD, "overlap collective"])


def test_an_order_gives_the_same_bits() -> None:
    run_ranks(some, RANKS)


@pytest.mark.slow
def test_every_order_gives_the_same_bits() -> None:
    run_ranks(every, RANKS, timeout=900.0)


def sharded_llama() -> nn.Module:
    torch.manual_seed(0)
    return shard_parameters(llama(layers=3).module, RANKS)


@frozen
class Outcome:
    gathers: int
    scatters: int


def llama_steps(rank: int) -> dict[str, Outcome]:
    example = llama(layers=3)
    found = {}

    def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
        return example.loss_fn(model(tokens))

    for values in (KEEP, AGAIN):
        plain = trace_step(sharded_llama(), next_token, *example.inputs)
        plain.apply(policylang.parse(values))
        loss_value, gradients = plain(*example.inputs)
        for text in ("", *ORDERS):
            step = trace_step(sharded_llama(), next_token, *example.inputs)
            step.apply(policylang.parse(f"{values}; {text}"))
            other, others = step(*example.inputs)
            assert_same([other, *others.values()], [loss_value, *gradients.values()], text)
            found[f"{values}; {text}"] = Outcome(count(step.gm, ALL_GATHER), count(step.gm, REDUCE_SCATTER))
    return found


@pytest.mark.slow
def test_a_llama_takes_the_same_step_in_every_order() -> None:
    first, second = run_ranks(llama_steps, RANKS, timeout=900.0)
    assert first == second
    for values in (KEEP, AGAIN):
        traced, bucketed = first[f"{values}; "], first[f"{values}; {BUCKETS}"]
        assert bucketed.gathers < traced.gathers
        assert bucketed.scatters < traced.scatters
