"""The dispatch modes of a block that has a plan: its forward, and the recomputation, by position among its operators.

Torch's own selective checkpoint asks a function about each operator. Here the answers are known before the block runs,
because the plan has seen it whole; what is left is to follow them, and to notice at once where the block does something
else. Of each call of the block there is one :class:`FollowedCall`: forward and recomputation count apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
from attrs import define
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from policylang.backends.eager import origins, problems
from policylang.backends.eager.first_call import BlockMode, note_write
from policylang.backends.eager.followed_call import DRAW, FREED, KEEP, PASS, QUIET, RUN, FollowedCall, without_unread
from policylang.backends.eager.moved_values import back
from policylang.backends.runtime import recomputation
from policylang.errors import PolicyGraphError
from policylang.operators.calls import statistics_positions
from policylang.torch_compat import eager
from policylang.torch_compat.compilers import is_profiling, named_range
from policylang.torch_compat.graphs import outside_of_modes, schema_of
from policylang.torch_compat.tracing import take_apart


@define(eq=False)
class SavedTensor:
    """A node's placeholder for a saved tensor; it dies when autograd frees what the node saved."""

    packed: Any
    """The checkpoint's placeholder."""
    written: int
    """The version of its memory."""
    recomputed: origins.HeldResult | None = None
    number: int = 0
    """In autograd's order."""
    by: int = -1
    """The backward that has recomputed it. In that one the checkpoint returns it, and frees it."""


SavedTensors = list[ref[SavedTensor]]
"""The saved tensors of one run of a block in autograd's order, which is that of its recomputation too."""


@contextmanager
def noting_saved(tensors: SavedTensors, name: str, check: Callable[[Tensor, int, int], None]) -> Iterator[None]:
    """Around a forward in a checkpoint: adds what autograd saves. ``name``: the block's, as a sentence names it;
    ``check`` is told what a backward is given, how often its memory had been written to, and its number."""
    save, give = eager.saved_tensor_hooks()

    def pack(value: Tensor) -> SavedTensor:
        saved = SavedTensor(save(value), eager.version(value), number=len(tensors))
        tensors.append(ref(saved))
        return saved

    def unpack(saved: SavedTensor) -> Tensor:
        held = saved.recomputed
        if held is None or saved.by == eager.running_backward():
            try:
                value: Tensor = give(saved.packed)
            except RuntimeError as error:  # of the checkpoint, which holds what the block was called with
                if not eager.is_of_written_tensor(error):
                    raise
                raise problems.INPUT_WRITTEN.error(name=name) from error
            saved.recomputed = None
        else:
            value = held.value
            happened = held.changed()
            if happened:
                raise problems.CHANGED_BETWEEN.error(name=name, shape=list(value.shape), happened=happened)
        check(value, saved.written, saved.number)
        return value

    with saved_tensors_hooks(pack, unpack):
        yield


@contextmanager
def handing_over(tensors: Sequence[ref[SavedTensor]]) -> Iterator[None]:
    """Around a recomputation: what it makes is given to those nodes of the forward that are still there."""
    save, give = eager.saved_tensor_hooks()
    each, running = iter(tensors), eager.running_backward()
    made: list[tuple[SavedTensor, Tensor]] = []

    def pack(value: Tensor) -> Any:
        made_for = next(each, None)
        saved = None if made_for is None else made_for()
        if saved is not None:
            made.append((saved, value.detach()))
        return save(value)

    try:
        with saved_tensors_hooks(pack, give):
            yield
    finally:  # by now a write that was not done again is not counted any more
        for saved, value in made:
            saved.recomputed, saved.by = origins.HeldResult.of(value), running
        made.clear()


class ForwardMode(BlockMode):
    """A run that follows the plan: holds what it saves."""

    def __init__(self, call: FollowedCall) -> None:
        super().__init__()
        self._call = call
        self._operators = call.instructions.operators
        self._kinds = call.instructions.kinds
        self._noted = call.instructions.noted
        self._numbered = call.instructions.numbered
        self._leaving = call.instructions.leaving
        self._at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        at = self._at
        if self._operators[at] is not func or self.suspended or (func is origins.VIEW and origins.is_same_view(args)):
            return self._other(func, types, args, kwargs or {})
        self._at = at + 1
        read = self._noted.get(at)
        if read is not None:
            tensors = list(origins.tensors_in((args, kwargs)))
            self._call.noted[at] = {number: origins.NotedTensor.of(tensors[number]) for number in read}
        kind = self._kinds[at]
        if at in self._numbered:
            self._call.numbers[at] = origins.numbers_among(args, kwargs or {})
        if kind == DRAW:
            run = partial(func, *args, **kwargs or {})
            out, self._call.states[at] = origins.GeneratorState.around(run, args, kwargs or {})
        else:
            out = func(*args, **kwargs) if kwargs else func(*args)
        if kind == KEEP:
            held = origins.without_history(without_unread(out, self._call.instructions.read.get(at)))
            self._call.entries[at] = origins.HeldResult.of(held)
            if origins.writes(func):
                note_write(func, list(origins.tensors_in(origins.written_by(func, args, kwargs or {}))))
        elif kind == PASS:
            written = self._call.passed[at] = list(origins.tensors_in(origins.written_by(func, args, kwargs or {})))
            note_write(func, written)
        if at in self._leaving:
            self._call.leave(self._leaving[at])
        return out

    def end(self) -> None:
        """Called when the block has returned."""
        call = self._call
        if call.drifted_at is None and self._at != len(self._operators) - 1:
            if call.instructions.after_what_is_made_once(self._at, None) is None:
                self._drift(None)
            else:
                call.left_out = True
        call.count_writes()

    def _other(self, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.suspended:
            return self.aside(func, types, args, kwargs)
        if origins.is_no_step(func, args):
            return func(*args, **kwargs)
        call = self._call
        if call.drifted_at is None:
            found = call.instructions.after_what_is_made_once(self._at, func)
            if found is not None:
                self._at, call.left_out = found, True
                return self.__torch_dispatch__(func, types, args, kwargs)
            self._drift(func)
        return call.run_unplanned(func, args, kwargs)

    def _drift(self, came: Any) -> None:
        """From here on every operator is another one than in the first call."""
        call, at = self._call, self._at
        expected, runs = problems.operator(self._operators[at]), problems.operator(came)
        call.drifted_at = at
        self._operators, self._at = (None,), 0
        call.on_drift(problems.DRIFTED.diagnostic(name=call.name, number=at + 1, expected=expected, came=runs))


class RecomputeMode(BlockMode):
    """The recomputation: gives what is held, runs the rest. ``within``: the block itself is still running, and
    differentiates a part of itself."""

    def __init__(self, call: FollowedCall, within: bool = False) -> None:
        super().__init__()
        self._call = call
        self._at = 0
        self._within = within
        self._frees = not within and not eager.keeps_graph()
        self._ranged = is_profiling()
        self._not_written: list[tuple[Tensor, int]] = []
        call.note_freed()
        if not within:
            self._check_kept()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.suspended:
            return self.aside(func, types, args, kwargs)
        call, at = self._call, self._at
        if call.ran(at) is not func or (func is origins.VIEW and origins.is_same_view(args)):
            found = None if origins.is_no_step(func, args) else self._elsewhere(func)
            if found is None:
                return func(*args, **kwargs)
            at = found
        self._at = at + 1
        kind = call.kind(at)
        if not self._within:
            if at in call.numbers:
                self._check_numbers(at, func, args, kwargs)
            if at in call.noted:
                self._check(at, func, list(origins.tensors_in((args, kwargs))))
        if kind == KEEP and (at in call.entries or not self._within):
            if origins.writes(func):
                self._leave_uncounted(origins.written_by(func, args, kwargs))
            return self._held(at, func)  # without early stop a run within goes on, past where the forward is
        if not self._ranged:
            return self._recompute(kind, at, func, args, kwargs)
        with named_range(recomputation(call.instructions.decided_by(at))):
            return self._recompute(kind, at, func, args, kwargs)

    def _recompute(self, kind: int, at: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        call = self._call
        if kind == DRAW and at in call.states:
            out, same = call.states[at].again(partial(func, *args, **kwargs), kwargs.get("generator"))
            if not same:
                raise problems.DRAWN_MEANWHILE.error(name=call.name, operator=func, number=at + 1)
            return out
        if kind == QUIET:
            statistics = statistics_positions(func)
            return func(*(None if each in statistics else value for each, value in enumerate(args)), **kwargs)
        if kind in (RUN, KEEP, DRAW) or at in call.freed:
            return func(*args, **kwargs)
        return self._skip_write(func, args, kwargs)

    def _skip_write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The return value of an operator that writes: the arguments that it wrote to."""
        targets = origins.written_by(func, args, kwargs)
        self._leave_uncounted(targets)
        returns = len(schema_of(func).returns)
        return (targets[0] if returns == 1 else tuple(targets)) if returns else None

    def _leave_uncounted(self, targets: Sequence[Any]) -> None:
        self._not_written += [(each, eager.version(each)) for each in origins.tensors_in(targets)]

    def __exit__(self, *error: Any) -> None:
        if self._not_written:  # the first count of each tensor comes last
            tensors, versions = zip(*reversed(self._not_written), strict=True)
            eager.set_versions(tensors, versions)
            self._not_written.clear()
        super().__exit__(*error)

    def end(self) -> None:
        """Called when the block has returned, and nothing has interrupted it."""
        call, at = self._call, self._at
        if not self._within and at < call.reach and call.after_what_is_made_once(at, None) is None:
            raise self._diverged(None)

    def _diverged(self, came: Any) -> PolicyGraphError:
        call, at = self._call, self._at
        ran, runs = problems.operator(call.ran(at)), problems.operator(came)
        return problems.DIVERGED.error(name=call.name, number=at + 1, expected=ran, came=runs)

    def _elsewhere(self, func: Any) -> int | None:
        """The position of an operator that is not the next one of the forward; None for one that the forward did not
        run, once the backward has all that it needs: a block may run it on its way out of the interruption."""
        call, at = self._call, self._at
        if call.drifted_at is None and at >= call.instructions.reach:
            rest = enumerate(call.instructions.operators[at:], at)
            return next((position for position, operator in rest if operator is func), None)
        found = call.after_what_is_made_once(at, func)
        if found is None:
            raise self._diverged(func)
        return found

    def _check_numbers(self, at: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raises ``PolicyGraphError`` where an operator is called with other numbers, whether or not it runs: what has
        counted or drawn them has done so again, and goes on from there in the next step."""
        call = self._call
        then, now = call.numbers[at], origins.numbers_among(args, kwargs)
        if then != now and repr(then) != repr(now):  # nan is not itself
            raise problems.OTHER_NUMBER.error(name=call.name, operator=func, number=at + 1, then=then, now=now)

    def _check(self, at: int, func: Any, tensors: Sequence[Tensor]) -> None:
        """Raises ``PolicyGraphError`` where an operator would read other parameters, buffers or constants."""
        noted = self._call.noted[at]
        for number in self._call.read_again(at):
            then, (address, written) = noted[number].tensor, noted[number].memory
            same = (tensors[number] is then or _same_value(tensors[number], then)) and eager.storage_address(
                then
            ) == address
            if not same or eager.version(then) != written or self._call.written_by_blocks(address):
                self._call.changed(at, number, same)

    def _check_kept(self) -> None:
        """Check tensors from outside that autograd keeps and returns as they are by now, at the latest where this run
        is interrupted: the operator itself may not be recomputed. What no backward asks for is no mistake:
        ``check_given`` checks what it receives."""
        call = self._call
        for at, numbers in call.instructions.kept.items():
            for number in numbers if at in call.noted and call.is_planned(at) else ():
                if number in call.read_again(at) or number not in call.noted[at]:  # moved: its copy is read
                    continue
                then, (address, written) = call.noted[at][number].tensor, call.noted[at][number].memory
                if eager.storage_address(then) != address:
                    call.changed(at, number, same=False)
                elif eager.version(then) != written:
                    call.written_since_kept.setdefault(address, (at, number))

    def _held(self, at: int, func: Any) -> Any:
        call = self._call
        entry = call.entries[at]
        if entry is FREED:
            raise problems.RUN_AGAIN.error(name=call.name)
        if not self._within:
            happened = call.change_of(entry)
            if happened:
                raise problems.CHANGED.error(name=call.name, operator=func, number=at + 1, happened=happened)
        if self._frees:
            call.entries[at] = FREED
            return back(entry.value, call.name)
        return back(origins.without_history(entry.value), call.name)


def _same_value(now: Tensor, then: Tensor) -> bool:
    """A recomputed argument equals that of the forward. Views are made anew, and FSDP gathers weights into memory that
    it has freed in between: freed memory cannot be compared."""
    parts = take_apart([now])[0], take_apart([then])[0]
    for new, old in zip(*parts, strict=True):
        if eager.storage_address(new) == eager.storage_address(old) or eager.storage_is_freed(old):
            continue
        if parts[0][0] is not now or new.shape != old.shape or new.dtype != old.dtype:
            return False
        with outside_of_modes():  # those of a block around this one as well
            if not torch.equal(new, old):
                return False
    return True
