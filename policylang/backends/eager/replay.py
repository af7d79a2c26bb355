"""A block run under its plan, and run again for the backward, by position in the stream of operators.

Torch's own selective checkpoint asks a function about each operator. Here the answers are known before the block runs,
because the plan has seen it whole; what is left is to follow them, and to notice at once where the block does something
else. Of each call of the block there is one :class:`Call`: forward and recomputation count apart, so they cannot drift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from policylang._torch_eager import (
    DispatchMode,
    detached,
    keeps_graph,
    outside_of_modes,
    storage_address,
    storage_is_freed,
    version,
)
from policylang._torch_graph import schema_of
from policylang.backends.eager import problems
from policylang.backends.eager.observing import Observation
from policylang.backends.eager.origins import tensors_in
from policylang.backends.eager.random_states import Drawn, generator_of
from policylang.backends.eager.schedule import DRAW, KEEP, QUIET, RUN, Steps, steps_so_far
from policylang.backends.eager.stream import draws, is_ignored
from policylang.backends.eager.surroundings import Surroundings
from policylang.errors import PolicyGraphError
from policylang.graph.memory import statistics_positions
from policylang.language.diagnostics import Diagnostic
from policylang.tracing.subclasses import take_apart

_FREED = object()


@frozen(eq=False)
class Noted:
    """A tensor that an operator read, and that is neither of the block's making nor one of its inputs."""

    tensor: Tensor
    address: int | None
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Noted:
        return cls(tensor, storage_address(tensor), version(tensor))


@define(eq=False)
class Call:
    """One call of a block: what its forward holds for its backward."""

    name: str
    schedule: Steps
    on_drift: Callable[[Diagnostic], None]
    """Called where the forward leaves the plan. May raise."""
    surroundings: Surroundings
    entries: dict[int, Any] = field(factory=dict)
    """By position: what an operator gave, as tensors without a history."""
    versions: dict[int, list[int]] = field(factory=dict)
    states: dict[int, Drawn] = field(factory=dict)
    noted: dict[int, list[Any]] = field(factory=dict)
    """By position: what an operator that runs again has read from outside, as it is when the block has returned."""
    drifted_at: int | None = None
    tail: list[Any] = field(factory=list)
    """The operators that ran from there on."""
    left_out: bool = False
    """Whether operators did not run that had made something which is kept since."""

    def ran(self, position: int) -> Any:
        """The operator that the forward ran at a position; None where it was over."""
        if self.drifted_at is None or position < self.drifted_at:
            return self.schedule.operators[position]
        at = position - self.drifted_at
        return self.tail[at] if at < len(self.tail) else None

    @property
    def follows(self) -> bool:
        """Whether it has done what was planned, and nothing else."""
        return self.drifted_at is None and not self.left_out

    def count_writes(self) -> None:
        """To be called when the block has returned: what it wrote itself to held values is as it should be."""
        for at, holders in self.schedule.written.items():
            if self.drifted_at is None or at < self.drifted_at:
                for holder in holders:
                    if holder in self.entries:
                        self.versions[holder] = [version(value) for value in tensors_in(self.entries[holder])]
        self.noted = {at: [Noted.of(each) for each in tensors] for at, tensors in self.noted.items()}


def observed_call(call: Call, observation: Observation) -> Call:
    """Of a call that was observed and has a plan now: what the plan does not save is let go."""
    schedule = call.schedule
    kept = [at for at, kind in enumerate(schedule.kinds) if kind == KEEP and at in observation.entries]
    with outside_of_modes():
        call.entries = {at: without_unread(observation.entries[at], schedule.read.get(at)) for at in kept}
    call.versions = {at: _versions(call.entries[at], observation.entries[at], observation.versions[at]) for at in kept}
    call.states = {at: state for at, state in observation.states.items() if schedule.kinds[at] == DRAW}
    call.noted = {at: observation.noted[at] for at in schedule.from_outside}
    call.count_writes()
    return call


def unfinished_call(name: str, observation: Observation, surroundings: Surroundings) -> Call:
    """Of a call that is being observed and runs again from within: all that it has made so far is held."""
    return Call(name, steps_so_far(observation), problems.warn, surroundings, observation.entries, observation.versions)


def _versions(entry: Any, whole: Any, found: Sequence[int]) -> list[int]:
    """As noted; what stands in for a result that nobody reads is new."""
    pairs = zip(tensors_in(entry), tensors_in(whole), found, strict=True)
    return [own if leaf is before else version(leaf) for leaf, before, own in pairs]


class Forward(DispatchMode):  # type: ignore[misc]  # torch does not say what it is
    """A run that follows the plan: holds what it saves."""

    supports_higher_order_operators = True

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        self._operators = call.schedule.operators
        self._kinds = call.schedule.kinds
        self._from_outside = call.schedule.from_outside
        self._at = 0
        self._suspended = 0

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While the block is run again from within: such operators are not its own."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        at = self._at
        if self._operators[at] is not func or self._suspended:
            return self._other(func, types, args, kwargs or {})
        self._at = at + 1
        read = self._from_outside.get(at)
        if read is not None:
            tensors = list(tensors_in((args, kwargs)))
            self._call.noted[at] = [tensors[number] for number in read]
        kind = self._kinds[at]
        if kind == DRAW:
            return self._draw(at, func, args, kwargs or {})
        out = func(*args, **kwargs) if kwargs else func(*args)
        if kind == KEEP:
            self._keep(at, out)
        return out

    def end(self) -> None:
        """To be called when the block has returned."""
        call = self._call
        if call.drifted_at is None and self._at != len(self._operators) - 1:
            if call.schedule.only_made_once(self._at):
                call.left_out = True
            else:
                self._drift(None)
        call.count_writes()

    def _keep(self, at: int, out: Any) -> None:
        call = self._call
        held = _map(detached, without_unread(out, call.schedule.read.get(at)))
        call.entries[at] = held
        call.versions[at] = [version(value) for value in tensors_in(held)]

    def _draw(self, at: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        generator = generator_of(args, kwargs)
        if generator is not None:
            self._call.states[at] = Drawn.now(generator)
        return func(*args, **kwargs)

    def _other(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self._suspended or is_ignored(func):
            return func(*args, **kwargs)
        call = self._call
        if call.drifted_at is None:
            found = call.schedule.after_what_is_made_once(self._at, func)
            if found is not None:
                self._at, call.left_out = found, True
                return self.__torch_dispatch__(func, types, args, kwargs)
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
    """The recomputation: gives what is held, runs the rest.

    ``within`` says that the block itself is still running: it differentiates a part of itself.
    """

    supports_higher_order_operators = True

    def __init__(self, call: Call, within: bool = False) -> None:
        super().__init__()
        self._call = call
        self._at = 0
        self._frees = not within and not keeps_graph()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        call, at = self._call, self._at
        if call.ran(at) is not func:
            if is_ignored(func):
                return func(*args, **(kwargs or {}))
            found = self._elsewhere(func)
            if found is None:
                return func(*args, **(kwargs or {}))
            at = found
        self._at = at + 1
        if call.drifted_at is not None and at >= call.drifted_at:
            return self._draw(at, func, args, kwargs or {})
        kind = call.schedule.kinds[at]
        if kind == RUN:
            if at in call.noted:
                self._check(at, func, args, kwargs)
            return func(*args, **kwargs) if kwargs else func(*args)
        if kind == KEEP:
            return self._held(at, func)
        if kind == DRAW:
            if at in call.noted:
                self._check(at, func, args, kwargs)
            return self._draw(at, func, args, kwargs or {})
        if kind == QUIET:
            return func(*_without(args, statistics_positions(func)), **(kwargs or {}))
        return _written(func, args, kwargs or {})

    def _elsewhere(self, func: Any) -> int | None:
        """Where the forward ran an operator that is not the next one; None for what it did not run at all, once the
        backward has all that it needs: what a block does on its way out of the interruption."""
        call, at = self._call, self._at
        if call.drifted_at is None:
            if at >= call.schedule.reach:
                rest = range(at, len(call.schedule.operators) - 1)
                return next((position for position in rest if call.schedule.operators[position] is func), None)
            found = call.schedule.after_what_is_made_once(at, func)
            if found is not None:
                return found
        raise problems.diverged(call.name, at, call.ran(at), func)

    def _check(self, at: int, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        """Raises ``PolicyGraphError`` where an operator would read other parameters, buffers or constants."""
        call = self._call
        tensors = list(tensors_in((args, kwargs)))
        for number, then in zip(call.schedule.from_outside[at], call.noted[at], strict=True):
            now = tensors[number]
            if now is not then.tensor and not _same_value(now, then.tensor):
                raise problems.other_tensor(call.name, func, at, tuple(then.tensor.shape))
            if storage_address(then.tensor) != then.address:
                raise problems.other_tensor(call.name, func, at, tuple(then.tensor.shape))
            if version(then.tensor) != then.version:
                found = problems.written_tensor(call.name, func, at, tuple(then.tensor.shape))
                if then.tensor.requires_grad:
                    raise PolicyGraphError([found])
                problems.warn(found)

    def _held(self, at: int, func: Any) -> Any:
        call = self._call
        entry = call.entries[at]
        if entry is _FREED:
            raise problems.run_again(call.name)
        if call.versions[at] != [version(value) for value in tensors_in(entry)]:
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


def _same_value(now: Tensor, then: Tensor) -> bool:
    """Of what the forward read, and what stands in its place by now. Views are made anew, and FSDP gathers weights into
    memory that it has let go in between: such memory can't be compared."""
    parts = take_apart([now])[0], take_apart([then])[0]
    for new, old in zip(*parts, strict=True):
        if storage_address(new) == storage_address(old) or storage_is_freed(old):
            continue
        if parts[0][0] is not now or new.shape != old.shape or new.dtype != old.dtype or not torch.equal(new, old):
            return False
    return True


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)([_map(change, part) for part in value])
    return change(value)


def without_unread(out: Any, read: frozenset[int] | None) -> Any:
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
