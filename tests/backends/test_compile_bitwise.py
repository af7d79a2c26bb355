"""Steps under a policy are those without one, to the bit, on the same inner compiler.

The models of the zoo under AOTAutograd are in ``tests/policies/test_bundled.py`` and ``test_partition_models.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import policylang
from policylang.backends.torch_compile.backend import PolicyBackend
from tests.support.compiled import WITHOUT, assert_bitwise_equal, train
from tests.support.models import Example, llama, mlp

SAVE_PRODUCTS = "optional recompute everything; optional save matmul or attention or aten.convolution"


def under(backend: PolicyBackend) -> Callable[[nn.Module], Callable[..., Any]]:
    return lambda model: torch.compile(model, backend=backend)


def test_a_batch_norm_may_run_twice_before_the_backward() -> None:
    """The second forward writes the running statistics, which the recomputation of the first is given and not read."""

    def trained(backend: Any) -> list[Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.ReLU())
        x = torch.randn(4, 8)
        step = torch.compile(model, backend=backend)
        (step(x).sum() + step(2 * x).square().sum()).backward()
        return [*(each.grad for each in model.parameters()), *model.buffers()]

    backend = policylang.backend(policylang.parse("recompute everything"), inner="aot_eager")
    assert all(map(torch.equal, trained(WITHOUT), trained(backend)))


@pytest.mark.slow
@pytest.mark.parametrize("model", [mlp, pytest.param(partial(llama, layers=1), id="llama")])
def test_a_whole_training_step_of_inductor(model: Callable[[], Example]) -> None:
    """Inductor fuses a recomputed operator into other kernels than a saved one, and may round otherwise there; for the
    float32 kernels of these models it does not. Among the fast ones, `test_offload_joint.py` compares an mlp's bits."""
    backend = policylang.backend(policylang.parse(SAVE_PRODUCTS))
    without = train(model(), torch.compile)
    assert_bitwise_equal(train(model(), under(backend)), without)
    assert policylang.report(backend).audit.agrees
