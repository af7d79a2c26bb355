"""FSDP's contracts on models whose weights are sharded and gathered, as one rank of four sees them."""

import copy
import warnings
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import policylang
from tests.support.joint import Joint, capture_joint
from tests.support.models import Function
from tests.support.sharded import fake_ranks
from tests.support.versions import needs_gathers_of_columns

RANKS = 4
LAYERS = 2
WIDTH = 8


@pytest.fixture(autouse=True, scope="module")
def four_ranks():
    with fake_ranks(RANKS):
        yield


class Sharded(nn.Module):
    """A linear layer that holds a quarter of its weight, cast and gathered for each use."""

    dim = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.randn(width, width).chunk(RANKS, self.dim)[0].clone())

    def gathered(self) -> Tensor:
        return functional.all_gather_tensor(self.shard.to(torch.bfloat16), self.dim, dist.group.WORLD)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x @ self.gathered().t())


class ByColumns(Sharded):
    """Its shards are columns: what is gathered is split into the ranks' parts, and these are joined again."""

    dim = 1


class Forked(Sharded):
    """What is gathered goes two ways: as it is, and through a copy with another layout."""

    def forward(self, x: Tensor) -> Tensor:
        whole = self.gathered()
        return torch.sin(x @ whole.t()) + torch.cos(x @ whole.transpose(0, 1).contiguous().t())


class Checkpointed(Sharded):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def residual(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = x + layer(x)
    return x


KINDS = [Sharded, pytest.param(ByColumns, marks=needs_gathers_of_columns), Forked, Checkpointed]
BEFORE = ["save everything", "recompute everything", "save mm", "undecided -> save"]


def captured(kind: type[Sharded]) -> Joint:
    """A copy: a partition tags what it splits."""
    joint = traced(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own pytree specs, on being copied
        return joint._replace(gm=copy.deepcopy(joint.gm))


@cache
def traced(kind: type[Sharded]) -> Joint:
    inputs = (torch.randn(4, WIDTH, dtype=torch.bfloat16, requires_grad=True),)
    return capture_joint(
        Function(residual, layers=nn.ModuleList(kind(WIDTH) for _ in range(LAYERS))),
        inputs,
        lambda out: out.float().sum(),
    )


def gathers(gm: torch.fx.GraphModule) -> int:
    return sum("all_gather_into_tensor" in str(node.target) for node in gm.graph.nodes)


def made_of_weights(gm: torch.fx.GraphModule) -> tuple[set[str], set[str]]:
    """The forward nodes whose only ancestor is one sharded weight; of these, the gathers and what lies behind one."""
    inputs = gm.graph.find_nodes(op="placeholder")
    roots = {node.name: node.name for node in inputs if node.meta["val"].numel() == WIDTH * WIDTH // RANKS}
    assert len(roots) == LAYERS
    weights, gathered = set(), set()
    for node in gm.graph.nodes:
        found = {roots.get(read.name) for read in node.all_input_nodes}
        if node.meta.get("partitioner_tag") == "is_forward" and len(found) == 1 and None not in found:
            roots[node.name] = found.pop()
            weights.add(node.name)
            if "all_gather" in str(node.target) or any(read.name in gathered for read in node.all_input_nodes):
                gathered.add(node.name)
    return weights, gathered


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["fsdp", "fsdp_reshard_always"])
def test_each_weight_is_gathered_again_whatever_stands_before(name, kind, before):
    joint = captured(kind)
    assert gathers(joint.gm) == LAYERS
    weights, gathered = made_of_weights(joint.gm)
    forward, backward = joint.halves(policylang.parse(f"{before}\ninclude <{name}>\n"))
    assert (gathers(forward), gathers(backward)) == (LAYERS, LAYERS)
    report = policylang.report(forward)
    (rule,) = [rule for rule in report.rules if rule.text == "override must_recompute fsdp_line"]
    assert {name for name, decision in report.decisions.items() if decision.rule == rule.source} == weights
    assert gathered
    assert gathered.isdisjoint(report.saved.names)
    assert report.audit.agrees


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("kind", KINDS)
def test_each_weight_is_kept_once_whatever_stands_before(kind, before):
    joint = captured(kind)
    weights, _ = made_of_weights(joint.gm)
    forward, backward = joint.halves(policylang.parse(f"{before}\ninclude <fsdp_reshard_never>\n"))
    assert (gathers(forward), gathers(backward)) == (LAYERS, 0)
    report = policylang.report(forward)
    kept = [name for name in report.saved.names if name in weights]
    operators = {node.name: str(node.target) for node in joint.gm.graph.nodes}
    last = "aten.cat.default" if kind is ByColumns else "_c10d_functional.wait_tensor.default"
    assert [operators[name] for name in kept] == [last] * LAYERS
    recomputed = {name for name in weights if report.decisions[name].action == "must_recompute"}
    waited = {name for name in weights if "wait_tensor" in operators[name] or "all_gather" in operators[name]}
    assert recomputed == weights - set(kept) - (set() if kind is ByColumns else waited)
    assert report.audit.agrees


@pytest.mark.parametrize(
    ("name", "rule"), [("fsdp", "must_recompute fsdp_line"), ("fsdp_reshard_never", "save fsdp_weight")]
)
def test_a_model_that_is_not_sharded_is_refused_by_the_rule(name, rule):
    joint = capture_joint(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(policylang.PolicyMatchError, match=rule):
        policylang.apply(joint.gm, policylang.parse(f"include <{name}>"))


def test_one_layer_may_be_excepted():
    text = "include <fsdp_reshard_never>\noverride must_recompute fsdp_line in layers.1"
    forward, backward = captured(Sharded).halves(policylang.parse(text))
    assert (gathers(forward), gathers(backward)) == (LAYERS, 1)
    text = "include <fsdp>\noverride save fsdp_gather in layers.0"
    forward, backward = captured(Sharded).halves(policylang.parse(text))
    assert (gathers(forward), gathers(backward)) == (LAYERS, 1)
