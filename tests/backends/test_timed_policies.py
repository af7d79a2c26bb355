"""A policy that decides by time, on every path: the same bits as without it, and the plan of a snapshot is the plan
that is carried out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import policylang
from policylang.errors import PolicyMatchError
from policylang.language.syntax import Policy
from policylang.planning.capabilities import capabilities_for
from policylang.planning.planner import plan
from tests.support import eager, models
from tests.support.compiled import assert_same_as_without

DEVICE = """\
name = "a quiet machine"
[compute]
float32 = 1e9
[memory]
bandwidth = 1e9
"""
RULES = """\
device "quiet.toml"
blocks layers.*
recompute everything in block
save everything in block where time > 40 us
"""
"""The larger products of a tiny Llama take 65 us there, all others 33 us at most."""
EXPECTATIONS = """\
expect recomputed time <= 60%
expect recomputed time >= 10 us
expect recomputed time per block <= 1 ms
expect exposed <= 0 s
expect step time <= 1 s
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies")
    (folder / "quiet.toml").write_text(DEVICE, encoding="utf-8")
    (folder / "timed.apl").write_text(RULES + EXPECTATIONS, encoding="utf-8")
    return folder / "timed.apl"


def text_of(file: Path, text: str) -> Policy:
    other = file.with_name("other.apl")
    other.write_text(text, encoding="utf-8")
    return policylang.load(other)


def compiled_alike(example: Callable[[], models.Example], policy: Policy, folder: Path) -> policylang.Report:
    """With and without the policy; its report, whose plan is that of a snapshot."""
    backend = policylang.backend(policy, inner="aot_eager")
    assert_same_as_without(example, backend)
    report = policylang.report(backend)
    (snapshot,) = policylang.snapshot(backend, folder / "model.graph")
    facts = policylang.load_snapshot(snapshot)
    assert plan(policy, facts, capabilities_for(facts.kind)).digest == report.digest
    return report


def test_a_compiled_model(file: Path, tmp_path: Path) -> None:
    """What is left to the partitioner is settled before the expectations are."""
    text = (
        'device "quiet.toml"\nsave everything where time > 1 us\nexpect recomputed time <= 1 s\nexpect step time <= 1 s'
    )
    report = compiled_alike(models.mlp, text_of(file, text), tmp_path)
    assert [each.status for each in report.expectations] == ["held", "held"]
    assert report.rules[0].decided > 0


@pytest.mark.slow
def test_a_compiled_llama(file: Path, tmp_path: Path) -> None:
    report = compiled_alike(models.llama, policylang.load(file), tmp_path)
    assert [each.status for each in report.expectations] == ["held"] * 5
    assert report.rules[1].matched == report.rules[1].decided == 6


def test_blocks_in_eager(file: Path) -> None:
    """Of the whole step one block knows nothing: that is said, and what is said per block is checked."""
    example = models.llama()
    run = eager.backward_of(eager.loss_of(example))
    expected = eager.train(eager.twin(example.module), run)
    model = policylang.checkpoint_model(eager.twin(example.module), policylang.load(file))
    assert eager.differences(expected, eager.train(model, run)) == []
    report = policylang.report(model)
    assert {each.text: each.status for each in report.expectations} == {
        text: "held" if "per block" in text else "deferred" for text in EXPECTATIONS.splitlines()
    }
    assert sum("APL391" in each for each in report.warnings) >= 4
    assert report.rules[1].decided == 6
    failing = policylang.checkpoint_model(
        eager.twin(example.module), text_of(file, RULES + "expect recomputed time per block <= 1 us")
    )
    with pytest.raises(PolicyMatchError, match=r"us in block 0"):
        run(failing, 0)


def test_a_traced_step(file: Path) -> None:
    example = models.llama()

    def loss(model: nn.Module, *batch: Tensor) -> Tensor:
        return example.loss_fn(model(*batch))

    step = policylang.trace_step(example.module, loss, *example.inputs)
    value, gradients = step(*example.inputs)
    report = step.apply(policylang.load(file)).report
    assert [each.status for each in report.expectations] == ["held"] * 5
    assert report.recomputed.names
    again, others = step(*example.inputs)
    assert torch.equal(value, again)
    assert [name for name, gradient in gradients.items() if not torch.equal(gradient, others[name])] == []
