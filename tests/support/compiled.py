"""Training steps under ``torch.compile``, to be compared bit by bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import policylang
from policylang.backends.torch_compile.backend import PolicyBackend
from policylang.backends.torch_compile.inductor import Inner
from tests.support.models import Example


class Trained(NamedTuple):
    losses: tuple[Tensor, ...]
    gradients: dict[str, Tensor]
    """Those of parameters, and of the inputs that require one."""
    buffers: dict[str, Tensor]


def train(
    example: Example,
    compile_model: Callable[[nn.Module], Callable[..., Any]] = lambda model: model,
    *,
    steps: int = 2,
    seed: int = 7,
) -> Trained:
    """Run some steps without an optimizer (gradients add up) on a freshly compiled model."""
    module, inputs, loss_fn = example
    torch._dynamo.reset()
    run = compile_model(module)
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = loss_fn(run(*inputs))
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: value.grad for name, value in module.named_parameters() if value.grad is not None}
    gradients |= {f"input {i}": value.grad for i, value in enumerate(inputs) if value.grad is not None}
    buffers = {name: value.detach().clone() for name, value in module.named_buffers()}
    return Trained(tuple(losses), gradients, buffers)


def backend_for(text: str, inner: Inner = "aot_eager", root: str = "") -> PolicyBackend:
    return policylang.backend(policylang.parse(text), inner=inner, root=root)


WITHOUT = "aot_eager_default_partitioner"
"""The same inner compiler, and the partitioner that saves what autograd saves. Not ``aot_eager``, whose min-cut
recomputes from buffers that have changed meanwhile: its gradients of ``counter`` are not those of the eager model."""


def assert_same_as_without(make: Callable[[], Example], backend: Any, **options: Any) -> None:
    """Training a model compiled by ``backend``, whose graphs are still there, is training it without a policy."""
    without, under = (
        train(make(), lambda model, each=each: torch.compile(model, backend=each), **options)
        for each in (WITHOUT, backend)
    )
    assert_bitwise_equal(under, without)


@contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before is found, nothing compiled inside is left."""
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def assert_bitwise_equal(left: Trained, right: Trained) -> None:
    """Every loss, gradient and buffer, and at least one gradient."""
    assert left.gradients
    assert left.gradients.keys() == right.gradients.keys()
    assert left.buffers.keys() == right.buffers.keys()
    different = [f"loss {i}" for i, pair in enumerate(zip(left.losses, right.losses, strict=True)) if not _same(*pair)]
    different += [name for name, gradient in left.gradients.items() if not _same(gradient, right.gradients[name])]
    different += [name for name, buffer in left.buffers.items() if not _same(buffer, right.buffers[name])]
    assert not different


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left, right)
