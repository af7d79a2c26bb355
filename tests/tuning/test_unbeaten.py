"""Nothing that is planned on the way to a choice, and fits the budget, is better than the choice: real models of which
the search composes more than they come to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import policylang
from policylang.api.planned_graphs import read_any
from policylang.api.snapshot import facts_of
from policylang.graph.facts import Facts
from policylang.language.devices.reading import read_device
from policylang.planning.capabilities import FLAT, JOINT, Capabilities
from policylang.simulation.node_times import node_times
from policylang.tuning.candidates import stacks
from policylang.tuning.evaluation import Budget
from policylang.tuning.phrases import value_classes
from policylang.tuning.tuner import Tuner


class Attention(nn.Module):
    """Over the edges of a graph, as a GAT has it."""

    def __init__(self, width: int, out: int, heads: int) -> None:
        super().__init__()
        self.heads, self.out = heads, out
        self.project = nn.Linear(width, heads * out, bias=False)
        self.source, self.target = nn.Parameter(torch.randn(heads, out)), nn.Parameter(torch.randn(heads, out))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        nodes, (begin, end) = len(x), edges
        hidden = self.project(x).view(nodes, self.heads, self.out)
        logits = (hidden * self.source).sum(-1)[begin] + (hidden * self.target).sum(-1)[end]
        logits = functional.leaky_relu(logits, 0.2)
        places = end[:, None].expand_as(logits)
        most = torch.zeros(nodes, self.heads).scatter_reduce(0, places, logits.detach(), "amax", include_self=False)
        weights = (logits - most[end]).exp()
        weights = weights / (torch.zeros(nodes, self.heads).scatter_add(0, places, weights) + 1e-16)[end]
        messages = hidden[begin] * functional.dropout(weights, 0.6)[..., None]
        summed = torch.zeros(nodes, self.heads, self.out)
        return summed.scatter_add(0, end[:, None, None].expand_as(messages), messages).flatten(1)


class GAT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(143, 8, 8), Attention(64, 7, 1)])

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.elu(layer(functional.dropout(x, 0.6), edges))
        return functional.cross_entropy(x, labels)


@cache
def gat() -> Facts:
    batch = torch.randn(270, 143), torch.randint(0, 270, (2, 1055)), torch.randint(0, 7, (270,))
    return facts_of(policylang.trace_step(GAT(), lambda model, *given: model(*given), *batch))[0]


@cache
def resnet() -> Facts:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64], depths=[2, 2, 2], num_labels=10)
    model = transformers.ResNetForImageClassification(config)
    batch = torch.randn(4, 3, 64, 64), torch.randint(0, 10, (4,))
    step = policylang.trace_step(model, lambda model, x, y: model(pixel_values=x, labels=y).loss, *batch)
    return facts_of(step)[0]


@pytest.mark.parametrize(
    ("graph", "figure", "shares"),
    [
        (gat, "peak", (0.02, 0.5)),
        pytest.param(gat, "saved", (0.02, 0.3, 0.5, 0.8), marks=pytest.mark.slow),
        pytest.param(resnet, "peak", (0.02, 0.3, 0.5, 0.8), marks=pytest.mark.slow),
    ],
)
def test_nothing_that_fits_beats_what_is_chosen(
    graph: Callable[[], Facts], figure: Literal["peak", "saved"], shares: Sequence[float]
) -> None:
    facts, device = graph(), read_device("h100-sxm")
    tuner = Tuner(facts, node_times(facts, device), FLAT)
    least, most = tuner.smallest(Budget(figure, 0)), tuner.save_all
    assert most is not None
    for share in shares:
        low, high = (getattr(each, figure) for each in (least, most))
        found = tuner.tuned(Budget(figure, low + share * (high - low)))
        beside = [each for each in (found.less, found.more, *found.table) if each is not None]
        fitting = [each for each in beside if getattr(each, figure) <= found.budget.limit]
        assert found.chosen.price <= min(each.price for each in fitting) + 1e-9 * found.forward
        again = tuner.tuned(found.budget)
        assert (again.chosen, again.table) == (found.chosen, found.table), "other budgets decide nothing"


@pytest.mark.parametrize(
    ("name", "path", "shares"),
    [
        ("tutorial", JOINT, (0.4, 0.6)),
        pytest.param("resnet50", FLAT, (0.2, 0.4, 0.6, 0.8), marks=pytest.mark.slow),
        pytest.param("mixtral", FLAT, (0.4, 0.7), marks=pytest.mark.slow),
        pytest.param("gpt2", FLAT, (0.3, 0.6), marks=pytest.mark.slow),
    ],
)
def test_a_tuned_policy_is_near_the_exact_optimum_in_few_lines(
    name: str, path: Capabilities, shares: Sequence[float]
) -> None:
    facts = read_any(f"docs/graphs/{name}.graph")
    times = node_times(facts, read_device("h100-sxm"))
    tuner = Tuner(facts, times, path)
    assert tuner.save_all is not None
    for share in shares:
        limit = round(share * tuner.save_all.saved)
        found = tuner.tuned(Budget("saved", limit)).chosen
        assert found.recompute <= 1.03 * tuner.bound(limit)
        assert found.rules.count("\n") <= 16


def test_blocks_are_the_modules_that_repeat() -> None:
    facts = read_any("docs/graphs/resnet50.graph")
    glob, blocks = stacks(facts)
    assert (glob, len(blocks.names)) == ("stages.*.layers.*", 16)
    classes = value_classes(facts, blocks, FLAT, glob)
    convolutions = {(each.module, each.stage, each.first) for each in classes.all if "convolution" in each.target}
    assert {module for module, stage, _ in convolutions if stage} == {
        "layer.0.convolution",
        "layer.1.convolution",
        "layer.2.convolution",
        "shortcut.convolution",
    }
    assert ("layer.1.convolution", "stages.2", True) in convolutions
    assert ("layer.1.convolution", "stages.2", False) in convolutions
