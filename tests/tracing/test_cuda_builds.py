"""What is lent to a torch that finds no GPU: the same to a build with CUDA, whose guard and hooks ask the driver, as to
the CPU wheel. To be run with both; what is specific to one is simulated on the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import policylang
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.torch_compat.absent_cuda import cuda_hooks
from policylang.torch_compat.tracing import functionalized
from policylang.tracing.capture import _kernels_of
from policylang.tracing.target_device import TargetDevice, target_device, tracing_for

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no stand-in")

CPP = "policylang.torch_compat.absent_cuda.torch"


def mean(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).float().mean()


def traced(model: nn.Module, x: Tensor, loss: Callable[..., Tensor] = mean) -> Facts:
    return collect(policylang.trace_step(model, loss, x, device="cuda").gm)


def test_a_torch_that_lacks_what_it_takes_is_refused_before_it_can_abort(monkeypatch, tmp_path):
    monkeypatch.setattr(f"{CPP}.__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(policylang.PolicyGraphError, match=r"APL613.*has no library libc10"):
        traced(nn.Linear(4, 4), torch.zeros(2, 4))


def test_a_build_with_cuda_that_hides_its_hooks_is_refused_too(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    for found in (Path(torch.__file__).parent / "lib").glob("libc10.*"):
        (tmp_path / "lib" / found.name).symlink_to(found)
    monkeypatch.setattr(f"{CPP}.backends.cuda.is_built", lambda: True)
    monkeypatch.setattr(f"{CPP}.__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(policylang.PolicyGraphError, match=r"APL613.*has no library libtorch_cpu"):
        traced(nn.Linear(4, 4), torch.zeros(2, 4))


def test_a_build_with_cuda_is_lent_the_hooks_of_one_without(monkeypatch):
    hooks, without_cuda = cuda_hooks()
    before, seen = hooks.value, []
    assert (before == without_cuda) is not torch.backends.cuda.is_built()
    monkeypatch.setattr(f"{CPP}.backends.cuda.is_built", lambda: True)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(hooks.value)
        return mean(model, x)

    traced(nn.Linear(4, 4), torch.zeros(2, 4), loss=loss)
    assert (seen, hooks.value) == ([without_cuda], before)


def test_what_a_model_asks_of_the_gpu_that_does_not_change_the_step():
    class Asks(nn.LSTM):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            torch.cuda.set_device(x.device)
            self.flatten_parameters()
            with torch.random.fork_rng(), torch.cuda.device(x.device):
                torch.cuda.manual_seed(torch.cuda.get_rng_state().numel())
                assert torch.backends.cudnn.version() >= 90_000
            return super().forward(x)[0]  # type: ignore[no-any-return]

    here = traced(nn.LSTM(4, 4), torch.zeros(2, 4), loss=lambda model, x: mean(lambda x: model(x)[0], x))
    there = traced(Asks(4, 4), torch.zeros(2, 4))
    assert there.targets == here.targets
    with pytest.raises(policylang.PolicyGraphError, match=r"APL363.*asks torch.cuda for what only a GPU has"):
        traced(nn.Linear(4, 4), torch.zeros(2, 4), loss=lambda model, x: mean(model, x) * torch.cuda.mem_get_info()[0])


def test_a_machine_with_a_gpu_is_lent_nothing(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("policylang.tracing.capture.absent_cuda", lambda *_: pytest.fail("something is lent"))
    monkeypatch.setattr("policylang.tracing.target_device.autocast_to", lambda *_: pytest.fail("something is lent"))
    device = target_device("cuda")
    assert device == TargetDevice("cuda")
    with tracing_for(device), _kernels_of(device) as functional:
        assert type(functional) is type(functionalized())
