"""Blocks whose operators share memory, or change a shape, and do not say so where one would look."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policylang
from policylang.errors import PolicyGraphError
from tests.backends.eager.test_observed import Layer, Model, batch, plainly
from tests.support.eager import differences, train
from tests.support.models import Function

SAVES_ALL = "blocks layers.*; save everything in block"
SAVES_SOME = "blocks layers.*; recompute everything in block; optional save first addmm per block; optional save add"


def cells() -> nn.Module:
    """A cell writes the gates in place, on pieces of one product that ``unsafe_split`` makes."""

    def forward(block: Any, x: Tensor) -> Tensor:
        hidden = state = torch.zeros_like(x)
        for _ in range(2):
            hidden, state = block.cell(x, (hidden, state))
        return hidden + x

    return Function(forward, cell=nn.LSTMCell(8, 8))


def recurrent() -> nn.Module:
    """It lays its steps one behind the other and then says ``transpose_``."""
    parts = {"recurrent": nn.RNN(8, 8, batch_first=True), "out": nn.Linear(8, 8)}
    return Function(lambda block, x: block.out(block.recurrent(x.view(2, 2, 8))[0]).view(4, 8) + x, **parts)


def adds_in_place() -> nn.Module:
    """A product of three dimensions is the ``_unsafe_view`` of one of two."""

    def forward(block: Any, x: Tensor) -> Tensor:
        out = x.view(2, 2, 8) @ block.weight
        out += x.view(2, 2, 8)
        return out.view(4, 8).sin()

    return Function(forward, weight=nn.Parameter(torch.randn(8, 8)))


class Local(torch.autograd.Function):
    """Returns its argument as it is, as DTensor's ``to_local`` does."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient


def reads_its_local_weight() -> nn.Module:
    return Function(lambda block, x: (x @ Local.apply(block.weight)).sin(), weight=nn.Parameter(torch.randn(8, 8)))


@pytest.mark.parametrize("policy", [SAVES_ALL, SAVES_SOME])
@pytest.mark.parametrize("kind", [cells, recurrent, adds_in_place, reads_its_local_weight])
def test_what_is_saved_is_what_the_backward_would_have_read(kind: Callable[[], nn.Module], policy: str) -> None:
    model = policylang.checkpoint_model(Model(kind), policylang.parse(policy), strict=True)
    assert differences(train(Model(kind), plainly), train(model, plainly)) == []
    report = policylang.report(model)
    assert report.audit.differences == (), "and it is as large as the plan says"
    assert policy == SAVES_SOME or report.recomputed.names == ()


def packed() -> nn.Module:
    """The lengths of its sequences are read by C++, and by no operator."""

    def forward(block: Any, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x.view(2, 2, 8), [2, 1], batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(block.recurrent(packed)[0], batch_first=True)
        return out.reshape(4, 8) + x

    return Function(forward, recurrent=nn.LSTM(8, 8, batch_first=True))


class CountsKinds(Layer):
    def forward(self, x: Tensor) -> Tensor:
        kinds, counts = (x > 0).flatten().int().unique(return_counts=True)
        return super().forward(x * counts.tolist()[0] + kinds.sum())


@pytest.mark.parametrize(
    ("kind", "policy"), [(packed, SAVES_ALL), (CountsKinds, "recompute everything in block; save _unique2 in block")]
)
def test_integers_that_are_read_without_an_operator(kind: Callable[[], nn.Module], policy: str) -> None:
    model = policylang.checkpoint_model(Model(kind), policylang.parse(policy), strict=True)
    assert differences(train(Model(kind), plainly), train(model, plainly)) == []


class ViewsAsItIs(Layer):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).sin()
        return self.down(hidden.view(4, 8)) + x


def test_a_view_that_gives_its_argument_as_it_is_has_nothing_to_keep() -> None:
    """Such views come and go with the hooks of those who track modules, and a recomputation has no place for them."""
    policy = policylang.parse("recompute everything in block; save view in block")
    model = policylang.checkpoint_model(Model(ViewsAsItIs), policy, strict=True)
    assert differences(train(Model(ViewsAsItIs), plainly), train(model, plainly)) == []
    report = policylang.report(model)
    assert report.audit.differences == ()
    assert report.rules[1].matched >= 2


class KeepsPieces(Layer):
    """As FSDP leaves views of its one flat parameter where a module had its own."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.ones(16))
        self.piece: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.piece = self.flat.split(8)[0]
        return super().forward(x * self.piece)


def test_views_that_an_optimizer_has_made_stale_lie_around_unread() -> None:
    def run(model: nn.Module, number: int) -> Tensor:
        loss = model(batch(number)[: 4 - number]).sum()  # of another shape each time: observed each time
        loss.backward()
        return loss

    policy = policylang.parse("blocks layers.*; recompute everything in block")
    model = policylang.checkpoint_model(Model(KeepsPieces), policy, strict=True)
    assert differences(train(Model(KeepsPieces), run), train(model, run)) == []


def test_sparse_values_are_saved() -> None:
    class Scatters(Layer):
        def forward(self, x: Tensor) -> Tensor:
            places = torch.tensor([[0, 1, 2], [2, 0, 1]])
            return super().forward(torch.sparse.mm(torch.sparse_coo_tensor(places, self.up.bias[:3], (4, 4)), x))

    model = policylang.checkpoint_model(Model(Scatters), policylang.parse(SAVES_ALL), strict=True)
    assert differences(train(Model(Scatters), plainly), train(model, plainly)) == []


class LetGo(nn.Module):
    """Its weight lies in memory that it fills before the product and lets go of behind it, as sharding libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.randn(8, 8))
        self.whole = torch.empty(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.whole.untyped_storage().resize_(8 * 8 * 4)
        with torch.no_grad():
            self.whole.data.copy_(self.part)  # no write that autograd counts
            scale = (x @ self.whole).sin()
        self.whole.untyped_storage().resize_(0)
        return x * self.part.sum() * scale


def lets_go_of_a_value(block: Any, x: Tensor) -> Tensor:
    product = x @ block.weight
    out = product.sin()
    product.untyped_storage().resize_(0)
    return out


def test_memory_from_outside_that_was_let_go_is_filled_again() -> None:
    model = policylang.checkpoint_model(Model(LetGo), policylang.parse("undecided -> recompute"), strict=True)
    assert differences(train(Model(LetGo), plainly), train(model, plainly)) == []


def test_a_saved_value_whose_memory_was_let_go_is_refused() -> None:
    model = Model(lambda: Function(lets_go_of_a_value, weight=nn.Parameter(torch.randn(8, 8))))
    model = policylang.checkpoint_model(model, policylang.parse("undecided -> save"))
    with pytest.raises(PolicyGraphError, match="memory was freed or resized"):
        plainly(model, 0)
