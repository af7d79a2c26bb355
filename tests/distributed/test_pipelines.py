"""Every schedule of torch's pipelines under policies, on real ranks: the bits are those of the same stages without one.

Stages are uneven, and some have no blocks: a norm or a head alone. Only the last has a loss.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.distributed.pipelining import PipelineStage, schedules

import policylang
from tests.support.ranks import run_ranks

POLICIES = [
    "recompute everything in block",
    "recompute everything in block; save matmul in block",
    "undecided -> recompute; recompute every 2nd matmul per block; optional save gelu",
    "undecided -> save",
    "offload everything in block",
    "recompute everything in block; optional offload everything in block where crosses block",
]
IN_ONE = ["ScheduleGPipe", "Schedule1F1B"]
LOOPED = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS"]
SPLIT = ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"]
"""Their backward is split in two: for the inputs of a stage, and for its weights."""
WIDTH = 8
LAYERS = [2, 0, 1, 3, 1, 0, 2, 1]
"""Blocks by stage."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Stage(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Block() for _ in range(layers)]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def trained(rank: int, ranks: int, name: str, text: str, compiled: bool) -> list[Tensor | None]:
    """Two steps: the losses that this rank sees, and the gradients of its stages."""
    torch.compiler.reset()
    kind = getattr(schedules, name)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    count = ranks * (2 if several else 1)
    torch.manual_seed(0)
    chunks = [Stage(LAYERS[number]) for number in range(count)]
    in_a_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    own = [rank, count - 1 - rank] if in_a_v else list(range(rank, count, ranks))
    policy = policylang.parse(f"blocks layers.*; {text}")
    backend = policylang.backend(policy, inner="aot_eager") if text else "aot_eager"
    for number in own:
        if text:
            policylang.checkpoint_model(chunks[number], policy)
        for layer in chunks[number].layers if compiled else ():
            layer.compile(backend=backend)
    stages = [PipelineStage(chunks[number], number, count, torch.device("cpu")) for number in own]
    parts = 2 * ranks
    schedule = kind(stages if several else stages[0], parts, loss_fn=nn.functional.mse_loss)
    found: list[Tensor | None] = []
    for step in range(2):
        torch.manual_seed(100 + step)
        batch, target = torch.randn(2 * parts, WIDTH), torch.randn(2 * parts, WIDTH)
        losses: list[Tensor] = []
        given = (batch,) if 0 in own else ()
        schedule.step(*given, **({"target": target, "losses": losses} if count - 1 in own else {}))
        found += [each.detach() for each in losses]
        for number in own:
            found += [None if each.grad is None else each.grad.clone() for each in chunks[number].parameters()]
            chunks[number].zero_grad()
    return found


def check(rank: int, ranks: int, names: list[str], policies: list[str], compiled: bool) -> None:
    functorch.donated_buffer = False  # else compiled code refuses a backward in parts, with or without a policy
    for name in names:
        expected = trained(rank, ranks, name, "", compiled)
        assert any(each is not None and each.any() for each in expected)
        for text in policies:
            pairs = zip(trained(rank, ranks, name, text, compiled), expected, strict=True)
            assert all(one is other or torch.equal(one, other) for one, other in pairs), (name, text)


@pytest.mark.parametrize("names", [[*IN_ONE, "ScheduleInterleavedZeroBubble"], ["ScheduleDualPipeV"]])
def test_schedules_give_the_bits_of_no_policy(names: list[str]) -> None:
    run_ranks(check, 2, 2, names, POLICIES[1:2], False)


@pytest.mark.slow
@pytest.mark.parametrize("names", [IN_ONE, LOOPED, SPLIT], ids=["one stage a rank", "several", "split backward"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled blocks"])
def test_every_schedule_gives_the_bits_of_no_policy(names: list[str], compiled: bool) -> None:
    run_ranks(check, 2, 2, names, POLICIES, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled blocks"])
def test_every_schedule_gives_the_bits_of_no_policy_on_four_ranks(compiled: bool) -> None:
    run_ranks(check, 4, 4, [*IN_ONE, *LOOPED, *SPLIT], POLICIES[:2] if compiled else POLICIES[::2], compiled)
