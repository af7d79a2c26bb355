"""Takes one step of a model on each path, from the same weights and random numbers: behind ``policylang agree``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor, fx, nn

import policylang
from policylang.api.load import PolicyLike, policy_of
from policylang.backends.path import path_named
from policylang.errors import PolicyError
from policylang.language.diagnostics import is_error
from policylang.language.syntax import Policy
from policylang.planning.capabilities import COMPARED
from policylang.testing.agreement import (
    Agreement,
    Equality,
    Numbers,
    NumbersComparison,
    PathRefusal,
    PathResult,
    PathRun,
    compare_decisions,
)

LossFn = Callable[..., Tensor]


@frozen(eq=False)
class Setup:
    """A model that can be made repeatedly, and its step."""

    factory: Callable[[], nn.Module]
    loss_fn: LossFn
    batch: tuple[Any, ...]
    seed: int = 0
    state: dict[str, Tensor] = field(factory=dict, repr=False)
    """Parameters and buffers of the first model made: every later one gets these values."""
    made: list[nn.Module] = field(factory=list, repr=False)
    """The model made last: a path may leave its marks on one."""
    guard: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around what is the caller's own: the factory, and the step without a policy."""

    def fresh(self) -> nn.Module:
        """A model as the first one was. Raises ValueError where the factory makes another, or none."""
        with self.guard():
            torch.manual_seed(self.seed)
            return self._reset(self.factory())

    def _reset(self, model: nn.Module) -> nn.Module:
        if self.made and self.made[0] is model:
            raise ValueError("the factory returns one model over and over: it has to make a new one each time")
        self.made[:] = [model]
        own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if not self.state:
            self.state.update({name: tensor.detach().clone() for name, tensor in own.items()})
        if own.keys() != self.state.keys():
            raise ValueError("the factory returns a model with other parameters and buffers each time")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(self.state[name])
                tensor.grad = None
        torch.manual_seed(self.seed)
        return model


def batch_of(given: Any) -> tuple[Any, ...]:
    """The arguments of the loss beside the model: a batch that is no tuple or list is one argument."""
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def run(setup: Setup, path: str, policy: Policy) -> PathRun | PathRefusal:
    """Take a step on a path, or report why it cannot be taken."""
    model, step = setup.fresh(), STEPS[path]
    try:
        with step.around():
            numbers, subject = step.take(setup, model, policy)
            found = path_named(path).report(subject) or ()
            graphs = tuple((each.rewritten, each.report) for each in found if each.rewritten is not None)
            return PathRun(numbers, policylang.report(subject), graphs)
    except PolicyError as error:
        return PathRefusal(tuple(found for found in error.diagnostics if is_error(found)))
    except (Exception, SystemExit) as error:  # whatever a compiler or a tracer raises about the model is the answer
        lines = str(error).strip().splitlines()
        return PathRefusal(error=f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


@contextmanager
def undisturbed() -> Iterator[None]:
    """One thread, so that sums are added up in one order, and the caller's random numbers as they were afterwards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _compiler_to_itself() -> Iterator[None]:
    """Forget what was compiled before, and afterwards what was compiled inside, in backends as well."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def _eager(setup: Setup, model: nn.Module, policy: Policy | None) -> tuple[Numbers, nn.Module]:
    """Eager, with a checkpoint around each block."""
    if policy is not None:
        policylang.checkpoint_model(model, policy)
    return _backward(model, setup.loss_fn(model, *setup.batch)), model


def _joint(setup: Setup, model: nn.Module, policy: Policy | None) -> tuple[Numbers, Any]:
    """Under ``torch.compile``, without Inductor: what is compared are decisions, not kernels. Without a policy all
    that autograd saves is saved."""
    backend: Any = "aot_eager_default_partitioner"
    if policy is not None:
        backend = policylang.backend(policy, inner="aot_eager", agree=False)
    return _backward(model, setup.loss_fn(torch.compile(model, backend=backend), *setup.batch)), backend


def _flat(setup: Setup, model: nn.Module, policy: Policy | None) -> tuple[Numbers, fx.GraphModule]:
    """One graph of the whole step."""
    step = policylang.trace_step(model, setup.loss_fn, *setup.batch)
    if policy is not None:
        step.apply(policy, agree=False)
    torch.manual_seed(setup.seed)
    loss, gradients = step(*setup.batch)
    return Numbers(loss.detach(), gradients, _buffers(model)), step.gm


def _backward(model: nn.Module, loss: Tensor) -> Numbers:
    loss.backward()
    gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    return Numbers(loss.detach(), gradients, _buffers(model))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_buffers()}


@frozen
class PathStep:
    """The function that takes a step on a path."""

    take: Callable[[Setup, nn.Module, Policy | None], tuple[Numbers, Any]]
    """The numbers, and what the path reports on."""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    is_plain: bool = False
    """The path without a policy is the plain model."""


STEPS = {
    "eager": PathStep(_eager, is_plain=True),
    "joint": PathStep(_joint, _compiler_to_itself),
    "flat": PathStep(_flat),
}
"""The step function of each path that is registered as compared."""


# --- numbers ---------------------------------------------------------------------------------------------------------


def compare_numbers(plain: Numbers, found: Numbers) -> NumbersComparison:
    return NumbersComparison(
        _equality({"the loss": plain.loss}, {"the loss": found.loss}),
        _equality(plain.gradients, found.gradients),
        _equality(plain.buffers, found.buffers),
    )


def _equality(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Equality:
    differing: list[str] = []
    largest, close = 0.0, True
    names = list(dict.fromkeys((*left, *right)))
    for name in names:
        one, other = left.get(name), right.get(name)
        if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
            differing.append(name)
            largest, close = math.inf, False
        elif not _same_bits(one, other):
            differing.append(name)
            wide = torch.complex128 if one.is_complex() else torch.float64
            apart = (one.detach().to(wide) - other.detach().to(wide)).abs().max().item()
            largest = max(largest, math.inf if math.isnan(apart) else apart)
            try:
                torch.testing.assert_close(one.detach(), other.detach())
            except AssertionError:
                close = False
    return Equality(len(names), tuple(differing), largest, close)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN is equal to itself here, and zero is not minus zero."""
    if not one.numel():
        return True
    bits = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return bool(torch.equal(*bits))


# --- all paths -------------------------------------------------------------------------------------------------------


def agree(
    model_factory: Callable[[], nn.Module],
    loss_fn: LossFn,
    batch: Any,
    policy: PolicyLike,
    *,
    paths: Sequence[str] | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda stage: None,
) -> Agreement:
    """Take one step of a model on every path under a policy, and compare what each decides, keeps and computes.

    ``model_factory()`` makes the model; it is called once a run, and each model gets the weights of the first.
    ``loss_fn(model, *batch)`` returns the loss, a scalar. ``paths`` are some of ``eager``
    (``policylang.checkpoint_model``), ``joint`` (``torch.compile`` without Inductor) and ``flat``
    (``policylang.trace_step``), by default all. Every run starts from ``seed`` and uses one thread, and what was
    compiled before is forgotten. ``progress`` is called with the name of each run before it begins.

    What counts as agreement is said in ``docs/agree.md``.

    Raises ``PolicyError`` for a policy that cannot be read, ``ValueError`` for a path there is not or a factory that
    does not make the same model anew each time, and what the plain model raises. A path that fails is a row of the
    result.
    """
    loaded = policy_of(policy)
    return compare_paths(Setup(model_factory, loss_fn, batch_of(batch), seed), loaded, paths, progress)


def compare_paths(
    setup: Setup, policy: Policy, paths: Sequence[str] | None, progress: Callable[[str], None]
) -> Agreement:
    """:func:`agree` on a model that can be made repeatedly; under its guard runs the caller's code."""
    wanted = COMPARED if paths is None else tuple(dict.fromkeys(paths))
    unknown = [path for path in wanted if path not in COMPARED]
    if unknown:
        raise ValueError(f"there is no path `{unknown[0]}`: there are {', '.join(COMPARED)}")
    with undisturbed():
        progress("the plain model")
        model = setup.fresh()
        with setup.guard():
            plain = _backward(model, setup.loss_fn(model, *setup.batch))
        results = tuple(_result(path, setup, policy, plain, progress) for path in wanted)
    ran = {result.path: result.ran for result in results if result.ran is not None}
    return Agreement(
        policy=policy.name,
        loss=plain.loss.item(),
        gradients=len(plain.gradients),
        results=results,
        decisions=compare_decisions(ran),
        torch_version=torch.__version__,
    )


def _result(path: str, setup: Setup, policy: Policy, plain: Numbers, progress: Callable[[str], None]) -> PathResult:
    progress(f"the {path} path")
    stepped = run(setup, path, policy)
    if isinstance(stepped, PathRefusal):
        return PathResult(path, refused=stepped)
    comparison = compare_numbers(plain, stepped.numbers)
    step = STEPS[path]
    if not comparison.bitwise and not step.is_plain:
        # A path may add gradients up in another order than autograd: then the policy must not change a bit of that.
        progress(f"the {path} path without the policy")
        model = setup.fresh()
        with setup.guard(), step.around():
            alone = step.take(setup, model, None)[0]
        comparison = evolve(comparison, as_without_policy=compare_numbers(alone, stepped.numbers).bitwise)
    return PathResult(path, ran=stepped, numbers=comparison)
