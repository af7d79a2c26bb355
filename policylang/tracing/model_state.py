"""A model's parameters and buffers as a flat list of tensors, and the model run on others in their place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import field, frozen
from torch import Tensor, nn

from policylang.torch_compat.tracing import accumulation_hooks
from policylang.tracing.checks import UNTRACEABLE, problem


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
    """Everything a module's ``__dict__`` held."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = dict(module.__dict__)
        self.tables = {key: dict(module.__dict__[key]) for key in ("_parameters", "_buffers", "_modules")}

    def substitute(self, by_id: dict[int, Tensor]) -> None:
        for table in self._tables_of_tensors():
            for name, value in table.items():
                if id(value) in by_id:
                    table[name] = by_id[id(value)]

    def _tables_of_tensors(self) -> tuple[dict[str, Any], ...]:
        own = self.module.__dict__
        return own, own["_parameters"], own["_buffers"]

    def collect_changes(self, path: str, by_id: dict[int, Tensor], result: Substitution) -> None:
        before = (self.attributes, self.tables["_parameters"], self.tables["_buffers"])
        for table, saved in zip(self._tables_of_tensors(), before, strict=True):
            for name, old in saved.items():
                new = table.get(name)
                if id(old) in by_id and isinstance(new, Tensor) and new is not by_id[id(old)]:
                    result.rebound[id(old)] = new
        for name, value in self.module.__dict__.items():
            if _is_state(value) and name in self.attributes and self.attributes[name] is not value:
                result.changed.append(f"{path}.{name}".lstrip("."))

    def restore(self) -> None:
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for key, saved in self.tables.items():
            table = self.module.__dict__[key]
            table.clear()
            table.update(saved)


def _is_state(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _is_leaf(value: Tensor) -> bool:
    try:
        return value.grad_fn is None
    except RuntimeError:  # a view from before its base was written to: FSDP leaves such ones in the place of weights
        return False
