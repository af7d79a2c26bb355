"""Sizes that come from data, as the rows that are chosen for an expert: by what they count, and where that is said."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import policylang
from policylang.api.snapshot import facts_of
from policylang.commands.small_llama import step_memory
from policylang.graph.facts import Facts
from policylang.planning.inspection.breakdown import breakdown
from tests.support.versions import needs_traced_generators

TOKENS, WIDTH = 96, 16


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh()) for _ in range(2))
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        choice, total = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(-1)
            total = total.index_add(0, rows, self.down(expert(x[rows])))
        return x + total


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))


@cache
def traced() -> Facts:
    return facts_of(policylang.trace_step(Model(), lambda model: model(tokens())))[0]


def said(rules: str) -> list[str]:
    (made,) = policylang.check(policylang.parse(f"save everything\n{rules}"), graph=traced()).plans
    return [each.message for each in made.diagnostics if each.code == "APL350"]


@needs_traced_generators
def test_a_size_counts_as_the_most_that_it_can_be_where_that_is_known() -> None:
    """Not as 4,096 rows, and not below what a step saves."""
    (made,) = policylang.check("save_all", graph=traced()).plans
    under = breakdown(made).under.amounts.saved_bytes
    model, x = Model(), tokens()
    found = step_memory(lambda: model(x), [*model.parameters(), x], torch.device("cpu")).saved
    assert found <= under <= 4 * found


@needs_traced_generators
def test_a_plan_says_by_what_it_counts_and_what_that_may_come_to(tmp_path: Path) -> None:
    file = tmp_path / "experts.graph"
    policylang.snapshot(policylang.trace_step(Model(), lambda model: model(tokens())), file)
    (made,) = policylang.check("save_all", graph=file).plans
    (note,) = breakdown(made).notes
    assert note.startswith("saved counts 12 values by a hint of 96 rows, since their sizes come from data: ")
    assert note.endswith(", which may be from 0 B to 75 KiB")


@pytest.mark.parametrize(
    ("rules", "warned"),
    [
        ("expect saved <= 1 GiB", False),  # counted by the most that it can be
        ("expect saved >= 1 KiB", True),
        ("expect peak >= 1 KiB", True),
        ("expect recomputed operators <= 3", False),
        ("expect every tanh saved", False),
    ],
)
@needs_traced_generators
def test_an_expectation_about_such_a_figure_is_warned_of(rules: str, warned: bool) -> None:
    assert bool(said(rules)) is warned
    for message in said(rules):
        assert message.startswith(f"`{rules}` is compared with a figure that counts ")
        assert "by a hint of 96 rows" in message


@needs_traced_generators
def test_one_that_fails_says_so_itself() -> None:
    found = policylang.check(policylang.parse("save everything\nexpect saved <= 1 KiB"), graph=traced()).diagnostics
    assert any("by a hint of 96 rows" in detail for each in found if each.code == "APL305" for detail in each.details)


def test_in_eager_the_sizes_are_those_of_the_first_call() -> None:
    rules = "recompute everything in block\nsave addmm in experts.0\nexpect saved per block <= 1 MiB"
    model = policylang.checkpoint_model(Model(), policylang.parse(rules))
    for seed in range(3):
        model(tokens(seed)).backward()
    report = policylang.report(model)
    (note,) = (each for each in report.notes if "first call" in each)
    assert "of 2 blocks, the calls so far saved" in note
    least, most = note.rsplit("saved ", 1)[1].split(" to ")
    assert least != most
    assert all("APL350" in warning for warning in report.warnings)
    assert report.warnings
    assert note in json.loads(report.to_json())["notes"]


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.layers[1].forward = lambda x: x[torch.tensor([1, 0, 1])].sin()  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x)).sum()


def test_what_is_picked_by_positions_is_of_a_known_size() -> None:
    model = policylang.checkpoint_model(Picks(), policylang.parse("recompute everything in block"))
    model(torch.ones(2, 4)).backward()
    assert not policylang.report(model).notes
