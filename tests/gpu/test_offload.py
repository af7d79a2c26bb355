"""`offload` with real streams: the same bits, and the device free of what is on the host."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import policylang


def stack() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    return nn.Sequential(*layers).cuda(), torch.randn(16384, 1024, device="cuda")


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def run(text: str) -> tuple[Tensor, dict[str, Tensor], int, policylang.Report]:
    """Loss and gradients of the fifth step, and the most memory that one needs."""
    model, x = stack()
    step = policylang.trace_step(model, mean_square, x)
    step.apply(policylang.parse(text))
    for _ in range(4):
        step(x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss, gradients = step(x)
    torch.cuda.synchronize()
    return loss, gradients, torch.cuda.max_memory_allocated() - before, step.report


def test_the_same_bits_in_less_memory() -> None:
    loss, gradients, most, _ = run("undecided -> save")
    found, again, less, report = run("undecided -> save; offload addmm")
    assert torch.equal(loss, found)
    assert gradients.keys() == again.keys()
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)
    assert report.offloaded is not None
    assert report.offloaded.bytes >= 7 * 64 * 2**20
    in_flight = 3 * 64 * 2**20
    assert most - less >= report.offloaded.bytes - in_flight


def test_what_is_offloaded_lies_in_pinned_memory_of_the_host() -> None:
    value = torch.randn(64, 32, device="cuda").t()
    ticket = torch.ops.policylang.offload.default(value)
    host = torch.ops.policylang.wait.default(ticket, value, torch.device("cpu"))
    torch.cuda.synchronize()
    assert host.is_pinned()
    assert host.stride() == value.stride()
    assert torch.equal(host, value.cpu())
