"""The measured bytes are those of the tensors, no more and no fewer."""

from __future__ import annotations

import torch
from torch import nn

from policylang.commands.small_llama import step_memory
from tests.support.keeping import KIB, kept_two

CPU = torch.device("cpu")


def test_saved_and_peak_to_the_byte():
    kept_two(lambda step, x: step_memory(step, [x], CPU))


def test_what_was_there_before_is_not_counted():
    layer = nn.Linear(64, 64, bias=False)
    batch = torch.ones(16, 64)
    seen = step_memory(lambda: layer(batch).sum(), [*layer.parameters(), batch], CPU)
    assert seen.saved == 0


def test_compiled_code_runs_compiled_while_it_is_measured():
    """Under a dispatch mode torch would fall back to eager; then the figures would be those of another program."""
    calls = []

    def backend(gm, inputs):
        def run(*arguments):
            calls.append(torch.compiler.is_compiling())
            return gm(*arguments)

        return run

    x = torch.ones(KIB, requires_grad=True)
    step = torch.compile(lambda value: (value * 2).sum(), backend=backend)
    step(x)
    step_memory(lambda: step(x), [x], CPU)
    assert len(calls) == 2
