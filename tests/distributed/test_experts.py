"""Experts on two ranks, which receive unequally many tokens: the same bits under every policy, saved bytes in range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policylang
from policylang.api.planned_graphs import facts_of
from policylang.planning.inspection.breakdown import breakdown
from tests.support.compiled import backend_for
from tests.support.ranks import run_ranks
from tests.support.routed import TOKENS, WIDTH, Routed
from tests.support.versions import needs_traced_generators

pytestmark = needs_traced_generators
BLOCKS = "blocks layers.*\n"
FULL = f"{BLOCKS}balance up to 2.0\nrecompute everything in block\nsave everything in block where crosses block\n"
ONCE = f"{FULL}include <moe>\n"
LINES = {
    "once": ONCE,
    "products": f"{ONCE}save (mm, addmm, aten._grouped_mm) in block\n",
    "overlap": f"device h100-sxm\nundecided -> save\n{BLOCKS}overlap all_to_all\n",
    "both": f"device h100-sxm\n{ONCE}overlap all_to_all\n",
}
IN_EAGER = ("once", "products")


def made(rank: int) -> tuple[nn.Module, Tensor]:
    """Both ranks choose the experts of the first one more often."""
    model = Routed()
    for layer in model.layers:
        layer.norm.bias.data += 1
        layer.router.weight.data[:2] += 0.2
    return model, torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))


def gradients(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    value = model(x) if run is None else run(x)
    value.backward()
    return [value.detach(), *(each.grad for each in model.parameters())]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) > 10 and all(map(torch.equal, left, right))


class Sized(torch.fx.Interpreter):
    """Notes the bytes of what each node returns."""

    def run_node(self, node: torch.fx.Node) -> Any:
        found = super().run_node(node)
        self.sizes = {**getattr(self, "sizes", {}), node.name: found.nbytes if isinstance(found, Tensor) else 0}
        return found


def saved_bytes(rank: int) -> int:
    """What a step really keeps without a policy, which has to be within the planned range."""
    model, x = made(rank)
    step = policylang.trace_step(model, lambda model, x: model(x), x)
    (plan,) = policylang.check(policylang.parse("balance up to 2.0\nundecided -> save"), graph=facts_of(step)[0]).plans
    found = breakdown(plan)
    runs = Sized(step.gm)
    step.gm.forward = runs.run
    step(x)
    names = [plan.facts.names[row] for row, outcome in enumerate(found.outcomes) if outcome and outcome.on_device]
    planned = sum(plan.facts.bytes[plan.facts.index[name]] for name in names)
    saved = found.under.amounts.saved_bytes - planned + sum(runs.sizes[name] for name in names)
    least, most = found.saved_range
    assert least <= saved <= most
    return saved


def flat(rank: int, lines: list[str]) -> int:
    """The bytes that are saved without a policy."""
    model, x = made(rank)
    expected = gradients(model, x)
    for name in lines:
        step = policylang.trace_step(model, lambda model, x: model(x), x)
        step.apply(policylang.parse(LINES[name]))
        loss, found = step(x)
        assert same([loss, *found.values()], expected), name
        report = policylang.report(step.gm)
        assert report.audit.agrees
        assert not any("all_to_all" in each for each in report.recomputed.names)
        if "overlap" in LINES[name]:
            assert report.orders[0].planned.exposed < report.orders[0].traced.exposed
    return saved_bytes(rank)


def eager(rank: int) -> None:
    model, x = made(rank)
    expected = gradients(model, x)
    for name in IN_EAGER:
        ours = policylang.checkpoint_model(made(rank)[0], policylang.parse(LINES[name]))
        for _ in range(2):
            ours.zero_grad()
            assert same(gradients(ours, x), expected), name
        report = policylang.report(ours)
        assert report.audit.agrees
        assert not any("all_to_all" in each or "topk" in each for each in report.recomputed.names)


def compiled(rank: int) -> None:
    x = made(rank)[1]

    def run(backend: Any) -> list[Tensor]:
        torch._dynamo.reset()
        model = made(rank)[0]
        found = torch.compile(model, backend=backend)
        values = gradients(model, x, found)
        if backend != "aot_eager":
            report = policylang.report(found)
            assert report.audit.agrees
            assert not any("all_to_all" in each or "topk" in each for each in report.recomputed.names)
            (note,) = [each for each in report.notes if each.startswith("saved counts ")]
            assert "as on the rank that receives the most tokens" in note
        return values

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        expected = run("aot_eager")
        for name in IN_EAGER:
            assert same(run(backend_for(LINES[name])), expected), name


def every(rank: int) -> int:
    eager(rank)
    compiled(rank)
    return flat(rank, list(LINES))


@pytest.mark.slow
def test_experts_on_two_ranks_give_the_same_bits() -> None:
    first, second = run_ranks(flat, 2, ["both"])
    assert first > second  # most tokens go to the first rank


@pytest.mark.slow
def test_experts_on_two_ranks_give_the_same_bits_on_every_path() -> None:
    run_ranks(every, 2)
