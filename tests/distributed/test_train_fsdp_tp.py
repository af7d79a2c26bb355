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
from torch import Tensor

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
@pytest.mark.slow
@pytest.mark.parametrize("names", [("cut over all",), ("compiled", "tensor parallel", "bfloat16")])
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


ORDERED = {
    "traced": {"order": "fsdp_overlap"},
    "traced, by times": {"order": "fsdp_tp_overlap", "device": "h100-sxm"},
    "cut over all": {"order": "fsdp_overlap", "layout": "fsdp"},
    "compiled": {"order": "fsdp_overlap", "how": "compile"},
}


def stepped(run: Any, mesh: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    """The loss of one step, this rank's gradients, and the report."""
    example = imported()
    model = example.shard(example.new_model(run), mesh, tensor_parallel=run.layout == "tp", dtype=run.dtype)
    inputs, labels = (example.share_of(each, mesh, run.layout) for each in example.batch_of(run, 0))
    traced = (run, model, mesh, inputs, labels)
    step, report = example.traced_step(*traced) if run.how == "trace" else example.compiled_step(run, model)
    loss = step(inputs, labels)
    return loss, {name: each.grad.to_local() for name, each in model.named_parameters()}, report()


def in_order(rank: int) -> dict[str, tuple[list[str], list[int], bool]]:
    """Of each run: the gradients that are not the same to the bit without the order, how many collectives there are as
    traced and as planned, and whether the audit agrees."""
    example = imported()
    mesh = example.make_mesh("cpu", RANKS // TP, TP)
    found = {}
    for name, options in ORDERED.items():
        run = example.Run(config=example.LlamaConfig(layers=3), **options)
        loss, gradients, _ = stepped(evolve(run, order=None, device=None), mesh)
        ordered, others, report = stepped(run, mesh)
        wrong = [each for each in gradients if not torch.equal(gradients[each], others[each])]
        wrong += [] if torch.equal(loss, ordered) else ["the loss"]
        step = report.orders[0]
        found[name] = (wrong, [step.traced.collectives, step.planned.collectives], report.audit.agrees)
    return found


@needs_traced_meshes
@pytest.mark.slow
def test_the_bundled_orders_change_no_bit_of_the_loss_and_of_the_gradients() -> None:
    """Of two ranks in a group a sum is the same in either order, so that bucketed scatters are bitwise too."""
    for found in run_ranks(in_order, RANKS, timeout=500):
        for name, (wrong, (before, after), agrees) in found.items():
            assert wrong == [], name
            assert after < before / 2, name
            assert agrees, name


def said_by_main(rank: int) -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        imported().main(["--steps", "2", "--layers", "1", "--check"])
    return output.getvalue()


@needs_traced_meshes
def test_the_script_as_torchrun_starts_it() -> None:
    """On four ranks and on one, as `--check` compares them."""
    first, *others = run_ranks(said_by_main, RANKS, group=False)
    assert not any(others)
    assert "policy fsdp_tp: " in first
    assert "every (all_gather where from parameter) recomputed: held" in first
    assert "the changed graphs do what was planned" in first
    assert first.endswith("the curves agree within 0.0001\n")
