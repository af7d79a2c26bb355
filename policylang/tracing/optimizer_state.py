"""An optimizer's step as part of the graph: its state and its learning rates as inputs, its own code traced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.optim import Optimizer

from policylang.errors import PolicyGraphError
from policylang.tracing.checks import OPTIMIZER, problem
from policylang.tracing.model_state import ModelState

_FOR_TRACING = {"capturable": True, "foreach": False, "fused": None, "differentiable": False}
"""Settings under which an optimizer's step asks no tensor for its value, and updates one parameter after the other."""


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
                    raise _stranger(parameter)
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


def _stranger(parameter: Tensor) -> PolicyGraphError:
    return problem(
        OPTIMIZER,
        f"the optimizer updates a tensor of shape {list(parameter.shape)} that is no parameter of the model",
        help="make the optimizer from `model.parameters()` of the model that is traced, after the last `model.to(...)`",
    )
