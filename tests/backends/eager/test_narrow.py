"""`save … as` in eager: checkpoints hold narrow values, and autograd gets them back rounded, however it asks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import policylang
from policylang.errors import PolicyMatchError
from tests.backends.test_narrow import BF16, rounded

TEXT = "recompute everything in block\nsave matmul in block as {}"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.silu(self.up(x)).t().contiguous().t())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _RoundedForBackward(torch.autograd.Function):
    """silu whose backward reads its input narrowed and widened: what a person would write."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.bfloat16())
        return functional.silu(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            wide = x.float().requires_grad_()
            return torch.autograd.grad(functional.silu(wide), wide, gradient)[0]


class _Product(torch.autograd.Function):
    """The product behind it reads silu of the rounded value."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x.bfloat16(), weight)
        return functional.silu(x).t().contiguous().t() @ weight.t()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            wide = x.float().requires_grad_()
            made = functional.silu(wide)
            back = torch.autograd.grad(made, wide, gradient @ weight)[0]
        return back, (made.detach().t().contiguous() @ gradient).t()


class ByHand(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + _Product.apply(self.up(x), self.down.weight)  # type: ignore[no-untyped-call]


def pair() -> tuple[Model, Model, Tensor]:
    torch.manual_seed(0)
    model = Model()
    return model, copy.deepcopy(model), torch.randn(32, 16)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def test_the_same_bits_as_by_hand() -> None:
    model, other, x = pair()
    for layer in other.layers:
        layer.__class__ = ByHand
    policylang.checkpoint_model(model, policylang.parse(TEXT.format("bfloat16")))
    for one in (model, other):
        one(x).square().mean().backward()
    for one, two in zip(gradients(model), gradients(other), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-9)
    report = policylang.report(model)
    assert report.saved.bytes == 2 * BF16.bytes((32, 64), 32 * 64)
    assert report.rules[1].narrowed_bytes == 2 * 32 * 64 * 2
    assert report.audit.agrees


def test_what_autograd_is_given_is_rounded() -> None:
    model, _, x = pair()
    policylang.checkpoint_model(model, policylang.parse(TEXT.format("float8_e4m3fn per row")))
    model(x).sum().backward()
    first = gradients(model)
    model(x).sum().backward()
    assert all(torch.equal(one, two) for one, two in zip(first, gradients(model), strict=True))
    assert not torch.equal(rounded(x, BF16), x)


@pytest.mark.parametrize("form", ["bfloat16", "float8_e5m2 per row"])
def test_a_graph_that_is_kept_and_a_second_derivative(form: str) -> None:
    model, plain, x = pair()
    policylang.checkpoint_model(model, policylang.parse(TEXT.format(form)))
    out = model(x).square().mean()
    out.backward(retain_graph=True)
    first = gradients(model)
    out.backward()
    assert all(torch.equal(one, two) for one, two in zip(first, gradients(model), strict=True))

    def penalty(each: Model) -> list[Tensor]:
        given = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(each(given).square().mean(), given, create_graph=True)
        slope.square().sum().backward()
        return gradients(each)

    for one, two in zip(penalty(model), penalty(plain), strict=True):
        assert (one - two).abs().max() <= 0.2 * two.abs().max()


def test_under_autocast_products_are_narrow_already() -> None:
    model, _, x = pair()
    policylang.checkpoint_model(model, policylang.parse(TEXT.format("bfloat16")))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(PolicyMatchError, match="which is that narrow already"):
        model(x)
    model, plain, x = pair()
    policylang.checkpoint_model(model, policylang.parse(TEXT.format("float8_e4m3fn per row")))
    for each in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = each(x).float().square().mean()
        loss.backward()
    for one, two in zip(gradients(model), gradients(plain), strict=True):
        assert 0 <= (one - two).abs().max() <= 0.2 * two.abs().max()
    assert policylang.report(model).rules[1].narrowed_bytes == 2 * (32 * 64 - 32 * 4)


def test_beside_values_on_the_host() -> None:
    model, plain, x = pair()
    text = "recompute everything in block\nsave mm in block as bfloat16\noffload silu in block"
    policylang.checkpoint_model(model, policylang.parse(text))
    for each in (model, plain):
        each(x).square().mean().backward()
    for one, two in zip(gradients(model), gradients(plain), strict=True):
        assert (one - two).abs().max() <= 0.02 * two.abs().max()
    report = policylang.report(model)
    assert report.offloaded.bytes == 2 * 32 * 64 * 4
    assert report.rules[1].narrowed_bytes
    assert report.audit.agrees


def test_what_a_block_returns_stays_as_it_is() -> None:
    model, _, x = pair()
    policylang.checkpoint_model(model, policylang.parse("recompute everything in block\nsave add in block as bfloat16"))
    with pytest.raises(PolicyMatchError, match="narrows nothing"):
        model(x)
