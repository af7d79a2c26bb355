"""A block run under its plan, and run again for the backward, by position in the stream of operators.

Torch's own selective checkpoint asks a function about each operator. Here the answers are known before the block runs,
because the plan has seen it whole; what is left is to follow them, and to notice at once where the block does something
else. Of each call of the block there is one :class:`FollowedCall`: forward and recomputation count apart, and cannot
drift.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from policylang.backends.eager import problems
from policylang.backends.eager.execution.followed_call import FREED, FollowedCall, without_unread
from policylang.backends.eager.execution.instructions import DRAW, KEEP, PASS, QUIET, RUN
from policylang.backends.eager.observation.modes import Mode
from policylang.backends.eager.observation.origins import memory_of, tensors_in
from policylang.backends.eager.observation.stream import VIEW, draws, is_no_step, is_same_view, written_by
from policylang.backends.eager.random_states import GeneratorState, generator_of
from policylang.errors import PolicyGraphError
from policylang.operators.effects import statistics_positions
from policylang.torch_compat.eager import detached, keeps_graph, storage_address, storage_is_freed, version
from policylang.torch_compat.reading import outside_of_modes, schema_of
from policylang.torch_compat.subclasses import take_apart


class ForwardMode(Mode):
    """A run that follows the plan: holds what it saves."""

    def __init__(self, call: FollowedCall) -> None:
        super().__init__()
        self._call = call
        self._operators = call.instructions.operators
        self._kinds = call.instructions.kinds
        self._from_outside = call.instructions.from_outside
        self._at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        at = self._at
        if self._operators[at] is not func or self.suspended or (func is VIEW and is_same_view(args)):
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
        elif kind == PASS:
            self._call.passed[at] = list(tensors_in(written_by(func, args, kwargs or {})))
        return out

    def end(self) -> None:
        """To be called when the block has returned."""
        call = self._call
        if call.drifted_at is None and self._at != len(self._operators) - 1:
            if call.instructions.only_made_once(self._at):
                call.left_out = True
            else:
                self._drift(None)
        call.count_writes()

    def _keep(self, at: int, out: Any) -> None:
        call = self._call
        held = _map(detached, without_unread(out, call.instructions.read.get(at)))
        call.entries[at] = held
        call.versions[at] = [memory_of(value) for value in tensors_in(held)]

    def _draw(self, at: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        generator = generator_of(args, kwargs)
        if generator is not None:
            self._call.states[at] = GeneratorState.now(generator)
        return func(*args, **kwargs)

    def _other(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.suspended:
            return self.aside(func, types, args, kwargs)
        if is_no_step(func, args):
            return func(*args, **kwargs)
        call = self._call
        if call.drifted_at is None:
            found = call.instructions.after_what_is_made_once(self._at, func)
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


class RecomputeMode(Mode):
    """The recomputation: gives what is held, runs the rest.

    ``within`` says that the block itself is still running: it differentiates a part of itself.
    """

    def __init__(self, call: FollowedCall, within: bool = False) -> None:
        super().__init__()
        self._call = call
        self._at = 0
        self._within = within
        self._frees = not within and not keeps_graph()
        call.note_let_go()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if self.suspended:
            return self.aside(func, types, args, kwargs or {})
        call, at = self._call, self._at
        if call.ran(at) is not func or (func is VIEW and is_same_view(args)):
            if is_no_step(func, args):
                return func(*args, **(kwargs or {}))
            found = self._elsewhere(func)
            if found is None:
                return func(*args, **(kwargs or {}))
            at = found
        self._at = at + 1
        if call.drifted_at is not None and at >= call.drifted_at:
            return self._draw(at, func, args, kwargs or {})
        kind = call.instructions.kinds[at]
        if kind == KEEP and self._within and at not in call.entries:
            kind = RUN  # without early stop it goes on, past where the forward is
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
        if at in call.let_go:
            return func(*args, **(kwargs or {}))
        return _written(func, args, kwargs or {})

    def _elsewhere(self, func: Any) -> int | None:
        """Where the forward ran an operator that is not the next one; None for what it did not run at all, once the
        backward has all that it needs: what a block does on its way out of the interruption."""
        call, at = self._call, self._at
        if call.drifted_at is None:
            if at >= call.instructions.reach:
                rest = range(at, len(call.instructions.operators) - 1)
                return next((position for position in rest if call.instructions.operators[position] is func), None)
            found = call.instructions.after_what_is_made_once(at, func)
            if found is not None:
                return found
        raise problems.diverged(call.name, at, call.ran(at), func)

    def _check(self, at: int, func: Any, args: Sequence[Any], kwargs: Any) -> None:
        """Raises ``PolicyGraphError`` where an operator would read other parameters, buffers or constants."""
        call = self._call
        if self._within:
            return
        tensors = list(tensors_in((args, kwargs)))
        for number, then in zip(call.instructions.from_outside[at], call.noted[at], strict=True):
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
        if entry is FREED:
            raise problems.run_again(call.name)
        if not self._within:
            found = [memory_of(value) for value in tensors_in(entry)]
            if found != call.versions[at]:
                sizes = [[size for _, size in each] for each in (found, call.versions[at])]
                raise problems.changed(call.name, func, at, resized=sizes[0] != sizes[1])
        if self._frees:
            call.entries[at] = FREED
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
        if parts[0][0] is not now or new.shape != old.shape or new.dtype != old.dtype:
            return False
        with outside_of_modes():  # those of a block around this one as well
            if not torch.equal(new, old):
                return False
    return True


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)([_map(change, part) for part in value])
    return change(value)


def _without(args: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    return [None if at in positions else value for at, value in enumerate(args)]


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operator that writes returns: the arguments that it wrote to."""
    returns = schema_of(func).returns
    if not returns:
        return None
    targets = written_by(func, args, kwargs)
    return targets[0] if len(returns) == 1 else tuple(targets)
