"""What a block finds around it when it is called, and finds again when it is recomputed.

A block may write to more than tensors: it puts one buffer in the place of another (``self.mean = 0.9 * self.mean``),
counts its calls, makes a table on its first call, or appends keys and values to a cache that it is called with. And
others may change the block between its forward and its backward: ``functional_call`` gives it other parameters for one
call. A recomputation has to find what the forward found, and to leave everything as if it had not been.

The first call of a block is compared with what was there before it. After that only what it changed is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

from attrs import define, field, frozen
from torch import Tensor, nn

from policylang.backends.eager.observation.origins import tensors_in
from policylang.torch_compat.eager import storage_is_freed
from policylang.torch_compat.subclasses import take_apart
from policylang.torch_compat.tracing import is_wrapper_subclass

_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_MOST_CONTAINERS = 512
"""So many lists, dictionaries and objects are looked at below the arguments of a call."""

MISSING = object()


@define(eq=False)
class Volatile:
    """What the calls of a block change: of its modules, by their number, the attributes and buffers; and whether it
    changes what is inside of its arguments."""

    attributes: dict[int, set[str]] = field(factory=dict)
    buffers: dict[int, set[str]] = field(factory=dict)
    arguments: bool = False


@frozen(eq=False)
class _Held:
    """A dictionary or list, and some of what it held."""

    container: Any
    content: Any
    keys: frozenset[Any] | None = None
    """Of a dictionary, those that it is about; all of them where it is None."""

    def put_back(self) -> _Held:
        """Returns what was there instead."""
        if isinstance(self.container, list):
            now = _Held(self.container, list(self.container))
            self.container[:] = self.content
            return now
        keys = self.keys if self.keys is not None else frozenset((*self.container, *self.content))
        now = _Held(self.container, {key: self.container.get(key, MISSING) for key in keys}, keys)
        for key in keys:
            value = self.content.get(key, MISSING)
            if value is MISSING:
                self.container.pop(key, None)
            else:
                self.container[key] = value
        return now


@define(eq=False)
class Surroundings:
    """Of one call."""

    tensors: list[tuple[dict[str, Any], tuple[Any, ...]]]
    """The tables of parameters and buffers, and what they held."""
    held: list[_Held]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Under it, everything is as the call found it; afterwards as it was before."""
        instead = [*self._swapped(), *self.held]
        before = [each.put_back() for each in instead]
        try:
            yield
        finally:
            for each in reversed(before):
                each.put_back()

    def _swapped(self) -> Iterator[_Held]:
        """The parameters and buffers that others stand in for by now. FSDP's own doing is left to FSDP: it puts in
        parameters of another kind, and lets go of the memory of those that it takes away."""
        for table, before in self.tensors:
            now = tuple(table.values())
            if len(now) != len(before) or all(one is other for one, other in zip(now, before, strict=True)):
                continue
            pairs = zip(table, before, now, strict=True)
            other = {name: old for name, old, new in pairs if old is not new and _may_stand_in(old, new)}
            if other:
                yield _Held(table, other, frozenset(other))


def _may_stand_in(old: Any, new: Any) -> bool:
    if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old.shape != new.shape:
        return False
    if is_wrapper_subclass(old) != is_wrapper_subclass(new):
        return False
    # beside tensor parallelism, FSDP makes a DTensor over fewer dimensions of one over more
    if getattr(old, "device_mesh", None) != getattr(new, "device_mesh", None):
        return False
    return not any(map(storage_is_freed, take_apart([old])[0]))


def surroundings(modules: Sequence[nn.Module], given: Any, volatile: Volatile) -> Surroundings:
    """What a call finds, as far as calls of the block are known to change it."""
    held = []
    for number, names in volatile.attributes.items():
        held.append(_some(modules[number].__dict__, names))
    for number, names in volatile.buffers.items():
        held.append(_some(modules[number]._buffers, names))
    if volatile.arguments:
        held += [_all(each) for each in _containers(given)]
    return Surroundings(_tensors(modules), held)


@define(eq=False)
class Before:
    """All that a first call finds."""

    modules: Sequence[nn.Module]
    given: Any
    attributes: list[dict[str, Any]]
    buffers: list[dict[str, Any]]
    tensors: list[tuple[dict[str, Any], tuple[Any, ...]]]
    arguments: list[_Held]

    @classmethod
    def of(cls, modules: Sequence[nn.Module], given: Any) -> Before:
        return cls(
            modules,
            given,
            [dict(each.__dict__) for each in modules],
            [dict(each._buffers) for each in modules],
            _tensors(modules),
            [_all(each) for each in _containers(given)],
        )

    def alive(self) -> list[Tensor]:
        """The tensors that are there whatever the call keeps: those of the modules and of its arguments."""
        tables: list[dict[Any, Any]] = [*self.attributes, *(dict(enumerate(values)) for _, values in self.tensors)]
        own = [value for table in tables for value in table.values() if isinstance(value, Tensor)]
        return [*own, *tensors_in(self.given)]

    def volatile(self) -> Volatile:
        """What the call has changed."""
        found = Volatile()
        for number, module in enumerate(self.modules):
            own = _changed(self.attributes[number], module.__dict__) - {*_TABLES, *_HOOKS}
            if own:
                found.attributes[number] = own
            buffers = _changed(self.buffers[number], module._buffers)
            if buffers:
                found.buffers[number] = buffers
        found.arguments = any(_differs(each) for each in self.arguments)
        return found

    def surroundings(self, volatile: Volatile) -> Surroundings:
        held = []
        for at, names in volatile.attributes.items():
            held.append(_Held(self.modules[at].__dict__, self.attributes[at], frozenset(names)))
        for at, names in volatile.buffers.items():
            held.append(_Held(self.modules[at]._buffers, self.buffers[at], frozenset(names)))
        return Surroundings(self.tensors, [*held, *(self.arguments if volatile.arguments else ())])


def _tensors(modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
    tables = [table for module in modules for table in (module._parameters, module._buffers) if table]
    return [(table, tuple(table.values())) for table in tables]


def _some(container: dict[str, Any], names: set[str]) -> _Held:
    return _Held(container, {name: container.get(name, MISSING) for name in names}, frozenset(names))


def _all(container: Any) -> _Held:
    return _Held(container, list(container) if isinstance(container, list) else dict(container))


def _differs(held: _Held) -> bool:
    if isinstance(held.container, list):
        return [id(each) for each in held.container] != [id(each) for each in held.content]
    return bool(_changed(held.content, held.container))


def _changed(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> set[Any]:
    return {key for key in (*before, *now) if before.get(key, MISSING) is not now.get(key, MISSING)}


def _containers(given: Any) -> Iterator[Any]:
    """The lists, dictionaries and objects' attributes below the arguments of a call, such as a cache has them. Modules
    are looked at by themselves."""
    pending: list[Any] = [given]
    seen: set[int] = set()
    while pending and len(seen) < _MOST_CONTAINERS:
        value = pending.pop()
        if _is_plain(value) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, tuple):
            pending.extend(value)
        elif isinstance(value, list):
            yield value
            pending.extend(value)
        elif isinstance(value, dict):
            yield value
            pending.extend(value.values())
        elif isinstance(getattr(value, "__dict__", None), dict):
            yield value.__dict__
            pending.extend(value.__dict__.values())


def _is_plain(value: Any) -> bool:
    kinds = (Tensor, nn.Module, str, bytes, int, float, type, FunctionType, MethodType, ModuleType)
    return value is None or isinstance(value, kinds)
