"""The comparison with PyTorch's own ways: its results file is what a run gives, and what the page says of it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import compared
from benchmarks.training_step import MIB, StepModel

RESULTS = json.loads((Path(compared.__file__).parent / "results" / "compared.json").read_text(encoding="utf-8"))
COUNTED = ("saved MiB", "peak MiB", "GFLOP")
pinned = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the results are of torch 2.13")


def test_the_gradients_that_a_compiled_backward_returns() -> None:
    with torch.device("meta"):
        assert round(sum(parameter.nbytes for parameter in StepModel(compared.SHAPE).parameters()) / MIB) == 36


def test_same_decisions_come_to_no_more_bytes_and_flops() -> None:
    """Of the peak, half a percent more at most."""
    for keeps in compared.POLICIES:
        for how in (compared.EAGER, compared.COMPILED):
            rows = [row for row in RESULTS["rows"] if (row["keeps"], row["how"]) == (keeps, how)]
            ours = [row for row in rows if row["contender"] == "policylang"]
            for row in rows:
                assert all(mine["peak MiB"] <= row["peak MiB"] * 1.005 for mine in ours)
                assert all(mine["GFLOP"] <= row["GFLOP"] for mine in ours)


def test_gradients_without_a_compiler_and_under_a_policy_are_equal_to_the_bit() -> None:
    exact = [row for row in RESULTS["rows"] if row["how"] == compared.EAGER or row["contender"] == "policylang"]
    assert len(exact) > 8
    assert {row["gradients"] for row in exact} == {0.0}


@pinned
def test_dropout_is_what_the_results_say() -> None:
    recorded = {row["contender"]: row["gradients differ by"] for row in RESULTS["dropout"]}
    found = {row["contender"]: row["gradients differ by"] for row in compared.measure_dropout()}
    assert found.items() <= recorded.items()
    assert len(found) >= 5


@pinned
@pytest.mark.slow
def test_the_results_are_those_of_a_run() -> None:
    found = {(row["contender"], row["how"], row["keeps"]): row for row in compared.measure_all()}
    for row in RESULTS["rows"]:
        again = found.get((row["contender"], row["how"], row["keeps"]))
        if again is None:  # the packages of some are not there
            assert find_spec("torch_remat") is None or find_spec("torchtitan") is None
            continue
        assert {key: again[key] for key in COUNTED} == pytest.approx({key: row[key] for key in COUNTED}, rel=1e-3)
