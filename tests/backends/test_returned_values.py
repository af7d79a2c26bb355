"""What a graph returns and its backward reads as well: activations at the end, values read, returned twice, views.

Min-cut may move what the backward makes of such a value into the forward. Then nothing of the backward reads the value
any more, and a plan that still has it read keeps or repeats what nobody keeps or repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import policylang
from policylang.backends.torch_compile.inductor import Inner

pytestmark = pytest.mark.usefixtures("nothing_compiled")

Function = Callable[[Tensor, Tensor, Tensor], Any]

POLICIES = {
    "auto": "undecided -> auto",
    "save": "undecided -> save",
    "recompute": "undecided -> recompute",
    "leave": "leave everything",
    "save products": "optional save matmul or mm or addmm",
    "recompute products": "optional recompute matmul or mm or addmm",
    "save everything": "save everything",
    "recompute everything": "optional recompute everything",
}
WITHOUT: dict[Inner, str] = {"aot_eager": "aot_eager_default_partitioner", "inductor": "inductor"}


class Returning(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.v = nn.Parameter(torch.randn(4, 4, generator=generator))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.w, self.v)


def step(module: nn.Module, x: Tensor, backend: Any) -> tuple[list[Tensor], list[Tensor | None]]:
    """Every tensor that is returned, and every gradient."""
    torch._dynamo.reset()
    torch.manual_seed(7)
    module.zero_grad()
    x = x.clone().requires_grad_()
    returned = [leaf for leaf in pytree.tree_leaves(torch.compile(module, backend=backend)(x)) if is_tensor(leaf)]
    losses = [(number + 1) * (value.square() + value).sum() for number, value in enumerate(returned)]
    torch.stack([loss for loss in losses if loss.requires_grad]).sum().backward()
    return [value.detach() for value in returned], [x.grad, *(parameter.grad for parameter in module.parameters())]


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


KNOWN: dict[tuple[str, Inner], tuple[list[Tensor], list[Tensor | None]]] = {}
"""What comes of a named case without a policy."""


def assert_same_as_without(module: nn.Module, x: Tensor, text: str, inner: Inner, name: str = "") -> None:
    wanted = KNOWN.get((name, inner)) or step(module, x, WITHOUT[inner])
    if name:
        KNOWN[name, inner] = wanted
    backend = policylang.backend(policylang.parse(text), inner=inner)
    found = step(module, x, backend)
    close = {"rtol": 0.0, "atol": 0.0} if inner == "aot_eager" else {}  # Inductor fuses otherwise, and rounds otherwise
    torch.testing.assert_close(found, wanted, equal_nan=True, **close)
    audit = policylang.report(backend).audit
    assert audit.agrees


# --- activations at the end of a graph --------------------------------------------------------------------------------

_ARGUMENTS: dict[str, tuple[Any, ...]] = {"Softmax": (1,), "LogSoftmax": (1,), "Softmin": (1,), "Threshold": (0.1, 0.2)}
ACTIVATIONS = [name for name in nn.modules.activation.__all__ if name != "MultiheadAttention"]


def ending_in(activation: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    end = getattr(nn, activation)(*_ARGUMENTS.get(activation, ()))
    if activation == "Softmax2d":
        return nn.Sequential(nn.Conv2d(4, 4, 1), end), torch.randn(2, 4, 3, 3)
    return nn.Sequential(nn.Linear(16, 16), end), torch.randn(4, 16)


@pytest.mark.parametrize("activation", ["ReLU", "Sigmoid", "Hardtanh", "GELU", "PReLU", "Softmax", "Softplus"])
def test_min_cut_beside_an_activation_at_the_end(activation: str) -> None:
    assert_same_as_without(*ending_in(activation), POLICIES["auto"], "aot_eager", activation)


@pytest.mark.parametrize(("activation", "policy"), [("ReLU", "auto"), ("ReLU", "save products")])
def test_an_activation_at_the_end_under_inductor(activation: str, policy: str) -> None:
    assert_same_as_without(*ending_in(activation), POLICIES[policy], "inductor", activation)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_at_the_end_under_every_policy(activation: str, policy: str, inner: Inner) -> None:
    assert_same_as_without(*ending_in(activation), POLICIES[policy], inner, activation)


# --- values returned in other ways ------------------------------------------------------------------------------------


def written_before(x: Tensor, w: Tensor, v: Tensor) -> Any:
    clone = (x @ w).sigmoid().clone()
    clone[0] = 0
    return clone, clone @ v


def relu_of(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).relu()


def in_place(x: Tensor, w: Tensor, v: Tensor) -> Any:
    value = x @ w
    return value, value.relu_(), value @ v


RETURNING: dict[str, Function] = {
    "read": lambda x, w, v: ((c := x @ w), c @ w),
    "twice": lambda x, w, v: ((c := x @ w), c),
    "read and twice": lambda x, w, v: ((c := relu_of(x, w)), c @ v, c),
    "views": lambda x, w, v: ((c := x @ w), c.t(), c.view(-1)),
    "views that are read": lambda x, w, v: ((c := relu_of(x, w)), c.t(), (c.t() @ v).sigmoid()),
    "as they came in": lambda x, w, v: (x, x @ w, w),
    "inputs and views of them": lambda x, w, v: (x, w.t(), v, (x @ w * w).relu()),
    "one after the other": lambda x, w, v: ((a := relu_of(x, w)), (a @ v).relu()),
    "the same one at both ends": lambda x, w, v: ((b := ((x @ w).sigmoid() * v).tanh()), x @ w, b),
    "pieces": lambda x, w, v: ((a := relu_of(x, w)), *a.split(2), a.split(2)[0] @ v),
    "a gradient": lambda x, w, v: (x.exp() * v, x.exp(), (x * w).exp(), w.exp()),
    "a softmax and its maximum": lambda x, w, v: ((a := (x @ w).softmax(-1)), a @ v, a.max(-1)[0]),
    "detached": lambda x, w, v: ((a := relu_of(x, w)), a.detach(), (a.detach() @ v).exp()),
    "dropped out": lambda x, w, v: ((a := torch.dropout(x @ w, 0.5, True)), (a @ v).relu()),
    "beside what is no tensor": lambda x, w, v: ((a := relu_of(x, w)), 3, None, a > 0, a @ v),
    "nested": lambda x, w, v: {"a": (a := relu_of(x, w)), "b": [a, (a @ v, a.t())]},
    "of a norm": lambda x, w, v: ((a := nn.functional.layer_norm(x @ w, (4,), v[0], v[1])), a.relu(), a.mean()),
    "the largest": lambda x, w, v: (*relu_of(x, w).topk(2), relu_of(x, w).sum()),
    "written to": in_place,
    "written to before": written_before,
}


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("policy", ["auto", "recompute everything"])
@pytest.mark.parametrize("function", RETURNING)
def test_values_that_are_returned(function: str, policy: str) -> None:
    assert_same_as_without(Returning(RETURNING[function]), X, POLICIES[policy], "aot_eager", function)


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("function", RETURNING)
def test_values_that_are_returned_under_every_policy(function: str, policy: str, inner: Inner) -> None:
    assert_same_as_without(Returning(RETURNING[function]), X, POLICIES[policy], inner, function)


def test_what_min_cut_moved_a_reader_of_is_neither_kept_nor_repeated() -> None:
    """The product that is returned: the backward reads its transpose, which min-cut has the forward keep."""
    backend = policylang.backend(policylang.parse("undecided -> auto"), inner="aot_eager")
    step(Returning(RETURNING["read"]), torch.ones(4, 4), backend)
    report = policylang.report(backend)
    assert report.saved.bytes == 4 * 4 * 4
    assert not report.recomputed.names


def test_the_seeds_of_inductors_dropout_are_kept_and_its_numbers_drawn_again() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.5))
    x = torch.randn(4, 16)
    backend = policylang.backend(policylang.parse("recompute everything"))
    wanted = step(module, x, "inductor")
    torch.testing.assert_close(step(module, x, backend), wanted)
    report = policylang.report(backend)
    assert report.saved.names == ("inductor_seeds_default",)
    assert report.decisions["inductor_seeds_default"].reason.startswith("a seed")


# --- random modules ---------------------------------------------------------------------------------------------------

ONE = (
    Tensor.relu, Tensor.sigmoid, Tensor.tanh, Tensor.t, Tensor.detach, Tensor.clone, Tensor.contiguous,
    lambda a: a.softmax(-1), lambda a: a.view(-1).view(4, 4), lambda a: a.chunk(2)[1].repeat(2, 1),
    lambda a: a.clone().mul_(0.5), lambda a: a.sum(0, keepdim=True).expand(4, 4),
    lambda a: a.max(-1, keepdim=True)[0] * a, lambda a: torch.dropout(a, 0.5, True),
)  # fmt: skip
TWO = (torch.mm, torch.mul, torch.add, torch.minimum, lambda a, b: torch.where(a > b, a, b))


@st.composite
def functions(draw: st.DrawFn) -> Function:
    """Some operators on earlier values, and some of the values returned, some of them twice."""
    calls: list[tuple[Any, tuple[int, ...]]] = []
    for count in range(3, 3 + draw(st.integers(1, 7))):
        reads = draw(st.sampled_from([1, 2]))
        operator = draw(st.sampled_from(ONE if reads == 1 else TWO))
        calls.append((operator, tuple(draw(st.integers(max(0, count - 4), count - 1)) for _ in range(reads))))
    returned = draw(st.lists(st.integers(0, 2 + len(calls)), min_size=1, max_size=5))

    def function(*given: Tensor) -> Any:
        values = list(given)
        for operator, reads in calls:
            values.append(operator(*(values[read] for read in reads)))
        return (values[-1] * given[1], *(values[number] for number in returned))

    return function


def same_for_random_modules(function: Function, policy: str) -> None:
    assert_same_as_without(Returning(function), torch.linspace(-1, 1, 16).view(4, 4), POLICIES[policy], "aot_eager")


@settings(max_examples=6)
@given(functions(), st.sampled_from(sorted(POLICIES)))
def test_random_modules_that_return_values_of_the_middle(function: Function, policy: str) -> None:
    same_for_random_modules(function, policy)


@pytest.mark.slow
@settings(max_examples=600)
@given(functions(), st.sampled_from(sorted(POLICIES)))
def test_many_random_modules_that_return_values_of_the_middle(function: Function, policy: str) -> None:
    same_for_random_modules(function, policy)
