"""The tensors of a model and of an optimizer as flat lists, and both run on others in their place.

An optimizer's step is part of the graph: its state and its learning rates are inputs, its own code is traced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from policylang.torch_compat.distributed import own_class, sharded_weights
from policylang.torch_compat.tracing import accumulation_hooks
from policylang.tracing.preconditions import OPTIMIZER, UNTRACEABLE, problem

_FOR_TRACING = {"capturable": True, "foreach": False, "fused": None, "differentiable": False}
"""Settings under which an optimizer's step asks no tensor for its value, and updates one parameter after the other."""


@frozen(eq=False)
class ModelState:
    """Parameters, then buffers, each once, under the first name that ``named_parameters`` gives it; then tensors that
    modules have as plain attributes."""

    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    attributes: dict[str, Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.parameters, *self.buffers, *self.attributes)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.parameters.values(), *self.buffers.values(), *self.attributes.values()]


def read_state(model: nn.Module, attributes: Iterable[str] | None = None) -> ModelState:
    """As it is now; an optimizer's update and ``load_state_dict`` are seen by the next call.

    ``attributes`` names the plain attributes to read; without it they are looked for.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    if attributes is None:
        return ModelState(parameters, buffers, _find_attributes(model, (*parameters.values(), *buffers.values())))
    modules = dict(model.named_modules())
    found: dict[str, Tensor] = {}
    for path in attributes:
        module, _, name = path.rpartition(".")
        value = getattr(modules.get(module), name, None)
        if isinstance(value, Tensor):
            found[path] = value
    return ModelState(parameters, buffers, found)


def check_hooks(state: ModelState) -> None:
    """Raises PolicyGraphError where a parameter is to be looked after when its ``.grad`` is complete: a traced step
    leaves ``.grad`` alone."""
    for name, parameter in state.parameters.items():
        if accumulation_hooks(parameter):
            raise problem(
                UNTRACEABLE,
                f"the parameter `{name}` has a hook for its complete `.grad`, which a traced step does not set",
                help="do what the hook does with the gradients that the step returns, or use `register_hook`",
            )


def check_gathers(model: nn.Module) -> None:
    """Raises PolicyGraphError where ``fully_shard`` gathers the weights of a model: its hooks cannot be traced."""
    found = next(iter(sharded_weights(model.modules())), None)
    if found is not None:
        raise problem(
            UNTRACEABLE,
            f"`fully_shard` gathers `{own_class(found.module)}.{found.name}` in a hook, where no trace sees it",
            help="shard it with DTensors that the forward gathers, as examples/sharded_llama.py does, or train it in "
            "eager or with compiled blocks: see docs/setups.md#a-traced-step",
        )


def _find_attributes(model: nn.Module, known: Iterable[Tensor]) -> dict[str, Tensor]:
    """What a forward merely hung on its module, to be looked at, has a history and is no state."""
    seen = {id(value) for value in known}
    found = {}
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if isinstance(value, Tensor) and _is_leaf(value) and id(value) not in seen:
                seen.add(id(value))
                found[f"{path}.{name}".lstrip(".")] = value
    return found


@frozen(eq=False)
class Substitution:
    rebound: dict[int, Tensor] = field(factory=dict)
    """By the ``id`` of a buffer or attribute the tensor that the model put in its place (``self.mean = new``)."""
    changed: list[str] = field(factory=list)
    """Attributes that are no tensor and that the model gave another value (``layers.0.calls``)."""


@contextmanager
def substituted(
    model: nn.Module, originals: Sequence[Tensor], replacements: Sequence[Tensor]
) -> Iterator[Substitution]:
    """Under it, the model has ``replacements`` where it had ``originals``, under every name and in every submodule.

    On leaving, the model is as it was: whatever its forward hung on itself is taken off again. What that was is in
    the :class:`Substitution`, from then on.
    """
    by_id = {id(old): new for old, new in zip(originals, replacements, strict=True)}
    modules = list(model.named_modules())
    before = [_Contents(module) for _, module in modules]
    result = Substitution()
    for contents in before:
        contents.substitute(by_id)
    try:
        yield result
    finally:
        for (path, _), contents in zip(modules, before, strict=True):
            contents.collect_changes(path, by_id, result)
            contents.restore()


class _Contents:
    """Everything a module's ``__dict__`` held, its tables of parameters, buffers and submodules included."""

    def __init__(self, module: nn.Module) -> None:
        own = module.__dict__
        tables: list[dict[str, Any]] = [own, own["_parameters"], own["_buffers"], own["_modules"]]
        self.tables = [(table, dict(table)) for table in tables]

    def substitute(self, by_id: dict[int, Tensor]) -> None:
        for table, _ in self.tables:
            for name, value in table.items():
                if id(value) in by_id:
                    table[name] = by_id[id(value)]

    def collect_changes(self, path: str, by_id: dict[int, Tensor], result: Substitution) -> None:
        for table, before in self.tables:
            for name, old in before.items():
                new = table.get(name)
                if id(old) in by_id and isinstance(new, Tensor) and new is not by_id[id(old)]:
                    result.rebound[id(old)] = new
        now, attributes = self.tables[0]
        for name, value in now.items():
            if isinstance(value, bool | int | float) and name in attributes and attributes[name] is not value:
                result.changed.append(f"{path}.{name}".lstrip("."))

    def restore(self) -> None:
        for table, saved in self.tables:
            table.clear()
            table.update(saved)


def _is_leaf(value: Tensor) -> bool:
    try:
        return value.grad_fn is None
    except RuntimeError:  # a view from before its base was written to: FSDP leaves such ones in the place of weights
        return False


# --- the optimizer --------------------------------------------------------------------------------------------------


@frozen(eq=False)
class OptimizerState:
    """The tensors of an optimizer by name: the learning rate of each group, then each parameter's state.

    A learning rate that is a number becomes a tensor of 64 bits, so that a scheduler's changes are seen.
    """

    tensors: dict[str, Tensor]
    settings: tuple[dict[str, Any], ...]
    """Of each group all that is fixed in the graph: momentum, weight decay and the like."""

    @classmethod
    def of(cls, optimizer: Optimizer | None, state: ModelState) -> OptimizerState:
        """Raises PolicyGraphError if the optimizer updates what is no parameter of the model."""
        if optimizer is None:
            return cls({}, ())
        names = {id(parameter): name for name, parameter in state.parameters.items()}
        tensors = {f"learning_rate_{number}": _rate(group) for number, group in enumerate(optimizer.param_groups)}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise problem(
                        OPTIMIZER,
                        f"the optimizer updates a tensor of shape {list(parameter.shape)} that is no parameter of the "
                        "model",
                        help="make the optimizer from `model.parameters()` of the model that is traced, after the last "
                        "`model.to(...)`",
                    )
                for key, value in _state_tensors(optimizer, parameter):
                    tensors[f"{names[id(parameter)]}.{key}"] = value
        settings = ({k: v for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups)
        return cls(tensors, tuple(settings))


@contextmanager
def substituted_optimizer(
    optimizer: Optimizer, parameters: dict[int, Tensor], tensors: Sequence[Tensor]
) -> Iterator[None]:
    """Under it, the optimizer holds other tensors: ``parameters`` by the ``id`` of the original, and ``tensors``, in
    the order of :class:`OptimizerState`, in the place of learning rates and state.

    Raises PolicyGraphError if the step makes new state: it would be made anew at each call.
    """
    groups, state = [dict(group) for group in optimizer.param_groups], optimizer.state
    left = iter(tensors)
    rates = [next(left) for _ in groups]
    replaced: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        new = [parameters[id(parameter)] for parameter in group["params"]]
        for parameter, replacement in zip(group["params"], new, strict=True):
            own = dict(state.get(parameter, {}))
            own.update((key, next(left)) for key, _ in _state_tensors(optimizer, parameter))
            replaced[replacement] = own
        group.update({key: value for key, value in _FOR_TRACING.items() if key in group}, params=new, lr=rate)
    optimizer.state = replaced
    before = {parameter: set(own) for parameter, own in replaced.items()}
    try:
        yield
        for parameter, own in replaced.items():
            if any(isinstance(own[key], Tensor) for key in set(own) - before.get(parameter, set())):
                raise problem(
                    OPTIMIZER,
                    f"the {type(optimizer).__name__} has no state yet, and would start from none at each call",
                    help="take one step with it before tracing: `loss.backward(); optimizer.step()`",
                )
    finally:
        optimizer.state = state
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(saved)


def take_step(optimizer: Optimizer, gradients: dict[int, Tensor | None], parameters: dict[int, Tensor]) -> None:
    """The optimizer's own step on substituted parameters, by ``id`` of the originals."""
    for key, parameter in parameters.items():
        parameter.grad = gradients.get(key)
    # the class's step: a scheduler wraps the instance's to count real ones
    with torch.no_grad():
        type(optimizer).step(optimizer)


def _rate(group: dict[str, Any]) -> Tensor:
    rate = group["lr"]
    return rate if isinstance(rate, Tensor) else torch.tensor(float(rate), dtype=torch.float64)


def _state_tensors(optimizer: Optimizer, parameter: Tensor) -> list[tuple[str, Tensor]]:
    state = optimizer.state.get(parameter, {})
    return [(key, state[key]) for key in sorted(state, key=str) if isinstance(state[key], Tensor)]
