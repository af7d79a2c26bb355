"""A backward that is taken in parts, as pipeline schedules split it: for the inputs first, then for each weight."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import policylang
from policylang.errors import PolicyGraphError

POLICIES = [
    "recompute everything in block",
    "recompute everything in block; save addmm in block",
    "recompute everything in block; save sin in block; save last addmm per block",
    "undecided -> save",
]


RUNS: list[nn.Module] = []
"""A recomputation puts the attributes of a block back."""


class Block(nn.Module):
    """Two branches that share nothing but their input; one draws, the other writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.other = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        RUNS.append(self)
        left = nn.functional.dropout(self.up(self.norm(x)).sin(), 0.2)
        return self.down(left), (self.other(x.sin()) * 2).relu_().exp()


class Model(nn.Module):
    def __init__(self, blocks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        left = right = x
        for layer in self.layers:
            left, right = layer(left + right)
        return left, right


def model(text: str = "", blocks: int = 1) -> Model:
    found = Model(blocks)
    return policylang.checkpoint_model(found, policylang.parse(f"blocks layers.*; {text}")) if text else found


def inputs() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("text", POLICIES)
def test_inputs_first_and_then_each_weight(text: str) -> None:
    """As zero-bubble schedules do. Torch's own checkpoint runs a block again for each weight."""

    def split(model: Model) -> list[Tensor]:
        x = inputs()
        loss = sum(each.sum() for each in model(x))
        _, groups = stage_backward_input([loss], None, [x], model.parameters())
        stage_backward_weight(model.parameters(), groups)
        return [each.grad for each in (x, *model.parameters())]

    under = model(text, 2)
    for _ in range(2):
        under.zero_grad()
        expected = split(model("", 2))
        RUNS.clear()
        assert all(map(torch.equal, split(under), expected))
        assert [RUNS.count(each) for each in under.layers] == [3, 3]


def halves(model: Model, x: Tensor) -> None:
    for each in model(x):
        each.sum().backward()


def retained(model: Model, x: Tensor) -> None:
    left, right = model(x)
    (left * right).sum().backward(retain_graph=True)
    left.sum().backward()
    right.sum().backward()


def twice(model: Model, x: Tensor) -> None:
    left, right = model(x)
    right.sum().backward()
    (slope,) = torch.autograd.grad(left.sum(), x, create_graph=True)
    slope.square().sum().backward()


def weights(model: Model, x: Tensor) -> None:
    left, right = model(x)
    (block,) = model.layers
    for output, weight in ((left, block.down.weight), (right, block.other.weight)):
        (weight.grad,) = torch.autograd.grad(output.sum(), weight)


def interrupted(model: Model, x: Tensor) -> None:
    def stop(_gradient: Tensor) -> None:
        raise KeyError

    left, right = model(x)
    between = right * 2
    handle = between.register_hook(stop)
    left.sum().backward()
    for _ in range(2):
        with pytest.raises(KeyError):
            between.sum().backward()
    handle.remove()
    right.sum().backward()


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("run", [halves, retained, twice, weights, interrupted], ids=lambda run: run.__name__)
def test_a_backward_in_parts_gives_what_it_gives_without_a_policy(run: Callable[..., None], text: str) -> None:
    def gradients(model: Model) -> list[Tensor | None]:
        x = inputs()
        for _ in range(2):
            run(model, x)
        return [each.grad for each in (x, *model.parameters())]

    pairs = list(zip(gradients(model(text)), gradients(model()), strict=True))
    assert all(found is expected or torch.equal(found, expected) for found, expected in pairs)


def test_what_is_written_to_between_two_parts_is_an_error() -> None:
    under = model(POLICIES[0])
    left, right = under(inputs())
    left.sum().backward()
    with torch.no_grad():
        under.layers[0].other.weight.add_(1)
    said = r"APL395.*shape \[8, 8\] that another backward has recomputed, and that"
    with pytest.raises(PolicyGraphError, match=said):
        right.sum().backward()


class Lives(TorchDispatchMode):
    """By operator, the bytes that are alive when it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.found = 0, list[tuple[str, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            storage = each.untyped_storage() if isinstance(each, Tensor) else None
            if storage is not None and not hasattr(storage, "counted"):
                storage.counted = True
                self.live += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        if func is not torch.ops.aten.detach.default:
            self.found.append((str(func), self.live))
        return out

    def free(self, size: int) -> None:
        self.live -= size


@pytest.mark.parametrize("saves", [False, True])
def test_a_whole_backward_frees_as_early_as_torch_does(saves: bool) -> None:
    def lives(model: Model, wrap: Callable[..., Any] = lambda block: block) -> list[tuple[str, int]]:
        mode = Lives()
        for _ in range(2):
            left = right = inputs()
            with mode:
                for block in model.layers:
                    left, right = wrap(block)(left + right)
                mode.found.clear()
                (left + right).sum().backward()
        return mode.found

    addmm = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    options = {"context_fn": addmm} if saves else {}
    found = lives(model(POLICIES[saves], 3))
    expected = lives(model(blocks=3), lambda block: partial(checkpoint, block, use_reentrant=False, **options))
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [x for x, other in zip(found, expected, strict=True) if x[1] > other[1]] == []


@pytest.mark.parametrize("text", POLICIES)
def test_what_a_split_backward_has_read_is_freed(text: str) -> None:
    """Between the parts waits no more than without a policy, what nobody reads apart; behind the second one nothing."""

    def alive(model: Model, wrap: Callable[..., Any] = lambda block: block) -> tuple[int, ...]:
        mode, parameters = Lives(), [*model.parameters()]
        for each in parameters:
            each.grad = torch.zeros_like(each)
        with mode:
            x = inputs().mul(1).detach().requires_grad_()
            left = right = x
            for block in model.layers:
                left, right = wrap(block)(left + right)
            outputs = [left.sum() + right.sum()]
            del left, right
            _, groups = stage_backward_input(outputs, None, [x], model.parameters())
            del outputs
            x.grad = None
            between = mode.live
            mode.found.clear()
            stage_backward_weight(model.parameters(), groups)
            del groups
        return between, max(live for _, live in mode.found), mode.live

    without, under = model("", 3), model(text, 3)
    for _ in range(2):
        between, most, left = alive(without)
        found = alive(under)
    assert found[0] <= between or text == POLICIES[-1]  # which saves what no backward reads as well
    assert found[1] <= max(most, alive(model("", 3), lambda block: partial(checkpoint, block, use_reentrant=False))[1])
    assert found[2] == left  # the gradients of the parameters
