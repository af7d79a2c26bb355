"""`save … as` in eager: checkpoints hold narrow values, and autograd gets them back rounded, however it asks."""

import copy
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import policylang
from policylang.errors import PolicyMatchError
from policylang.language.syntax import NarrowForm
from tests.support.by_hand import BF16, ROWS8, narrowed_by_hand
from tests.support.models import Layers

TEXT = "recompute everything in block\nsave matmul in block as {}"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.silu(self.up(x)).t().contiguous().t())


def pair() -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Layers(Block(), Block())
    return model, copy.deepcopy(model), torch.randn(32, 16)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("form", [BF16, ROWS8], ids=str)
@pytest.mark.parametrize(("products", "crossing"), [(True, False), (False, True), (True, True)])
def test_the_same_bits_as_by_hand(form: NarrowForm, products: bool, crossing: bool) -> None:
    """What crosses blocks is narrowed as any other value; what the last one returns is not."""
    model, other, x = pair()
    rules = [f"optional save {what} in block as {form.text}" for what in ("mm",) * products + ("add",) * crossing]
    policylang.checkpoint_model(model, policylang.parse("\n".join(["recompute everything in block", *rules])))
    narrowed_by_hand(other, form, products=products, crossing=crossing)
    for _ in range(2):
        for one in (model, other):
            one(x).square().mean().backward()
        assert all(map(torch.equal, gradients(model), gradients(other)))
    report = policylang.report(model)
    kept = products * [(32, 64), (32, 64)] + crossing * [(32, 16)]
    assert report.saved.bytes == sum(form.bytes(each, each[0] * each[1]) for each in kept)
    saved = sum(each.narrowed_bytes or 0 for each in report.rules) + report.saved.bytes
    assert saved == sum(4 * rows * columns for rows, columns in kept)
    assert report.audit.agrees


@pytest.mark.parametrize("form", ["bfloat16", "float8_e5m2 per row"])
def test_a_graph_that_is_kept_and_a_second_derivative(form: str) -> None:
    model, plain, x = pair()
    policylang.checkpoint_model(model, policylang.parse(TEXT.format(form)))
    out = model(x).square().mean()
    out.backward(retain_graph=True)
    first = gradients(model)
    out.backward()
    assert all(torch.equal(one, two) for one, two in zip(first, gradients(model), strict=True))

    def penalty(each: nn.Module) -> list[Tensor]:
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


def test_what_crosses_blocks_is_narrowed_once_and_frees_the_value() -> None:
    """And it is said where no checkpoint takes it."""
    model, _, x = pair()
    text = (
        "recompute everything in block\nsave everything in block where crosses block as bfloat16\noffload mm in block"
    )
    policylang.checkpoint_model(model, policylang.parse(text))
    between = model.layers[0](x)
    freed = ref(between.untyped_storage())
    out = model.layers[1](between)
    del between
    assert freed() is None
    out.sum().backward()
    assert policylang.report(model).audit.agrees
    for layer in model.layers:
        x = layer(x.clone())
    del x
    assert any("stayed on the device" in each for each in policylang.report(model).notes)


class Turned(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t().contiguous().t()


def test_a_view_that_a_block_returns_stays_as_it_is() -> None:
    model, _, x = pair()
    for layer in model.layers:
        layer.__class__ = Turned
    text = "recompute everything in block\nsave clone in block as bfloat16"
    policylang.checkpoint_model(model, policylang.parse(text))
    model(x).sum().backward()
    assert any("a view with other rows, which the next" in each for each in policylang.report(model).notes)
    assert policylang.report(model).audit.agrees
