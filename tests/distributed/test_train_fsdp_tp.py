"""The example for a mesh of FSDP and tensor parallelism, on four ranks beside one process."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from tests.support.ranks import run_ranks
from tests.support.versions import needs_traced_meshes

EXAMPLES = Path(__file__).parents[2] / "examples"
RANKS, TP = 4, 2
STEPS = 3


@pytest.fixture(scope="module")
def example() -> Any:
    return imported()


def imported() -> Any:
    """The script as a module; it imports its neighbour as a script does."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import train_fsdp_tp

    return train_fsdp_tp


def runs() -> dict[str, Any]:
    example = imported()
    two = example.Run(steps=STEPS, config=example.LlamaConfig(layers=2))
    one = evolve(two, config=example.LlamaConfig(layers=1))
    return {
        "tensor parallel": two,
        "cut over all": evolve(one, layout="fsdp"),
        "bfloat16": evolve(one, dtype=torch.bfloat16),
        "compiled": evolve(one, how="compile"),
    }


def trained(rank: int, names: tuple[str, ...]) -> dict[str, dict[str, list[float]]]:
    """The loss curves of these runs with their policy, and of traced runs without."""
    example = imported()
    mesh = example.make_mesh("cpu", RANKS // TP, TP)
    curves: dict[str, dict[str, list[float]]] = {}
    for name in names:
        run = runs()[name]
        losses, report = example.train(run, mesh)
        assert report.audit.agrees
        curves[name] = {"with": losses}
        if run.how == "trace":
            curves[name]["without"], _ = example.train(evolve(run, policy=None), mesh)
    return curves


@needs_traced_meshes
@pytest.mark.parametrize(
    "names", [("cut over all", "compiled"), pytest.param(("tensor parallel", "bfloat16"), marks=pytest.mark.slow)]
)
def test_the_policy_changes_no_bit_of_the_loss_and_the_curve_is_that_of_one_process(
    names: tuple[str, ...], example: Any
) -> None:
    """Both of one run on all ranks. The curve is that of one process up to the order in which sums are taken."""
    first, *others = run_ranks(trained, RANKS, names)
    assert all(other == first for other in others), "every rank knows the loss of all"
    for name in set(names) - {"compiled"}:
        assert first[name]["with"] == first[name]["without"], name
    for name in set(names) - {"bfloat16"}:
        alone = example.train_alone(runs()[name])
        assert alone[-1] < alone[0]
        assert first[name]["with"] == pytest.approx(alone, rel=1e-5), name


def said_by_main(rank: int) -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        imported().main(["--steps", "2", "--layers", "1", "--check"])
    return output.getvalue()


@needs_traced_meshes
def test_the_script_as_torchrun_starts_it() -> None:
    first, *others = run_ranks(said_by_main, RANKS, group=False)
    assert not any(others)
    assert "policy fsdp_tp: " in first
    assert "every (all_gather where from parameter) recomputed: held" in first
    assert "the graphs that came out do what the plan says" in first
    assert first.endswith("the curves agree within 0.0001\n")
