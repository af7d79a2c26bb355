"""The example with the Trainer of Hugging Face: the loss curve is that of the same training without a policy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="the Trainer of transformers needs it")

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS = 4


@pytest.fixture(scope="module")
def example() -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import hf_trainer

    return hf_trainer


def test_the_loss_curve_is_the_same_with_and_without(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    without = example.main("none", STEPS)
    assert "policy" not in capsys.readouterr().out
    with_policy = example.main(example.POLICY, STEPS)
    assert len(without) == STEPS
    assert without[-1] < without[0]
    assert with_policy == without
    printed = capsys.readouterr().out
    assert "policy mine: 280 forward values, 4 blocks" in printed
    assert "audit       the changed graphs do what was planned" in printed


def test_a_bundled_policy_serves_as_well(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    losses = example.main("llama3_sac", 1)
    assert losses == example.main("none", 1)
    assert "policy llama3_sac" in capsys.readouterr().out
