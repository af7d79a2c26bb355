"""``chunk loss`` on a model that several ranks share: hidden states gathered before the head, and a sharded head."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional as F

import policylang
from policylang.errors import PolicyMatchError
from tests.support.ranks import run_ranks

CHUNK = policylang.parse("chunk loss into 3")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.lm_head = nn.Linear(8, 8).double(), nn.Linear(8, 40, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        return self.stem(x).tanh()


class OfParts(Model):
    """Each rank has some tokens, and all of them at the head."""

    def hidden(self, x: Tensor) -> Tensor:
        return all_gather_tensor_autograd(super().hidden(x), 0, dist.group.WORLD)


def loss_of(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


def gathered_rows(rank: int) -> list[str]:
    generator = torch.Generator().manual_seed(1)
    x, labels = torch.randn(12, 8, generator=generator).double(), torch.randint(40, (12,), generator=generator)
    whole, cut, mine = OfParts(), OfParts(), x[rank * 6 :][:6]
    loss_of(whole, mine, labels).backward()
    compiled = torch.compile(loss_of, backend=policylang.backend(CHUNK, inner="aot_eager"))
    compiled(cut, mine, labels).backward()
    for one, other in zip(whole.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    return list(policylang.report(compiled).rewrites[0].notes)


def sharded_vocabulary(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2,))
    columns = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    model = parallelize_module(copy.deepcopy(Model()), mesh, {"lm_head": columns})
    compiled = torch.compile(loss_of, backend=policylang.backend(CHUNK, inner="aot_eager"))
    try:
        with loss_parallel():
            compiled(model, torch.randn(12, 8).double(), torch.randint(40, (12,))).backward()
    except PolicyMatchError as error:
        return str(error)
    return ""


def test_rows_that_are_gathered_before_the_head_are_cut() -> None:
    for notes in run_ranks(gathered_rows, 2):
        assert any("3 slices of 4 of 12 rows" in note and "made in the forward" in note for note in notes)


def test_a_head_sharded_over_the_vocabulary_is_refused_with_its_collective() -> None:
    for said in run_ranks(sharded_vocabulary, 2):
        assert "`chunk loss into 3` cuts nothing: communicates: all_reduce" in said
