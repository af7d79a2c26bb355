"""What the demo compares, and that its bytes are those of the tensors."""

import pytest
import torch
from attrs import evolve
from torch import nn

from policylang.commands.small_llama import Settings, differences, step_memory, train
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


SMALL = Settings(steps=3, layers=1, hidden=32, heads=2, vocabulary=64, batch=1, sequence=16)


@pytest.fixture(scope="module")
def run():
    return train("eager", SMALL, "eager", lambda: None)


def test_a_run_repeats_to_the_bit_and_learns(run):
    again = train("again", SMALL, "eager", lambda: None)
    assert differences(run, again) == []
    losses = [float.fromhex(step.loss) for step in run.steps]
    assert losses[2] < losses[1] < losses[0]


def test_every_parameter_has_a_gradient_in_every_step(run):
    names = run.steps[0].gradients.keys()
    assert "model.model.layers.0.self_attn.q_proj.weight" in names
    assert all(step.gradients.keys() == names for step in run.steps)
    assert len({step.gradients["model.lm_head.weight"] for step in run.steps}) == 3


def test_another_seed_differs_in_loss_and_gradients(run):
    found = differences(run, train("other", evolve(SMALL, seed=1), "eager", lambda: None))
    assert found[0].startswith("step 1: the loss, ")
    assert "step 1: the gradient of model.lm_head.weight" in found


def test_a_gradient_that_is_missing_is_a_difference(run):
    gradients = dict(run.steps[1].gradients)
    del gradients["model.model.norm.weight"]
    steps = (run.steps[0], evolve(run.steps[1], gradients=gradients), run.steps[2])
    assert differences(run, evolve(run, steps=steps)) == ["step 2: the gradient of model.model.norm.weight"]
    assert differences(evolve(run, steps=steps), run) == ["step 2: the gradient of model.model.norm.weight"]
