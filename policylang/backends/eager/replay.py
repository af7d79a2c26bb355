"""A block run under its plan, and run again for the backward, by position in the stream of operators.

Torch's own selective checkpoint asks a function about each operator. Here the answers are known before the block runs,
because the plan has seen it whole; what is left is to follow them, and to notice at once where the block does something
else. Of each call of the block there is one :class:`Call`: forward and recomputation count apart, so they cannot drift.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from policylang._torch_eager import DispatchMode, detached, keeps_graph, version
from policylang._torch_graph import schema_of
from policylang.backends.eager import problems
from policylang.backends.eager.random_states import Drawn, generator_of
from policylang.backends.eager.schedule import DRAW, HELD, KEEP, QUIET, RUN, Schedule
from policylang.backends.eager.stream import IGNORED
from policylang.graph.memory import statistics_positions
from policylang.language.diagnostics import Diagnostic

_FREED = object()


@define(eq=False)
class Call:
    """One call of a block: what its forward holds for its backward."""

    name: str
    schedule: Schedule
    on_drift: Callable[[Diagnostic], None]
    """Called where the forward leaves the recording. May raise."""
    entries: dict[int, Any] = field(factory=dict)
    """By position: what an operator gave, as tensors without a history."""
    versions: dict[int, list[int]] = field(factory=dict)
    states: dict[int, Drawn] = field(factory=dict)
    drifted_at: int | None = None
    tail: list[Any] = field(factory=list)
    """The operators that ran from there on."""

    def ran(self, position: int) -> Any:
        """The operator that the forward ran at a position; None where it was over."""
        if self.drifted_at is None or position < self.drifted_at:
            return self.schedule.operators[position]
        at = position - self.drifted_at
        return self.tail[at] if at < len(self.tail) else None


class Forward(DispatchMode):  # type: ignore[misc]  # torch does not say what it is
    """The first run: holds what the plan saves."""

    supports_higher_order_operators = True

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        self._operators = call.schedule.operators
        self._kinds = call.schedule.kinds
        self._at = 0
        self._stale: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        at = self._at
        if self._operators[at] is not func:
            return self._other(func, args, kwargs or {})
        self._at = at + 1
        kind = self._kinds[at]
        if kind == DRAW:
            return self._draw(at, func, args, kwargs or {})
        out = func(*args, **kwargs) if kwargs else func(*args)
        if kind == KEEP:
            self._keep(at, out)
        elif kind == HELD:
            self._stale.update(self._call.schedule.written[at])
        return out

    def end(self) -> None:
        """To be called when the block has returned.

        What the block itself wrote to held values is counted now: a version goes up after the operator has returned.
        """
        call = self._call
        for holder in self._stale:
            call.versions[holder] = [version(value) for value in _leaves(call.entries[holder])]
        if self._call.drifted_at is None and self._at != len(self._operators) - 1:
            self._drift(None)

    def _keep(self, at: int, out: Any) -> None:
        call = self._call
        held = _map(detached, _without_unread(out, call.schedule.read.get(at)))
        call.entries[at] = held
        call.versions[at] = [version(value) for value in _leaves(held)]

    def _draw(self, at: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        generator = generator_of(args, kwargs)
        if generator is not None:
            self._call.states[at] = Drawn.now(generator)
        return func(*args, **kwargs)

    def _other(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func in IGNORED:
            return func(*args, **kwargs)
        call = self._call
        drifted_at = self._drift(func) if call.drifted_at is None else call.drifted_at
        position = drifted_at + len(call.tail)
        call.tail.append(func)
        if draws(func):
            return self._draw(position, func, args, kwargs)
        return func(*args, **kwargs)

    def _drift(self, came: Any) -> int:
        """From here on every operator is another one than was recorded."""
        call, at = self._call, self._at
        expected = self._operators[at]
        call.drifted_at = at
        self._operators, self._at = _NOTHING, 0
        call.on_drift(problems.drifted(call.name, at, expected, came))
        return at


class Again(DispatchMode):  # type: ignore[misc]  # torch does not say what it is
    """The recomputation: gives what is held, runs the rest."""

    supports_higher_order_operators = True

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        self._at = 0
        self._frees = not keeps_graph()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        call, at = self._call, self._at
        expected = call.ran(at)
        if expected is not func:
            if func in IGNORED:
                return func(*args, **(kwargs or {}))
            raise problems.diverged(call.name, at, expected, func)
        self._at = at + 1
        if call.drifted_at is not None and at >= call.drifted_at:
            return self._draw(at, func, args, kwargs or {})
        kind = call.schedule.kinds[at]
        if kind == RUN:
            return func(*args, **kwargs) if kwargs else func(*args)
        if kind == KEEP:
            return self._held(at, func)
        if kind == DRAW:
            return self._draw(at, func, args, kwargs or {})
        if kind == QUIET:
            return func(*_without(args, statistics_positions(func)), **(kwargs or {}))
        return _written(func, args, kwargs or {})

    def _held(self, at: int, func: Any) -> Any:
        call = self._call
        entry = call.entries[at]
        if entry is _FREED:
            raise problems.run_again(call.name)
        if call.versions[at] != [version(value) for value in _leaves(entry)]:
            raise problems.changed(call.name, func, at)
        if self._frees:
            call.entries[at] = _FREED
            return entry
        return _map(detached, entry)

    def _draw(self, at: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        drawn = self._call.states.get(at)
        if drawn is None:
            return func(*args, **kwargs)
        with drawn.again():
            return func(*args, **kwargs)


_NOTHING = (None,)


def draws(operator: Any) -> bool:
    """Whether torch says of an operator that it draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)([_map(change, part) for part in value])
    return change(value)


def _leaves(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for part in value for leaf in _leaves(part)] if isinstance(value, tuple | list) else []


def _without_unread(out: Any, read: frozenset[int] | None) -> Any:
    """Results that nobody reads give way to one element in their shape: a second run has to give something."""
    if read is None or not isinstance(out, tuple | list) or len(read) == len(out):
        return out
    return type(out)([part if at in read else _hollow(part) for at, part in enumerate(out)])


def _hollow(value: Any) -> Any:
    if type(value) is not Tensor or value.numel() < 2:
        return value
    return value.new_empty((1,) * value.dim()).expand(value.shape)


def _without(args: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    return [None if at in positions else value for at, value in enumerate(args)]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operator that writes returns: the arguments that it wrote to."""
    schema = schema_of(func)
    targets = [
        args[at] if at < len(args) else kwargs.get(argument.name)
        for at, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if not schema.returns:
        return None
    return targets[0] if len(schema.returns) == 1 else tuple(targets)
