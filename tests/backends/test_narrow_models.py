"""`save … as` on models of Hugging Face's, on all paths: gradients are those that a person's narrowing gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTModel

import policylang
from benchmarks.allocations import step_allocations
from policylang.api.snapshot import facts_of
from policylang.language.syntax import NarrowForm
from policylang.planning.capabilities import EAGER, JOINT
from policylang.planning.planner import plan
from policylang.simulation.memory import simulate
from policylang.testing import Agreement, agree
from tests.support import models
from tests.support.by_hand import BF16, ROWS8, narrowed_by_hand
from tests.support.models import Example


def vit() -> Example:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ViTModel(config, add_pooling_layer=False)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.model(pixels).last_hidden_state
            return found

    def loss(hidden: torch.Tensor) -> torch.Tensor:
        """Not the sum of squares: that of what a norm returns is constant, and its gradients are rounding alone."""
        return (hidden * torch.linspace(-1, 1, hidden.shape[-1])).sin().square().mean()

    return Example(Hidden(), (torch.randn(2, 3, 16, 16),), loss)


class WithHead(models.Layers):
    def __init__(self) -> None:
        super().__init__(*models.MLP(2, 16).layers)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))  # type: ignore[no-any-return]


def with_head() -> Example:
    torch.manual_seed(0)
    return Example(WithHead(), models.mlp().inputs, models.square_loss)


MAKERS: dict[str, Callable[[], Example]] = {
    "mlp": with_head,
    "llama": models.llama,
    "gpt2": lambda: models.gpt2(dropout=0.0),
    "mixtral": models.mixtral,
    "vit": vit,
}
ROUTER = {"mixtral": 4}
"""How many columns the product has by which experts are chosen."""
TEXT = (
    "recompute everything in block; save everything in block where crosses block\n"
    "save matmul in block as {0}; save everything in block where crosses block outside last block as {0}"
)


def both(name: str, form: NarrowForm) -> tuple[Agreement, dict[str, Tensor]]:
    """How the paths agree, and the gradients that a person's narrowing gives."""
    example = MAKERS[name]()

    def loss_of(model: nn.Module, *batch: Tensor) -> Tensor:
        return example.loss_fn(model(*batch))

    policy = policylang.parse(TEXT.format(form.text))
    compared = agree(lambda: copy.deepcopy(example.module), loss_of, example.inputs, policy)
    model = narrowed_by_hand(copy.deepcopy(example.module), form, experts=ROUTER.get(name, 0), crossing=True)
    loss_of(model, *example.inputs).backward()
    return compared, {each: value.grad for each, value in model.named_parameters() if value.grad is not None}


SLOW = ("llama", "gpt2", "mixtral", "vit")


@pytest.mark.parametrize("form", [BF16, ROWS8], ids=str)
@pytest.mark.parametrize("name", ["mlp", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_gradients_are_those_of_narrowing_by_hand(name: str, form: NarrowForm) -> None:
    """To the bit, where the path gives the plain model's bits; else off by the order in which it adds up."""
    compared, expected = both(name, form)
    assert compared.agrees, str(compared)
    for result in compared.results:
        assert result.numbers is not None
        assert result.ran is not None
        found = result.ran.numbers.gradients
        assert found.keys() == expected.keys()
        largest = max(each.abs().max().item() for each in expected.values())
        for each, gradient in found.items():
            off = (gradient - expected[each]).abs().max().item()
            assert off <= (0 if result.numbers.bitwise else 2.0**-20 * largest), each
        assert result.numbers.narrowed is not None
        assert max(result.numbers.narrowed.values()) > 2.0**-12, "by far more than that"
        assert result.ran.report.audit is not None
        assert result.ran.report.audit.agrees
    assert len({result.ran.report.rules[2].narrowed_bytes for result in compared.results if result.ran}) == 1
    assert compared.to_dict()["paths"][0]["numbers"]["narrowed"]
    assert "narrows saved values: a gradient is off by" in str(compared)


@pytest.mark.parametrize("name", ["mlp", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW[:3])])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "joint"])
def test_the_report_says_what_the_allocator_frees(name: str, is_compiled: bool) -> None:
    example, saved, narrowed = MAKERS[name](), [], 0
    for ending in ("", " as bfloat16", " as float8_e4m3fn per row"):
        policy = policylang.parse(f"recompute everything in block\nsave matmul in block{ending}")
        model = copy.deepcopy(example.module)
        torch.compiler.reset()
        if is_compiled:
            model = torch.compile(model, backend=policylang.backend(policy, inner="aot_eager"))
        else:
            policylang.checkpoint_model(model, policy)
        for _ in range(2):
            memory = step_allocations(lambda model=model: example.loss_fn(model(*example.inputs)))
        saved.append(memory.saved + (policylang.report(model).rules[1].narrowed_bytes or 0))
        narrowed = policylang.report(model).rules[1].narrowed_bytes or 0
    assert narrowed > 0
    assert len(set(saved)) == 1


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "joint"])
def test_the_peak_of_a_resnet_falls_by_what_is_planned(is_compiled: bool) -> None:
    """Beside the plan are the workspaces of convolutions: as many bytes whatever waits in which form."""
    beside, peaks = set[int](), list[int]()
    x = torch.randn(2, 3, 24, 24)

    def step(made: nn.Module) -> Tensor:
        return models.square_loss(made(x))

    for ending in ("", " as bfloat16", " as float8_e4m3fn per row"):
        model = models.resnet(4, 16).module
        policy = policylang.parse(
            f"recompute everything in block\nundecided -> save\nsave convolution in block{ending}"
        )
        torch.compiler.reset()
        if is_compiled:
            model = torch.compile(model, backend=policylang.backend(policy, inner="aot_eager"))
            step(model).backward()
            (facts,), able = facts_of(model), JOINT
        else:
            (facts,), able = facts_of(policylang.trace_step(model, step)), EAGER
            policylang.checkpoint_model(model, policy)
            step(model).backward()
        model.zero_grad(set_to_none=True)
        made = plan(policy, facts, able)
        timeline = simulate(made.facts, made.schedule)
        peaks.append(step_allocations(partial(step, model)).peak)
        beside.add(peaks[-1] - (max(timeline.live) - timeline.resident))
    assert len(beside) == 1, "bytes beside the plan"
    assert peaks[0] > peaks[1] > peaks[2]
