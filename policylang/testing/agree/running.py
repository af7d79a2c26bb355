"""One step of a model on each path, from the same weights and the same random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

from policylang.errors import PolicyError
from policylang.language.codes import is_error
from policylang.language.syntax import Policy
from policylang.testing.agree.data import Numbers, Ran, Refused

LossFn = Callable[..., Tensor]


@frozen(eq=False)
class Setup:
    """A model that can be made again, and its step."""

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
            return self._fresh()

    def _fresh(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model = self.factory()
        if self.made and self.made[0] is model:
            raise ValueError("the factory returns one model over and over: it has to make a new one each time")
        self.made[:] = [model]
        own = dict(_tensors(model))
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
    """What is handed to the loss beside the model: a batch that is no tuple or list is one thing."""
    return tuple(given) if isinstance(given, tuple | list) else (given,)


def run_plain(setup: Setup) -> Numbers:
    """The model as it is."""
    model = setup.fresh()
    with setup.guard():
        return _backward(model, setup.loss_fn(model, *setup.batch))


def run_alone(setup: Setup, alone: Callable[[Setup, nn.Module], Numbers]) -> Numbers:
    """A path without the policy."""
    model = setup.fresh()
    with setup.guard():
        return alone(setup, model)


def run_eager(setup: Setup, model: nn.Module, policy: Policy) -> Ran:
    """With a checkpoint around each block, operator by operator."""
    import policylang
    from policylang.backends.eager.checkpoint import sessions_of

    policylang.checkpoint_model(model, policy)
    numbers = _backward(model, setup.loss_fn(model, *setup.batch))
    regions = [region for session in sessions_of(model) for region in session.regions.values()]
    plans = [kept.instructions.plan for region in regions for kept in region.kept.values()]
    report = policylang.report(model)
    reports = report.graphs or (report,)
    return Ran(numbers, report, tuple((plan.facts, each) for plan, each in zip(plans, reports, strict=True)))


def run_joint(setup: Setup, model: nn.Module, policy: Policy) -> Ran:
    """Under ``torch.compile``, without Inductor: what is compared are decisions, not kernels."""
    import policylang

    backend = policylang.backend(policy, inner="aot_eager", agree=False)
    with _compiler_to_itself():
        numbers = _compiled(setup, model, backend)
        findings = [found for graph in backend.graphs for found in graph.findings]
        graphs = tuple((found.rewritten, found.report) for found in findings if found.rewritten is not None)
        return Ran(numbers, policylang.report(backend), graphs)


def run_joint_alone(setup: Setup, model: nn.Module) -> Numbers:
    """The same without a policy: everything that autograd saves is saved."""
    with _compiler_to_itself():
        return _compiled(setup, model, "aot_eager_default_partitioner")


def run_flat(setup: Setup, model: nn.Module, policy: Policy) -> Ran:
    """As one graph of the whole step."""
    import policylang
    from policylang.backends.graph_registry import outcome_of

    step = policylang.trace_step(model, setup.loss_fn, *setup.batch).apply(policy, agree=False)
    numbers = _traced(setup, model, step)
    outcome = outcome_of(step.gm)
    assert outcome is not None  # the policy was applied
    return Ran(numbers, step.report, ((outcome[0].facts, step.report),))


def run_flat_alone(setup: Setup, model: nn.Module) -> Numbers:
    """The same without a policy."""
    import policylang

    return _traced(setup, model, policylang.trace_step(model, setup.loss_fn, *setup.batch))


@frozen
class Path:
    run: Callable[[Setup, nn.Module, Policy], Ran]
    alone: Callable[[Setup, nn.Module], Numbers] | None
    """The path without a policy; None where that is the plain model."""


PATHS = {
    "eager": Path(run_eager, None),
    "joint": Path(run_joint, run_joint_alone),
    "flat": Path(run_flat, run_flat_alone),
}


def attempt(path: str, setup: Setup, policy: Policy) -> Ran | Refused:
    """Run a path, or say why it cannot."""
    model = setup.fresh()
    try:
        return PATHS[path].run(setup, model, policy)
    except PolicyError as error:
        return Refused(tuple(found for found in error.diagnostics if is_error(found)))
    except (Exception, SystemExit) as error:  # whatever a compiler or a tracer raises about the model is the answer
        lines = str(error).strip().splitlines()
        return Refused(error=f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


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
    """Nothing compiled before is found, nothing compiled inside is left; what backends know of it goes as well."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def _compiled(setup: Setup, model: nn.Module, backend: Any) -> Numbers:
    return _backward(model, setup.loss_fn(torch.compile(model, backend=backend), *setup.batch))


def _traced(setup: Setup, model: nn.Module, step: Any) -> Numbers:
    torch.manual_seed(setup.seed)
    loss, gradients = step(*setup.batch)
    return Numbers(loss.detach(), gradients, _buffers(model))


def _backward(model: nn.Module, loss: Tensor) -> Numbers:
    loss.backward()
    gradients = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
    return Numbers(loss.detach(), gradients, _buffers(model))


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_buffers()}


def _tensors(model: nn.Module) -> Sequence[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
