"""Attributes, buffers and arguments as a call of a block finds them, restored while the block is recomputed.

A block may write to more than tensors: it puts one buffer in the place of another (``self.mean = 0.9 * self.mean``),
counts its calls, makes a table on its first call, or appends keys and values to a cache that it is called with. And
others may change the block between its forward and its backward: ``functional_call`` gives it other parameters for one
call. A recomputation has to find what the forward found, and to leave everything as if it had not been.

The first call of a block is compared with what was there before it. After that only what it changed is looked at.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

from attrs import define, evolve, field, frozen
from torch import Tensor, nn

from policylang.backends.eager.origins import tensors_in
from policylang.torch_compat.eager import storage_is_freed
from policylang.torch_compat.tracing import is_wrapper_subclass, take_apart

_STRUCTURE = {"_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}
"""Attributes of every module that are looked at by themselves, or are none of the block's."""
_SHARDING = frozenset(("torch", "accelerate", "deepspeed"))
"""Their objects keep state of their own, such as which weights are gathered."""
_OF_ANY_MODULE = frozenset(nn.Module().__dict__)
_MOST_CONTAINERS = 512
"""The most containers and objects that are searched below the arguments of a call, and below attributes."""

MISSING = object()


@frozen(eq=False)
class Volatile:
    """State that calls of a block change: entries of a module's table (:func:`_tables`); changes in its arguments."""

    entries: dict[int, set[str]]
    within: list[tuple[int, str]]
    """The entries, each with its table, that hold a list, dictionary or object that is changed inside."""
    arguments: bool
    draws: bool
    """They draw from a generator of Python's or numpy's."""


@frozen(eq=False)
class _Held:
    """A dictionary or list, and some of what it held."""

    container: Any
    content: Any
    keys: frozenset[Any] | None = None
    """The relevant keys of a dictionary; None: all keys."""

    @classmethod
    def of(cls, container: Any, keys: Collection[Any] | None = None) -> _Held:
        if keys is None:
            return cls(container, list(container) if isinstance(container, list | deque) else dict(container))
        return cls(container, {key: container.get(key, MISSING) for key in keys}, frozenset(keys))

    def changed(self) -> set[Any]:
        """The keys or positions that hold another object by now."""
        pair = self.content, self.container
        before, now = (dict(enumerate(each)) if isinstance(each, list | deque) else each for each in pair)
        return {key for key in (*before, *now) if before.get(key, MISSING) is not now.get(key, MISSING)}

    def put_back(self) -> _Held:
        """Returns what was there instead."""
        if isinstance(self.container, list | deque):
            now = _Held.of(self.container)
            self.container.clear()
            self.container.extend(self.content)
            return now
        keys = self.keys if self.keys is not None else frozenset((*self.container, *self.content))
        now = _Held.of(self.container, keys)
        for key in keys:
            value = self.content.get(key, MISSING)
            if value is MISSING:
                self.container.pop(key, None)
            else:
                self.container[key] = value
        return now


@frozen(eq=False)
class _PythonDraws:
    """The states of Python's own generator of random numbers, and of numpy's where it is there."""

    state: Any
    of_numpy: Any

    @classmethod
    def now(cls) -> _PythonDraws:
        numpy = sys.modules.get("numpy")
        return cls(random.getstate(), None if numpy is None else numpy.random.get_state())

    def changed(self) -> bool:
        now = _PythonDraws.now()
        return self.state != now.state or pickle.dumps(self.of_numpy) != pickle.dumps(now.of_numpy)

    def put_back(self) -> _PythonDraws:
        now = _PythonDraws.now()
        random.setstate(self.state)
        if self.of_numpy is not None:
            sys.modules["numpy"].random.set_state(self.of_numpy)
        return now


@define(eq=False)
class Surroundings:
    """The state that one call finds."""

    tensors: list[_Held]
    """The tables of parameters and buffers."""
    held: list[_Held | _PythonDraws]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Under it, everything is as the call found it; afterwards as it was before."""
        instead: list[_Held | _PythonDraws] = [*self._swapped(), *self.held]
        before = [each.put_back() for each in instead]
        try:
            yield
        finally:
            for each in reversed(before):
                each.put_back()

    def _swapped(self) -> Iterator[_Held]:
        """Parameters and buffers that were exchanged since. FSDP's own exchanges are left to FSDP: it puts in
        parameters of another kind, and frees the memory of those that it takes away."""
        for table in self.tensors:
            now, before = table.container, table.content
            pairs = [(name, old, now.get(name)) for name, old in before.items()] if len(now) == len(before) else []
            other = frozenset(name for name, old, new in pairs if old is not new and _may_stand_in(old, new))
            if other:
                yield evolve(table, keys=other)


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
    """The state that a call finds, as far as calls of the block are known to change it."""
    tables = _tables(modules)
    held: list[_Held | _PythonDraws] = [_Held.of(tables[number], names) for number, names in volatile.entries.items()]
    if volatile.draws:
        held.append(_PythonDraws.now())
    inside = tuple(tables[number].get(name) for number, name in volatile.within)
    held += map(_Held.of, _containers((inside, given if volatile.arguments else ())))
    return Surroundings(_tensors(modules), held)


@define(eq=False)
class Before:
    """All that a first call finds."""

    given: Any
    tables: list[_Held]
    tensors: list[_Held]
    arguments: list[_Held]
    within: dict[tuple[int, str], list[_Held]]
    """By number of a table and name: the containers below an attribute."""
    draws: _PythonDraws = field(factory=_PythonDraws.now)

    @classmethod
    def of(cls, modules: Sequence[nn.Module], given: Any) -> Before:
        tables = list(map(_Held.of, _tables(modules)))
        seen: set[int] = set()
        arguments = list(map(_Held.of, _containers(given, seen)))
        within = {
            (number, name): list(map(_Held.of, _containers(value, seen)))
            for number, table in enumerate(tables)
            for name, value in table.content.items()
            if name not in _OF_ANY_MODULE and not _is_plain(value)
        }
        return cls(given, tables, _tensors(modules), arguments, within)

    def alive(self) -> list[Tensor]:
        """The tensors that are there whatever the call keeps: those of the modules and of its arguments."""
        own = [value for table in (*self.tables, *self.tensors) for value in table.content.values()]
        return [*(value for value in own if isinstance(value, Tensor)), *tensors_in(self.given)]

    def volatile(self) -> Volatile:
        """The changes made by the call."""
        changed = {number: table.changed() - _STRUCTURE for number, table in enumerate(self.tables)}
        entries = {number: names for number, names in changed.items() if names}
        within = [place for place, held in self.within.items() if any(each.changed() for each in held)]
        return Volatile(entries, within, any(each.changed() for each in self.arguments), self.draws.changed())

    def surroundings(self, volatile: Volatile) -> Surroundings:
        held: list[_Held | _PythonDraws] = [self.draws] if volatile.draws else []
        held += [evolve(self.tables[number], keys=frozenset(names)) for number, names in volatile.entries.items()]
        inside = [each for place in volatile.within for each in self.within[place]]
        return Surroundings(self.tensors, [*held, *inside, *(self.arguments if volatile.arguments else ())])


def _tables(modules: Sequence[nn.Module]) -> list[dict[str, Any]]:
    """The attributes and the buffers of each module."""
    return [table for module in modules for table in (module.__dict__, module._buffers)]


def _tensors(modules: Sequence[nn.Module]) -> list[_Held]:
    return [_Held.of(table) for module in modules for table in (module._parameters, module._buffers) if table]


def _containers(given: Any, seen: set[int] | None = None) -> Iterator[Any]:
    """The lists, dictionaries and objects' attributes below the arguments of a call, such as a cache has them. Modules
    are looked at by themselves."""
    pending: list[Any] = [given]
    seen = set() if seen is None else seen
    while pending and len(seen) < _MOST_CONTAINERS:
        value = pending.pop()
        if _is_plain(value) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, tuple):
            pending.extend(value)
        elif isinstance(value, list | deque):
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
    return value is None or isinstance(value, kinds) or type(value).__module__.partition(".")[0] in _SHARDING
