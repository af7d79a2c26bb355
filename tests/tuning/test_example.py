"""The example that goes from a snapshot over a tuned policy to a training."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import policylang

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example() -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import tune_llama

    return tune_llama


@pytest.mark.slow
def test_it_trains_within_the_budget(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned, losses, measured = example.main(folder=tmp_path)
    assert losses[-1] < losses[0]
    assert tuned.recompute_seconds > 0
    assert tuned.peak <= tuned.tuned.budget.limit
    assert measured == pytest.approx(tuned.graph_peak, rel=0.05)
    assert "MiB measured" in capsys.readouterr().out
    found = policylang.check(tmp_path / "tuned.apl", graph=tmp_path / "tune_llama.graph")
    assert [each.status for _, each in found.expectations] == ["held"]
