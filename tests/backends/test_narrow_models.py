"""`save … as` on models of Hugging Face's, on all paths: gradients are off by the rounding and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ViTConfig, ViTModel

import policylang
from policylang.testing import agree
from tests.support import models
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


MAKERS: dict[str, Callable[[], Example]] = {
    "llama": models.llama,
    "gpt2": lambda: models.gpt2(dropout=0.0),
    "mixtral": models.mixtral,
    "vit": vit,
}
UNITS = {"bfloat16": 2.0**-8, "float8_e4m3fn per row": 2.0**-4}
"""By form, the largest relative rounding of one number."""


def found(name: str, form: str, paths: list[str] | None = None) -> Any:
    make = MAKERS[name]
    example = make()
    policy = policylang.parse(f"recompute everything in block\nsave matmul in block as {form}")
    return agree(
        lambda: make().module, lambda model, *batch: example.loss_fn(model(*batch)), example.inputs, policy, paths=paths
    )


@pytest.mark.parametrize("form", UNITS)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == "llama" else pytest.mark.slow) for each in MAKERS]
)
def test_gradients_are_within_the_error_of_narrowing(name: str, form: str) -> None:
    """Every gradient is a sum of products with a bounded number of narrowed factors on each way through two blocks: to
    first order it is off by that number times the rounding of one, in relation to its largest element."""
    compared = found(name, form)
    assert compared.agrees, str(compared)
    for result in compared.results:
        assert result.numbers is not None
        assert result.numbers.narrowed is not None
        errors = result.numbers.narrowed
        assert errors.keys() == result.numbers.narrowed.keys()
        assert 0 < max(errors.values()) <= _FACTORS * UNITS[form], max(errors.items(), key=lambda each: each[1])
        report = result.ran.report if result.ran is not None else None
        assert report is not None
        assert report.rules[1].narrowed_bytes > 0
        assert report.audit.agrees
    assert "narrows saved values: a gradient is off by" in str(compared)


_FACTORS = 8
"""Products and activation functions of two blocks behind which a gradient passes."""


def test_what_is_narrowed_is_alike_on_all_paths() -> None:
    compared = found("llama", "bfloat16")
    freed = {result.ran.report.rules[1].narrowed_bytes for result in compared.results if result.ran is not None}
    assert len(freed) <= 2  # in eager the products that a block returns wait in full width
    assert compared.to_dict()["paths"][0]["numbers"]["narrowed"]
