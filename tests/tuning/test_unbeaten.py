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
from policylang.api.snapshot import facts_of
from policylang.graph.facts import Facts
from policylang.language.devices.reading import read_device
from policylang.planning.capabilities import FLAT
from policylang.simulation.node_times import node_times
from policylang.tuning.evaluation import Budget
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
