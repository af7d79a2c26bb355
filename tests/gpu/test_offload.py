"""`offload` with real streams: the same bits, and the device free of what is on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import policylang

VALUE = 64 * 2**20
"""Bytes of what a layer of the stack returns."""


def stack() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*layers).cuda(), torch.randn(16384, 1024, device="cuda")


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Ran(NamedTuple):
    loss: Tensor
    gradients: dict[str, Tensor]
    """Of the fifth step."""
    most: int
    """Bytes that the fifth step needs at its worst."""
    report: policylang.Report


def traced(text: str) -> Ran:
    model, x = stack()
    step = policylang.trace_step(model, mean_square, x)
    step.apply(policylang.parse(text))
    loss, gradients, most = fifth(lambda: step(x))
    return Ran(loss, gradients, most, step.report)


def compiled(text: str, inner: Literal["aot_eager", "inductor"] = "aot_eager") -> Ran:
    torch._dynamo.reset()
    model, x = stack()
    backend = policylang.backend(policylang.parse(text), inner=inner)
    loss_of = torch.compile(mean_square, backend=backend)

    def step() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        return loss.detach(), {name: value.grad for name, value in model.named_parameters() if value.grad is not None}

    loss, gradients, most = fifth(step)
    return Ran(loss, gradients, most, policylang.report(backend))


def by_inductor(text: str) -> Ran:
    return compiled(text, "inductor")


def fifth(step: Callable[[], tuple[Tensor, dict[str, Tensor]]]) -> tuple[Tensor, dict[str, Tensor], int]:
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss, gradients = step()
    torch.cuda.synchronize()
    return loss, gradients, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("run", [traced, compiled])
def test_the_same_bits_in_less_memory(run: Callable[[str], Ran]) -> None:
    without, moving = run("undecided -> save"), run("undecided -> save; offload addmm")
    assert torch.equal(without.loss, moving.loss)
    assert without.gradients.keys() == moving.gradients.keys()
    assert all(torch.equal(without.gradients[name], moving.gradients[name]) for name in without.gradients)
    assert moving.report.offloaded.bytes >= 7 * VALUE
    in_flight = 3 * VALUE
    assert without.most - moving.most >= moving.report.offloaded.bytes - in_flight


def test_inductor_needs_less_memory_too() -> None:
    """It fuses what reads an offloaded value otherwise than what reads a saved one, so the last bits may differ."""
    without, moving = by_inductor("undecided -> save"), by_inductor("undecided -> save; offload addmm")
    torch.testing.assert_close(without.loss, moving.loss)
    for name, gradient in without.gradients.items():
        torch.testing.assert_close(gradient, moving.gradients[name])
    assert moving.report.offloaded.bytes >= 7 * VALUE
    assert without.most - moving.most >= moving.report.offloaded.bytes // 2


def test_what_is_offloaded_lies_in_pinned_memory_of_the_host() -> None:
    value = torch.randn(64, 32, device="cuda").t()
    ticket = torch.ops.policylang.offload.default(value)
    host = torch.ops.policylang.wait.default(ticket, value, torch.device("cpu"))
    torch.cuda.synchronize()
    assert host.is_pinned()
    assert host.stride() == value.stride()
    assert torch.equal(host, value.cpu())
