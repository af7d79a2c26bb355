"""Reordered halves under Inductor on gloo ranks: losses and gradients are bitwise those of the traced order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import policylang
from tests.distributed.test_train_fsdp_tp import imported
from tests.support.meshed import WIDTH, Meshed
from tests.support.ranks import run_ranks
from tests.support.reordered import in_hand_order
from tests.support.sharded import sharded_stack
from tests.support.versions import needs_traced_meshes

PLAIN = "undecided -> save\n"
POLICY = f"{PLAIN}keep order of (all_gather or reduce_scatter)\n"
SCHEDULES = "prefetch all_gather 1 block ahead\ndelay reduce_scatter 1 block\n"
RECOMPUTES = "recompute everything\nkeep order of (all_gather or reduce_scatter)\n"


def stack() -> nn.Module:
    return sharded_stack(dist.get_world_size(), 3, width=16)


def meshed() -> nn.Module:
    return Meshed(init_device_mesh("cpu", (2,)), (0,), layers=3)


def trained(model: nn.Module, width: int, backend: Any, **options: Any) -> tuple[list[float], list[torch.Tensor]]:
    torch._dynamo.reset()
    run = model if backend is None else torch.compile(model, backend=backend, **options)
    losses = []
    for step in range(2):
        torch.manual_seed(step)
        loss = run(torch.randn(6, width)).square().mean()
        loss.backward()
        losses.append(loss.item())
    gradients = [parameter.grad for parameter in model.parameters()]
    return losses, [getattr(gradient, "_local_tensor", gradient) for gradient in gradients if gradient is not None]


def compared(rank: int) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, make, width in (("DTensors", stack, 16), ("gathers", meshed, WIDTH)):
        torch.manual_seed(0)
        plain = trained(make(), width, policylang.backend(policylang.parse(PLAIN)))
        eager = trained(make(), width, None)
        for text in (POLICY, RECOMPUTES):
            backend = in_hand_order(policylang.backend(policylang.parse(text)))
            losses, gradients = trained(make(), width, backend)
            report = policylang.report(backend)
            told[f"{name}, {text.split()[0]}"] = {
                "orders": [(each.status, each.starts, each.waits) for each in report.code],
                "beside": [len(each.kernels) for each in report.code],
                "like traced": losses == plain[0] and all(map(torch.equal, gradients, plain[1])),
                "like eager": all(
                    torch.allclose(*pair, rtol=1e-5, atol=1e-7) for pair in zip(gradients, eager[1], strict=True)
                ),
                "gradients": len(gradients),
            }
    return told


@pytest.mark.slow
def test_gradients_are_bitwise_those_of_the_traced_order() -> None:
    for told in run_ranks(compared, 2):
        assert len(told) == 4
        for name, case in told.items():
            assert case["like traced"], name
            assert case["like eager"], name
            assert case["gradients"] >= 3
            assert {status for status, *_ in case["orders"]} == {"as planned"}, name
            assert all(starts and starts == waits for _, starts, waits in case["orders"]), name
            assert min(case["beside"]) >= 1, name


LLAMA = f"""{PLAIN}
prefetch (all_gather where from parameter) 1 block ahead
delay reduce_scatter 1 block
"""


def scheduled(rank: int, policies: list[str]) -> dict[str, Any]:
    """The halves as a policy orders them, of a stack of DTensors and of a Llama under data and tensor parallelism."""
    told: dict[str, Any] = {}
    torch.manual_seed(0)
    plain = trained(stack(), 16, policylang.backend(policylang.parse(PLAIN)))
    backend = policylang.backend(policylang.parse(f"{PLAIN}{SCHEDULES}"))
    losses, gradients = trained(stack(), 16, backend)
    told["stack"] = losses == plain[0] and all(map(torch.equal, gradients, plain[1])), read(backend)
    example = imported()
    mesh = example.make_mesh("cpu", 2, 2)
    run = example.Run(steps=2, config=example.LlamaConfig(layers=2), how="compile", inner="inductor")
    curves, reports = [], []
    for policy in policies:
        torch._dynamo.reset()
        curve, report = example.train(evolve(run, policy=policy), mesh)
        curves.append(curve)
        reports.append(report)
    told["llama"] = curves[0] == curves[1], [(each.status, len(each.kernels)) for each in reports[1].code]
    return told


def read(backend: Any) -> list[tuple[str, int]]:
    return [(each.status, len(each.kernels)) for each in policylang.report(backend).code]


@pytest.mark.slow
@needs_traced_meshes
def test_what_a_policy_schedules_is_what_inductor_runs_on_four_ranks(tmp_path: Path) -> None:
    files = [tmp_path / "plain.apl", tmp_path / "llama.apl"]
    for file, text in zip(files, (PLAIN, LLAMA), strict=True):
        file.write_text(text)
    for told in run_ranks(scheduled, 4, [str(file) for file in files], timeout=500):
        for name, (alike, halves) in told.items():
            assert alike, name
            assert {status for status, _ in halves} == {"as planned"}, name
            assert min(beside for _, beside in halves) >= 1, (name, halves)
