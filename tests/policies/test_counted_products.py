"""`every 2nd` counts the products with a weight, in the graphs of whoever traced them: seven a block of a Llama, as mm,
as bmm of one matrix or as einsum."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
from torch import nn

import policylang
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.planning.capabilities import FLAT, JOINT
from policylang.planning.planner import plan as make_plan
from tests.graph.captured import facts_of_model
from tests.support import titan
from tests.support.models import ZOO
from tests.support.shared_graphs import JOINT as PLACED
from tests.support.shared_graphs import ONE_DEVICE, shared_graph

Products = list[list[str]]
"""By block, the modules whose products with a weight are counted."""
ROUTER = "moe.router.gate"
"""TorchTitan's, which its eager checkpointing leaves out of the count."""
EVERY_2ND = {
    "llama3_sac": "optional recompute every 2nd projection per block",
    "torchtitan_op_sac": "optional recompute every 2nd counted per block",
}


def linears(model: nn.Module, layers: str) -> Products:
    """The linear layers of each block. Experts are grouped products, which nobody counts."""
    return [
        [name for name, module in block.named_modules() if isinstance(module, nn.Linear)]
        for block in model.get_submodule(layers).children()
    ]


def hugging_face(name: str) -> tuple[Facts, Products]:
    return facts_of_model(name), linears(ZOO[name]().module, "model.model.layers")


def autoparallel(name: str) -> tuple[Facts, Products]:
    gm = shared_graph(name)
    for node in gm.graph.nodes:
        node.meta.pop("recompute", None)  # of its model's own checkpoint
    return collect(gm), [["q", "k", "v", "o", "gate", "up", "down"]] * 32


def torchtitan(name: str) -> tuple[Facts, Products]:
    model = titan.model_of(2) if name == "llama3" else titan.experts_of(name)
    found = linears(model, "layers")
    return collect(titan.step_of(model).gm), found


GRAPHS: dict[str, Callable[[], tuple[Facts, Products]]] = {
    **{f"Hugging Face's {name}": partial(hugging_face, name) for name in ("llama", "qwen3", "mixtral")},
    **{f"AutoParallel's {name}": partial(autoparallel, name) for name in (ONE_DEVICE, PLACED)},
    **{f"TorchTitan's {name}": partial(torchtitan, name) for name in ("llama3", "deepseek_v3", "qwen3")},
}


@cache
def graph(name: str) -> tuple[Facts, Products]:
    return GRAPHS[name]()


VARIANTS = {name for name in GRAPHS if name not in ("Hugging Face's llama", "TorchTitan's llama3")}
"""Products of the forms that others have as well."""


@pytest.mark.parametrize("policy", EVERY_2ND)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in VARIANTS else ()) for name in GRAPHS]
)
def test_every_2nd_product_of_a_block(name: str, policy: str) -> None:
    facts, products = graph(name)
    plan = make_plan(policylang.load(policy), facts, FLAT if name.startswith("TorchTitan") else JOINT)
    (found,) = [outcome for outcome in plan.rules if outcome.rule.text == EVERY_2ND[policy]]
    left_out = {ROUTER} if policy == "torchtitan_op_sac" else set()
    assert len(found.matched) == sum(len(set(names) - left_out) // 2 for names in products) > 0
