"""Blocks of random operators, views and writes in place under random rules: the bits of the same training without
checkpoints, or an error by name."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import policylang
from policylang.errors import PolicyGraphError
from tests.support.drawn import examples
from tests.support.eager import Step, differences, train
from tests.support.models import Layers

W = 6


@torch.library.custom_op("policylang_tests::fill", mutates_args=("noise",))
def fill(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    noise.add_(x.sigmoid())
    return x * noise, x.cos()


def _filled(h: Tensor, _: Tensor) -> Tensor:
    noise = torch.ones_like(h.detach())
    result, other = fill(h.detach(), noise)
    return h * result.mul_(2) * noise + other


def _foreach(h: Tensor, _: Tensor) -> Tensor:
    both = [h.detach().clone(), h.detach().sin()]
    torch._foreach_mul_(both, 0.5)
    return h * both[0] + both[1]


def _best(h: Tensor, _: Tensor) -> Tensor:
    values, _ = h.softmax(-1).topk(2)
    values /= values.sum(-1, keepdim=True)
    return h * values[..., :1]


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sin": lambda h, _: h.sin(), "exp": lambda h, _: h.clamp(-2, 2).exp(), "clone": lambda h, _: h.clone(),
    "square": lambda h, _: h * h, "add": lambda h, g: h + g.mean(), "detach": lambda h, _: h.detach(),
    "softmax": lambda h, _: h.softmax(-1), "dropout": lambda h, _: F.dropout(h, 0.3), "best": _best, "fill": _filled,
    "rrelu": lambda h, _: F.rrelu(h, training=True), "alpha": lambda h, _: F.alpha_dropout(h, 0.3, True),
    "foreach": _foreach, "data": lambda h, _: h.data,
    "out": lambda h, _: h * torch.sin(h.detach(), out=torch.empty_like(h.detach())),
    "rows": lambda h, _: h[-4:], "turned": lambda h, _: h.mT, "view": lambda h, _: h.view_as(h),
    "strided": lambda h, _: h.as_strided((4, 4), (h.stride(0), h.stride(1))), "chunk": lambda h, _: h.chunk(2)[0],
    "sin_": lambda h, _: h.sin_(), "add_": lambda h, g: h.add_(g.detach().mean()), "zero_": lambda h, _: h[0].zero_(),
    "fill_": lambda h, _: h[-1:].fill_(0.5), "mask_": lambda h, _: h.masked_fill_(h > 0.4, 0.1),
    "dropout_": lambda h, _: F.dropout(h, 0.3, True, True), "data_": lambda h, _: h.data.add_(1),
}  # fmt: skip
"""Of a value and another; the result of one that ends in ``_`` is not taken."""
NAMED = [
    "mul",
    "sin",
    "empty_like",
    "clone",
    "add_",
    "view",
    "pointwise",
    "random",
    "fill",
    "topk",
    "every 2nd everything",
]
SELECTED = [f"{each} in block" for each in NAMED]
SELECTED += [f"everything in block where {each}" for each in ("is mutated", "feeds backward")]


class Program(nn.Module):
    def __init__(self, steps: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.steps, self.linear = steps, nn.Linear(W, W)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.linear(x)]
        for name, one, other in self.steps:
            made = STEPS[name](values[one % len(values)], values[other % len(values)])
            values += [] if name.endswith("_") else [made]
        return x + sum(each.mean().tanh() for each in values[-3:]) * self.linear(x)


def forwards_first(model: nn.Module, number: int) -> Tensor:
    inputs = torch.randn(2, W, W, generator=torch.Generator().manual_seed(number))
    losses = [model(each).square().mean() for each in inputs]
    for loss in losses:
        loss.backward()
    return torch.stack(losses).sum()


def trained(steps: list[tuple[str, int, int]], policy: str | None) -> list[Step] | None:
    """None where it is refused, by autograd or by name."""
    torch.manual_seed(0)
    model = Layers(Program(steps), Program(steps))
    if policy is not None:
        policylang.checkpoint_model(model, policylang.parse(policy))
    with suppress(RuntimeError, PolicyGraphError):
        return train(model, forwards_first)
    return None


DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "steps": st.lists(
        st.tuples(st.sampled_from([*STEPS]), st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=7
    ),
    "ground": st.sampled_from(["recompute", "save"]),
    "rules": st.lists(
        st.tuples(st.sampled_from(["save", "recompute", "offload"]), st.sampled_from(SELECTED)), max_size=2
    ),
}


@given(**DRAWN)
@example([("foreach", 0, 0), ("view", 0, 0), ("turned", 2, 0), ("fill_", 2, 0)], "recompute", [])
@settings(max_examples=examples(6, 20))
def test_random_writes_in_place_train_on_the_same_bits(steps, ground, rules) -> None:
    lines = [f"optional {ground} everything in block", *(f"optional {action} {selector}" for action, selector in rules)]
    expected, found = trained(steps, None), trained(steps, "\n".join(lines))
    assert (expected is None) == (found is None)
    if expected is not None and found is not None:
        assume(all(bool(gradient.isfinite().all()) for step in expected for gradient in step.gradients.values()))
        assert differences(expected, found) == []


@pytest.mark.slow
@given(**DRAWN)
@settings(max_examples=300)
def test_many_random_writes(steps, ground, rules) -> None:
    test_random_writes_in_place_train_on_the_same_bits.hypothesis.inner_test(steps, ground, rules)
