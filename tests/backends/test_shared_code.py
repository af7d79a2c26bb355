"""Blocks that share what is compiled of them: a report of their model speaks of all of them, to the byte."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import policylang
from policylang.audit.report import Report
from policylang.commands.small_llama import step_memory
from tests.support.compiled import fresh_dynamo

POLICY = policylang.parse("recompute everything in block; save matmul in block")
BLOCKS, WIDTH, ROWS = 4, 16, 8
STATE = ROWS * WIDTH * 4
"""Bytes of what one block hands to the next, which the next one keeps as its input."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x.tanh()).sin())


class Stack(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def checkpointed(model: Stack) -> Callable[..., object]:
    policylang.checkpoint_model(model, POLICY)
    return policylang.backend(POLICY, inner="aot_eager")


def in_place(model: Stack) -> None:
    backend = checkpointed(model)
    for layer in model.layers:
        layer.compile(backend=backend)


def replaced(model: Stack) -> None:
    backend = checkpointed(model)
    for name, layer in list(model.layers.named_children()):
        model.layers.register_module(name, torch.compile(layer, backend=backend))


def beside_eager(model: Stack) -> None:
    backend = checkpointed(model)
    for layer in model.layers[1:3]:
        layer.compile(backend=backend)


def without_checkpoints(model: Stack) -> None:
    backend = policylang.backend(POLICY, inner="aot_eager", root="layers.0")
    for layer in model.layers:
        layer.compile(backend=backend)


def a_backend_a_half(model: Stack) -> None:
    for half in (model.layers[:2], model.layers[2:]):
        backend = policylang.backend(POLICY, inner="aot_eager", root="layers.0")
        for layer in half:
            layer.compile(backend=backend)


def step(model: nn.Module) -> tuple[Report, int]:
    """The report after a step, and the bytes that a step keeps from its forward to its backward."""
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    model(x).sum().backward()
    resident = [*model.parameters(), x, *(each.grad for each in (*model.parameters(), x))]
    saved = step_memory(lambda: model(x).sum(), resident, torch.device("cpu")).saved
    return policylang.report(model), saved


WAYS = [in_place, replaced, beside_eager, without_checkpoints, a_backend_a_half]


@pytest.mark.parametrize("compiled", WAYS)
def test_the_report_holds_what_a_step_of_the_model_keeps(compiled: Callable[[Stack], None]) -> None:
    with fresh_dynamo():
        model = Stack()
        compiled(model)
        report, kept = step(model)
    assert report.blocks == BLOCKS
    assert report.saved.bytes == kept - (BLOCKS - 1) * STATE  # each block's input is none of its values
    assert report.audit.agrees


def test_each_model_on_a_backend_counts_its_own_blocks_and_the_backend_all_that_live(tmp_path: Path) -> None:
    with fresh_dynamo():
        backend = policylang.backend(POLICY, inner="aot_eager", root="layers.0")
        small, large = Stack(2), Stack(5)
        for model in (small, large):
            for layer in model.layers:
                layer.compile(backend=backend)
            step(model)
        assert len(backend.graphs) == 1
        assert [policylang.report(each).blocks for each in (small, large, backend)] == [2, 5, 7]
        assert policylang.report(large.layers[0]).blocks == 1
        assert len(policylang.snapshot(large, tmp_path / "one.graph")) == 1  # a graph is a file, whoever runs it
        del model, layer, large
        gc.collect()
        assert policylang.report(backend).blocks == 2


def test_blocks_that_a_later_backend_compiles_count_for_that_one() -> None:
    with fresh_dynamo():
        model = Stack()
        without_checkpoints(model)
        step(model)
        other = policylang.backend("save_all", inner="aot_eager")
        for layer in model.layers[2:]:
            layer.compile(backend=other)
        report, _ = step(model)
    assert sorted(each.policy for each in report.graphs) == ["policy", "policy", "save_all", "save_all"]


def test_a_model_compiled_whole_counts_once() -> None:
    with fresh_dynamo():
        model = Stack()
        compiled = torch.compile(model, backend=policylang.backend(POLICY, inner="aot_eager"))
        step(compiled)
        assert [policylang.report(each).blocks for each in (model, compiled)] == [BLOCKS, BLOCKS]
        assert not policylang.report(compiled).graphs
