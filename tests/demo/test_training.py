"""What the demo compares: runs that repeat exactly, and differences that are seen."""

from __future__ import annotations

import pytest
from attrs import evolve

from policylang.commands.small_llama import Settings, differences, train

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
