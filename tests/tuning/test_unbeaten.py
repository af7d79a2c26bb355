"""Nothing that is planned on the way to a choice, and fits the budget, is better than the choice: real models of which
the search composes more than they come to."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import inf
from random import Random

import pytest
import torch
from attrs import evolve
from torch import Tensor, nn
from torch.nn import functional

import policylang
from policylang.api.load import load, parse
from policylang.api.planned_graphs import facts_of, read_any
from policylang.graph.facts import Facts, GraphKind
from policylang.language.devices.reading import read_device
from policylang.language.diagnostics import is_error
from policylang.language.files import bundled_policies
from policylang.language.syntax import Policy
from policylang.planning.capabilities import EAGER, FLAT, JOINT
from policylang.planning.liveness import saved_and_recomputed
from policylang.planning.planner import plan
from policylang.simulation.node_times import node_times
from policylang.tuning.candidates import stacks
from policylang.tuning.evaluation import Budget, Candidate, Tuned, candidate_of
from policylang.tuning.phrases import value_classes
from policylang.tuning.tuner import Tuner, undominated


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
        pytest.param(gat, "peak", (0.02, 0.5), marks=pytest.mark.slow),
        pytest.param(gat, "saved", (0.02, 0.3, 0.5, 0.8), marks=pytest.mark.slow),
        pytest.param(resnet, "peak", (0.02, 0.3, 0.5, 0.8), marks=pytest.mark.slow),
    ],
)
def test_nothing_that_fits_beats_what_is_chosen(graph, figure, shares) -> None:
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
        pytest.param("tutorial", JOINT, (0.4, 0.6), marks=pytest.mark.slow),
        pytest.param("fsdp", FLAT, (0.4, 0.55, 0.7), marks=pytest.mark.slow),
        pytest.param("resnet50", FLAT, (0.2, 0.4, 0.6, 0.8), marks=pytest.mark.slow),
        pytest.param("mixtral", FLAT, (0.4, 0.7), marks=pytest.mark.slow),
        pytest.param("gpt2", FLAT, (0.3, 0.6), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", FLAT, (0.6,), marks=pytest.mark.slow),
    ],
)
def test_a_tuned_policy_is_near_the_exact_optimum_in_few_lines(name, path, shares) -> None:
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


@cache
def stages_or_bottlenecks() -> Tuner:
    facts = read_any("docs/graphs/resnet50.graph")
    return Tuner(facts, node_times(facts, read_device("h100-sxm")), EAGER)


def test_in_eager_larger_blocks_are_tried_and_patterns_alternate() -> None:
    tuner, budget = stages_or_bottlenecks(), Budget("peak", 7_329_984_404)
    assert [len(each.classes.blocks.names) for each in tuner.spaces] == [16, 4]
    chosen = tuner._picked(budget)
    assert chosen.rules == ("save everything\nrecompute activation in block\nrecompute pointwise in every 2nd block\n")
    bottlenecks = tuner._faster(tuner.spaces[0].candidates(budget), budget, budget.limit, None, inf)
    assert chosen.price < 0.93 * bottlenecks.price


def test_in_eager_a_text_recomputes_as_long_as_its_mixture() -> None:
    """What a checkpoint holds anyway is not run again, and no phrase takes a class in part."""
    tuner, seen = stages_or_bottlenecks(), 0
    for space in tuner.spaces:
        made = space.candidates(Budget("peak", 0))
        for at in made.by_time[:: len(made.by_time) // 8]:
            found = tuner._candidate(made, at)
            if found is not None:
                seen += 1
                assert found.recompute == pytest.approx(made.seconds[at])
    assert seen >= 8


def test_a_phrase_takes_no_class_in_part() -> None:
    """``in layers.0`` has the last activation of a stage's first layer, which is of one class with those of others."""
    tuner = stages_or_bottlenecks()
    space = tuner.spaces[1]
    classes = space.classes
    assert any("*" in each.module for each in classes.all)
    for phrase in space.inside.phrases:
        policy = parse(f"optional save {phrase.text('in block', inside=True)}\nundecided -> recompute\n")
        taken = {row for row in plan(policy, tuner.facts, EAGER).rules[0].decided if classes.of[row] >= 0}
        meant = {row for number in space.inside.numbers if phrase.mask >> number & 1 for row in classes.rows[number]}
        assert {row for row in taken if tuner.facts.owners[row] == row} >= meant, phrase
        assert {classes.of[row] for row in taken} == {classes.of[row] for row in meant}, phrase


SELECTORS = (
    *("everything", "matmul", "attention", "activation", "norm", "pointwise", "cast", "view", "reduction", "mm", "mul"),
    *("add", "every 2nd matmul", "every 3rd matmul", "first matmul", "everything where crosses block"),
    *("everything where bytes >= 4 MiB", "everything where crosses cut per 64 MiB"),
)
PLACES = ("", "in block", "outside block", "in first half of blocks", "in last 2 blocks", "in every 2nd block")


def generated(random: Random) -> str:
    """A policy as people write them: a ground, and up to five exceptions."""
    lines = [f"{random.choice(('save', 'recompute'))} everything"]
    for _ in range(random.randint(1, 5)):
        line = f"optional {random.choice(('save', 'recompute'))} {random.choice(SELECTORS)}"
        head, where, test = line.partition(" where ")
        lines.append(" ".join(filter(None, (head, random.choice(PLACES)))) + where + test)
    return "\n".join(lines) + "\n"


GENERATED = 60


def policies() -> Iterator[Policy]:
    """The bundled ones, with what they leave open saved and recomputed, and generated ones."""
    for each in bundled_policies():
        for fate in ("save", "recompute"):
            undecided = parse(f"undecided -> {fate}").undecided
            yield evolve(load(each.name), undecided=undecided)
    random = Random(1)
    yield from (parse(generated(random)) for _ in range(GENERATED))


UNBEATEN = ("tutorial", "vit", "gpt2", "t5", "resnet50", "mixtral", "fsdp")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path"),
    [
        *((name, None) for name in UNBEATEN),
        *((name, EAGER) for name in UNBEATEN),
    ],
)
def test_no_policy_that_comes_along_or_is_generated_beats_what_is_tuned_for_its_peak(name, path) -> None:
    facts = read_any(f"docs/graphs/{name}.graph")
    path = path or (JOINT if facts.kind is GraphKind.JOINT else FLAT)
    tuner = Tuner(facts, node_times(facts, read_device("h100-sxm")), path)
    points: list[Candidate] = []
    for policy in policies():
        made = plan(policy, facts, path)
        needs = saved_and_recomputed(made)
        if not any(map(is_error, made.diagnostics)) and needs.final and not policy.offloads:
            points.append(candidate_of("\n".join(each.text for each in policy.rules), made, needs, tuner.times))
    assert len(points) >= GENERATED / 2
    for each in undominated(points, lambda point: point.peak):
        found = tuner.tuned(Budget("peak", each.peak))
        assert isinstance(found, Tuned), each.rules
        assert found.chosen.price <= each.price + 1e-6 * tuner.forward, each.rules
