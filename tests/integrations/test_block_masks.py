"""FlexAttention whose BlockMask is an input of the step: right to the bit, or refused by name."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as library
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import policylang
from tests.support.versions import needs_compilers_under_dispatch_modes

LENGTH = 256
POLICY = policylang.parse("undecided -> recompute\nsave attention in block\nsave first matmul per block")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        q, k, v = (part.unflatten(-1, (1, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        attended = flex_attention(q, k, v, block_mask=mask)
        assert isinstance(attended, Tensor)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def loss_of(model: nn.Module, x: Tensor, mask: BlockMask) -> Tensor:
    return model(x, mask).square().mean()  # type: ignore[no-any-return]


def mask_of(documents: Tensor) -> BlockMask:
    def inside(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[query] == documents[key])

    return create_block_mask(inside, None, None, LENGTH, LENGTH, device="cpu")


def documents(length: int) -> Tensor:
    return torch.arange(LENGTH) // length


def step(model: nn.Module, forward: nn.Module, x: Tensor, mask: BlockMask) -> list[Tensor]:
    model.zero_grad()
    loss = loss_of(forward, x, mask)
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.fixture
def x(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Torch refuses the backward on a CPU because Inductor has no kernel there; other compilers have."""
    monkeypatch.setattr(library, "_validate_device", lambda *_tensors: None)
    torch._dynamo.reset()
    return torch.randn(1, LENGTH, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
def test_compiled_each_mask_is_its_own(x: Tensor) -> None:
    plain, model = Model(), Model()
    wanted = torch.compile(plain, backend="aot_eager")
    compiled = torch.compile(model, backend=policylang.backend(POLICY, inner="aot_eager"))
    for length in (100, 70):
        mask = mask_of(documents(length))
        assert equal(step(model, compiled, x, mask), step(plain, wanted, x, mask))
    report = policylang.report(compiled)
    assert [row.matched for row in report.rules] == [2, 2]


@pytest.mark.slow
def test_a_traced_step_holds_its_mask_and_follows_what_is_written_to_it(x: Tensor) -> None:
    model, ids = Model(), documents(100)
    mask = mask_of(ids)
    traced = policylang.trace_step(model, loss_of, x, mask)
    policylang.apply(traced.gm, POLICY)
    for length in (100, 60):
        ids.copy_(documents(length))
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            getattr(mask, name).copy_(getattr(mask_of(ids), name))
        loss, gradients = traced(x, mask)
        plain = Model()
        assert equal([loss, *(gradients[name] for name, _ in model.named_parameters())], step(plain, plain, x, mask))
    with pytest.raises(policylang.PolicyGraphError, match="APL364") as refused:
        traced(x, mask_of(documents(70)))
    assert refused.value.diagnostics[0].details == ("input[1]: traced with the BlockMask, called with another",)
    assert "may be written to in place" in str(refused.value.diagnostics[0].help)


@needs_compilers_under_dispatch_modes
def test_in_eager_it_is_refused_by_name(x: Tensor) -> None:
    """What runs compiled or not at all shows a checkpoint no operators; torch's own words are about dispatch modes."""
    eager = Model()
    policylang.checkpoint_model(eager, POLICY)
    with pytest.raises(policylang.PolicyGraphError, match=r"APL396.*`layers\.0` .*`flex_attention`"):
        loss_of(eager, x, mask_of(documents(100)))


@pytest.mark.slow
def test_in_compiled_blocks_it_is_right(x: Tensor) -> None:
    mask = mask_of(documents(100))
    plain, model = Model(), Model()
    for each in plain.layers:
        each.compile(backend="aot_eager")
    policylang.checkpoint_model(model, POLICY)
    for each in model.layers:
        each.compile(backend=policylang.backend(POLICY, inner="aot_eager"))
    assert equal(step(model, model, x, mask), step(plain, plain, x, mask))
