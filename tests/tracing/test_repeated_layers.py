"""Facts of many layers from traces of few: equal to those of a real trace in every column, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from attrs import evolve
from torch import Tensor, nn

import policylang
from examples.sharded_llama import Llama, LlamaConfig, make_mesh, shard
from policylang.api.load import load_device
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.planning.capabilities import FLAT
from policylang.planning.planner import plan
from policylang.simulation.streams import step_time
from policylang.torch_compat.distributed import pretended_ranks
from policylang.tracing.configured import Parts, StepSizes, built
from policylang.tracing.repeated_layers import (
    Calls,
    Repeated,
    Repetition,
    Unlike,
    alike,
    calls_of,
    difference,
    repeated,
    shortened,
    with_units,
)
from tests.support.drawn import slow


class Layer(nn.Module):
    """``kind``: the letters of :class:`Stack`. It knows its number, as layers of Transformers do."""

    def __init__(self, kind: str, number: int) -> None:
        super().__init__()
        self.kind, self.number = kind, number
        self.inner = nn.Linear(8, 16 if kind == "W" else 8, bias=kind != "N")
        self.outer = nn.Linear(16 if kind == "W" else 8, 8)

    def forward(self, x: Tensor, sums: list[Tensor] | None) -> Tensor:
        hidden = self.inner(x)
        hidden = F.silu(hidden) if self.kind == "A" else F.gelu(hidden)
        if self.number == {"L": 3, "H": 7}.get(self.kind):
            hidden = hidden.sin()
        if sums is not None:
            sums.append(hidden.square().mean())
        return x + self.outer(hidden)


class Stack(nn.Module):
    """A layer a letter: (A)ctivation, (G)elu, (W)ider, (N)o bias, and looks at its own (L)ow or (H)igh number."""

    def __init__(self, kinds: str, summed: bool = False) -> None:
        super().__init__()
        self.summed = summed
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Layer(kind, number) for number, kind in enumerate(kinds))
        self.last = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x, sums = self.first(x), [] if self.summed else None
        for layer in self.layers:
            x = layer(x, sums)
        loss = self.last(x).square().mean()
        return loss + torch.stack(sums).sum() if sums else loss


Traced = Callable[..., tuple[Facts, Calls]]
NONE: Mapping[Any, int] = {}


def traced(make: Callable[[], Any], *batch: Any) -> Traced:
    """A function that traces the model, or what ``shortened`` leaves of it, and counts the calls of its forward."""

    def facts(lists: Mapping[Repeated, int] = NONE, units: Mapping[str, int] = NONE) -> tuple[Facts, Calls]:
        found = make()
        parts = found if isinstance(found, Parts) else Parts(found, lambda model, *given: model(*given), batch)
        shortened(parts.model, lists, units)
        calls = calls_of(lambda: parts.loss_fn(parts.model, *parts.batch))
        return collect(policylang.trace_step(parts.model, parts.loss_fn, *parts.batch, device="cuda").gm), calls

    return facts


def from_few(model: nn.Module, facts: Traced) -> Facts | Unlike:
    lists = alike(model)
    found = repeated(lambda units: facts(lists, units), lists, facts()[1])
    return found.whole() if isinstance(found, Repetition) else found


@pytest.mark.parametrize(
    ("kinds", "stretch"),
    [("WWAAAAAAN", Repeated("layers", 2, 1, 3)), slow("WAGAGAGAGAGA", Repeated("layers", 1, 2, 3))],
)
def test_a_stretch_of_layers_is_found_and_repeated(kinds: str, stretch: Repeated) -> None:
    facts = traced(lambda: Stack(kinds), torch.randn(2, 8))
    assert list(alike(Stack(kinds))) == [stretch]
    found = from_few(Stack(kinds), facts)
    assert isinstance(found, Facts), found
    assert difference(found, facts()[0]) is None


def test_what_grows_with_the_layers_is_refused() -> None:
    """A stack of one value a layer."""
    found = from_few(Stack("A" * 5, True), traced(lambda: Stack("A" * 5, True), torch.randn(2, 8)))
    assert isinstance(found, Unlike)
    assert "they differ at `select_3`" in found.reason


@pytest.mark.slow
def test_a_layer_that_looks_at_its_number_is_named() -> None:
    found = from_few(Stack("L" * 9), traced(lambda: Stack("L" * 9), torch.randn(2, 8)))
    assert isinstance(found, Unlike)
    assert "`sin`" in found.reason


@pytest.mark.slow
def test_a_layer_that_no_short_trace_has_is_found() -> None:
    """By its number in the code of the layer, and by the model that has the layers."""

    def own(model: nn.Module, x: Tensor) -> Tensor:
        x = model.first(x)
        for number, layer in enumerate(model.layers):
            x = layer(x.cos() if number == 7 else x, None)
        return x.square().mean()

    for make, called in (
        (lambda: Stack("H" * 9), "sin"),
        (lambda: Parts(Stack("A" * 9), own, (torch.randn(2, 8),)), "cos"),
    ):
        found = from_few(Stack("A" * 9), traced(make, torch.randn(2, 8)))
        assert isinstance(found, Unlike)
        assert f"the model calls `aten.{called}.default` 1 times, and not 0" in found.reason


def test_layers_that_are_not_alike_are_not_repeated() -> None:
    def tied() -> nn.Module:
        model = Stack("A" * 9)
        model.layers[4].inner.weight = model.layers[0].inner.weight
        model.layers[6].outer.weight = model.first.weight
        return model

    assert alike(tied()) == {}
    assert alike(Stack("AWGAWN")) == {}
    hooked = Stack("A" * 9)
    hooked.layers[2].register_forward_hook(lambda module, given, out: None)
    assert alike(hooked) == {Repeated("layers", 3, 1, 3): 6}


def sharded_llama(layers: int) -> Facts:
    config = LlamaConfig(layers=layers)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens).flatten(0, 1).float()
        return F.cross_entropy(logits, tokens.flatten().repeat(8)[: len(logits)])

    with pretended_ranks(8):
        model = shard(Llama(config), make_mesh("cpu", 2, 4), dtype=torch.bfloat16)
        return collect(policylang.trace_step(model, loss, torch.zeros(1, config.sequence // 4, dtype=torch.long)).gm)


@pytest.mark.slow
def test_a_sharded_model_is_repeated_with_its_collectives() -> None:
    few = sharded_llama(3)
    for layers in (4, 6, 8):
        made = with_units(few, Repeated("layers", 0, 1, 3), layers)
        assert isinstance(made, Facts)
        assert difference(made, sharded_llama(layers)) is None
    wrong = evolve(few, flops=[each + (row == 700) for row, each in enumerate(few.flops)])
    made = with_units(wrong, Repeated("layers", 0, 1, 3), 6)
    assert isinstance(made, Facts)
    assert (found := difference(made, sharded_llama(6))) is not None
    assert "`flops`" in found.reason


@pytest.mark.slow
def test_overlap_is_as_good_in_the_deepest_model() -> None:
    """What a layer adds to the step is the same below and above 40,000 nodes, within 1%."""
    few, steps = sharded_llama(4), []
    for layers in (80, 90, 110, 120):
        facts = with_units(few, Repeated("layers", 0, 1, 4), layers)
        assert isinstance(facts, Facts)
        policy = policylang.parse("overlap collective within 1 GiB of peak")
        order = plan(policy, facts, FLAT, device=load_device("h100-sxm")).order
        steps.append((len(facts), step_time(order.facts, order.schedule, order.times).step))
    (_, first), (below, second), (above, third), (_, last) = steps
    assert below < 40_000 < above
    assert (last - third) == pytest.approx(second - first, rel=0.01)


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4}
EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "qk_nope_head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_hidden_layers": 8},
    "gemma2": {**SMALL, "head_dim": 16, "num_hidden_layers": 10},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_hidden_layers": 6},
    "deepseek_v3": {**SMALL, **EXPERTS, **LATENT, "first_k_dense_replace": 2, "num_hidden_layers": 8},
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 8, "num_decoder_layers": 9, "num_heads": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_models_are_repeated(family: str) -> None:
    kind = transformers.CONFIG_MAPPING[family]
    config = kind(vocab_size=128, **FAMILIES[family], **({"decoder_start_token_id": 0} if family == "t5" else {}))

    facts = traced(lambda: built(config, StepSizes(sequence=32)))
    found = from_few(built(config, StepSizes(sequence=32)).model, facts)
    assert isinstance(found, Facts), found
    assert difference(found, facts()[0]) is None
