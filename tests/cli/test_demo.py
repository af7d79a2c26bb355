"""`policylang demo`: what it proves, and how it fails."""

from __future__ import annotations

import json
from functools import cache

import pytest
from attrs import evolve

from policylang.commands import agree as command
from policylang.commands.small_llama import Settings

SMALL = {"layers": 1, "hidden": 32, "heads": 2, "vocabulary": 64, "batch": 2, "sequence": 16}


@pytest.fixture
def small(monkeypatch):
    """The demo on a model that trains in a second."""
    import policylang.commands.small_llama as training

    monkeypatch.setattr(training, "Settings", lambda **chosen: Settings(**SMALL, **chosen))


@pytest.fixture(scope="module")
def compare():
    """One comparison for each set of arguments, however many ways it is printed in."""
    return cache(command._compare)


@pytest.fixture
def compared_once(monkeypatch, small, compare):
    monkeypatch.setattr(command, "_compare", compare)


@pytest.mark.usefixtures("compared_once")
def test_the_demo_proves_equality_and_a_saving(policylang):
    outcome = policylang("demo", "--steps", "2", "--json")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    assert result["bitwise_equal"] is True
    assert result["report"]["audit"] == {"agrees": True, "differences": []}
    assert 0 < result["with"]["saved_bytes"] < result["without"]["saved_bytes"]
    assert result["with"]["losses"] == result["without"]["losses"]
    assert result["with"]["losses"][1] < result["with"]["losses"][0]


@pytest.mark.usefixtures("compared_once")
def test_the_table_names_every_rule_and_both_measurements(policylang):
    outcome = policylang("demo", "--steps", "2")
    assert outcome.code == 0, outcome.err
    assert "recompute everything in block" in outcome.out
    assert "without (min-cut)" in outcome.out
    assert "kept for the backward" in outcome.out
    assert "are bitwise equal" in outcome.out


def test_a_difference_fails_the_demo(policylang, small, compare, monkeypatch):
    """Not a formality: another gradient of one parameter in one step has to be seen."""

    def tampered(*arguments):
        found = compare(*arguments)
        last = found.with_policy.steps[1]
        last = evolve(last, gradients={**last.gradients, "model.lm_head.weight": "0" * 64})
        return evolve(found, with_policy=evolve(found.with_policy, steps=(found.with_policy.steps[0], last)))

    monkeypatch.setattr(command, "_compare", tampered)
    outcome = policylang("demo", "--steps", "2")
    assert outcome.code == 1
    assert "NOT bitwise equal:\n  step 2: the gradient of model.lm_head.weight" in outcome.out


def test_a_policy_with_a_mistake(policylang, small, tmp_path):
    path = tmp_path / "mistake.apl"
    path.write_text("save attenton\n")
    outcome = policylang("demo", "--policy", str(path))
    assert outcome.code == 1
    assert "`attenton`" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_missing_package_is_named_with_the_mend(policylang, monkeypatch):
    find = command.find_spec
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "transformers" else find(name))
    outcome = policylang("demo")
    assert outcome == (2, "", "policylang demo: the demo needs `transformers`\nhelp: pip install transformers\n")


@pytest.mark.parametrize("steps", ["1", "0", "-3", "many"])
def test_too_few_steps(policylang, steps):
    outcome = policylang("demo", f"--steps={steps}")
    assert outcome.code == 2
    assert f"`{steps}` is not a number of steps" in outcome.err
