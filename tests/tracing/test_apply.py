"""A policy on a traced step: the same numbers, the buffers as before, and a report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import policylang
from policylang import trace_step
from tests.support.models import ZOO
from tests.tracing.steps import calls, loss_of, mean_square, net, trace, twin


@pytest.mark.parametrize("name", ["llama", "gpt2", "resnet", "counter", "flex"])
def test_two_training_steps_are_bitwise_the_same_with_and_without_a_policy(name: str) -> None:
    example = ZOO[name]()
    plain_model, model = example.module, twin(example.module)
    plain = trace(example)
    step = trace_step(model, loss_of(example), *example.inputs)
    assert step.apply(policylang.parse("recompute everything; optional save matmul")) is step
    assert step.report.recomputed
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (plain_model, model)]
    for seed in (1, 2):
        for each, traced, optimizer in zip((plain_model, model), (plain, step), optimizers, strict=True):
            torch.manual_seed(seed)
            _, gradients = traced(*example.inputs)
            for parameter_name, parameter in each.named_parameters():
                parameter.grad = gradients.get(parameter_name)
            optimizer.step()
    for (key, value), expected in zip(model.state_dict().items(), plain_model.state_dict().values(), strict=True):
        assert torch.equal(value, expected), key


def test_a_policy_file_and_its_report(tmp_path: Path) -> None:
    path = tmp_path / "second.apl"
    path.write_text("policy second\nundecided -> save\nrecompute relu\n")
    model, x = net()
    step = trace_step(model, mean_square, x)
    loss, _ = step(x)
    step.apply(str(path))
    assert torch.equal(step(x)[0], loss)
    assert len(calls(step, torch.ops.aten.relu.default)) == 2
    assert step.report.recomputed.names == ("relu",)
    assert str(policylang.report(step)) == str(step.report)
    assert f"{path.name}:3" in str(step.report)


def test_a_policy_that_does_not_fit_leaves_the_step_as_it_was() -> None:
    model, x = net()
    step = trace_step(model, mean_square, x)
    nodes = [node.name for node in step.gm.graph.nodes]
    with pytest.raises(policylang.PolicyMatchError):
        step.apply(policylang.parse("save attention"))
    assert [node.name for node in step.gm.graph.nodes] == nodes
    step(x)


def test_blocks_and_module_paths_are_those_of_the_model() -> None:
    step = trace(ZOO["llama"]())
    step.apply(policylang.parse("blocks layers.*; recompute everything in block; expect exactly 7 mm per block"))
    assert step.report.blocks == 2
    assert any(name.startswith("mm") for name in step.report.recomputed.names)


def test_a_policy_on_a_step_with_its_optimizer() -> None:
    model, x = net()
    other = twin(model)
    steps = []
    for each in (model, other):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        mean_square(each, x).backward()
        optimizer.step()
        steps.append(trace_step(each, mean_square, x, optimizer=optimizer))
    steps[0].apply(policylang.parse("recompute everything"))
    for step in steps:
        step(x)
        step(x)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
