"""Architectures of Transformers, traced for a GPU from the CPU and from `meta`: the kernels that it would choose."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch

import policylang
from policylang.graph.collect import collect
from policylang.graph.facts import Facts
from policylang.graph.traced_device import attention_kernels, kernel_findings, traced_on

pytest.importorskip("transformers")

from tests.support.architectures import ARCHITECTURES, built, loss_of

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU chooses for itself")]
CUDNN, FLASH, EFFICIENT, MATH = (
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_safe_softmax",
)
OF_ONE_H100: dict[str, dict[str, int]] = {
    "T5": {CUDNN: 2, EFFICIENT: 4},  # its bias is learned, which cuDNN does not take; across, there is none
    "Swin": {EFFICIENT: 2, MATH: 2},  # a learned bias, and heads of 4 in the first stage
    "RecurrentGemma": {CUDNN: 1},
    "CLIP": {CUDNN: 4},
    "Whisper": {CUDNN: 6},
    **{name: {} for name in ("Bloom", "Gemma2", "Mamba", "DebertaV2", "ConvNext")},  # write their own, or have none
}
BY_VALUES = {"OPT", "Bart"}
"""Leave layers out by a draw, which no trace holds."""


def step(name: str, where: str, dtype: torch.dtype, **device: Any) -> Facts:
    with torch.device(where), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = built(name)
    words, image, sound = torch.ones(2, 12, dtype=torch.long), torch.zeros(2, 3, 16, 16), torch.zeros(2, 8, 16)
    taken = words, image.to(dtype), sound.to(dtype)
    return collect(policylang.trace_step(model.to(dtype), loss_of(name), *taken, **device).gm)


def kernels(facts: Facts) -> dict[str, int]:
    return {target.split(".")[1]: count for target, count in attention_kernels(facts).items()}


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in BY_VALUES])
def test_an_architecture(name: str) -> None:
    from_cpu, from_meta = (step(name, where, torch.bfloat16, device="cuda") for where in ("cpu", "meta"))
    assert (from_cpu.targets, from_cpu.shapes) == (from_meta.targets, from_meta.shapes)
    assert traced_on(from_meta) == {"cuda"}
    assert not list(kernel_findings(from_meta))
    assert kernels(from_meta) == OF_ONE_H100.get(name, {CUDNN: 2})


@pytest.mark.parametrize(
    ("dtype", "capability", "expected"),
    [
        (torch.float16, "8.9", {FLASH: 2}),
        (torch.float32, "8.0", {EFFICIENT: 2}),
        (torch.float32, "7.0", {EFFICIENT: 2}),
        (torch.bfloat16, "7.5", {MATH: 2}),
    ],
)
def test_another_dtype_or_another_gpu(dtype: torch.dtype, capability: str, expected: dict[str, int]) -> None:
    facts = step("GPT2", "meta", dtype, device="cuda", compute_capability=capability)
    assert kernels(facts) == expected
    assert Counter(facts.targets)["aten.native_dropout.default"] > 0
