"""Torch's pipeline schedules around blocks under a policy: the bits are those of the same schedule without one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import policylang
from tests.support.ranks import run_ranks

POLICIES = [
    "recompute everything in block",
    "recompute everything in block; save matmul in block",
    "undecided -> recompute; recompute every 2nd matmul per block; optional save gelu",
    "undecided -> save",
    "offload everything in block",
]
WIDTH, RANKS = 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Chunk(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Block() for _ in range(layers)]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def trained(rank: int, name: str, text: str) -> list[Tensor | None]:
    """Two steps of 4 micro-batches: the losses that this rank sees, and the gradients of its stages."""
    kind = getattr(schedules, name)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    count = RANKS * (2 if several else 1)
    torch.manual_seed(0)
    chunks = [Chunk(0 if several and number == count - 1 else 2) for number in range(count)]
    own = [rank, count - 1 - rank] if name == "ScheduleZBVZeroBubble" else list(range(rank, count, RANKS))
    if text:
        for number in own:
            policylang.checkpoint_model(chunks[number], policylang.parse(f"blocks layers.*; {text}"))
    stages = [PipelineStage(chunks[number], number, count, torch.device("cpu")) for number in own]
    schedule = kind(stages if several else stages[0], 4, loss_fn=nn.functional.mse_loss)
    found: list[Tensor | None] = []
    for step in range(2):
        torch.manual_seed(100 + step)
        batch, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        losses: list[Tensor] = []
        given = (batch,) if 0 in own else ()
        schedule.step(*given, **({"target": target, "losses": losses} if count - 1 in own else {}))
        found += [each.detach() for each in losses]
        for number in own:
            found += [None if each.grad is None else each.grad.clone() for each in chunks[number].parameters()]
            chunks[number].zero_grad()
    return found


def check_schedules(rank: int, names: list[str]) -> None:
    for name in names:
        for text in POLICIES:
            pairs = zip(trained(rank, name, text), trained(rank, name, ""), strict=True)
            assert all(one is other or torch.equal(one, other) for one, other in pairs), (name, text)


@pytest.mark.slow
def test_schedules_give_the_bits_of_no_policy() -> None:
    run_ranks(
        check_schedules,
        RANKS,
        ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"],
    )
