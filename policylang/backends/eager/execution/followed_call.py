"""One call of a block: what its forward holds for its recomputation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from policylang.backends.eager import problems
from policylang.backends.eager.execution.instructions import (
    DRAW,
    KEEP,
    PASS,
    QUIET,
    RUN,
    Instructions,
    instructions_so_far,
)
from policylang.backends.eager.observation.block_mode import moments, note_write, written_since
from policylang.backends.eager.observation.first_call import Observation
from policylang.backends.eager.observation.origins import (
    HeldResult,
    NotedTensor,
    addresses,
    memory_of,
    tensors_in,
    without_history,
)
from policylang.backends.eager.observation.stream import (
    GeneratorState,
    draws,
    gives_number,
    gives_what_it_writes,
    numbers_among,
    written_by,
)
from policylang.backends.eager.observation.surroundings import Surroundings
from policylang.errors import PolicyGraphError
from policylang.language.diagnostics import Diagnostic
from policylang.operators.calls import describe, updated_statistics
from policylang.operators.names import Category
from policylang.torch_compat.eager import storage_address, storage_is_freed, version
from policylang.torch_compat.graphs import outside_of_modes
from policylang.torch_compat.subclasses import take_apart

FREED = HeldResult(None, [])
"""Stands for what a backward has used up."""


@define(eq=False)
class FollowedCall:
    """One call of a block; its operators are counted from 0, and most fields are by that position."""

    name: str
    instructions: Instructions
    on_drift: Callable[[Diagnostic], None]
    """Called where the forward leaves the plan. May raise."""
    surroundings: Surroundings
    entries: dict[int, HeldResult] = field(factory=dict)
    states: dict[int, GeneratorState] = field(factory=dict)
    passed: dict[int, list[Tensor]] = field(factory=dict)
    """Of an operator that is not to run again: what it wrote to, from outside the block."""
    let_go: set[int] = field(factory=set)
    """Of these, the ones whose memory has been let go since."""
    noted: dict[int, dict[int, NotedTensor]] = field(factory=dict)
    """By position among those that an operator reads, what a second run has to find as it was."""
    numbers: dict[int, list[Any]] = field(factory=dict)
    """The plain numbers that an operator was called with."""
    written_since_kept: dict[int | None, tuple[int, int]] = field(factory=dict)
    """By the address of memory that autograd keeps and that was written to since, where in ``noted`` it is."""
    began: int = field(factory=lambda: next(moments))
    drifted_at: int | None = None
    tail: list[tuple[Any, int]] = field(factory=list)
    """The operators that ran from there on, and what a second run does with each."""
    _own: set[int] | None = None
    left_out: bool = False
    """Whether operators did not run that had made something which is kept since."""

    def ran(self, position: int) -> Any:
        """The operator that the forward ran at a position; None where it was over."""
        if self.drifted_at is None or position < self.drifted_at:
            return self.instructions.operators[position]
        at = position - self.drifted_at
        return self.tail[at][0] if at < len(self.tail) else None

    def kind(self, position: int) -> int:
        """What a second run does with an operator that the forward has run."""
        if self.is_planned(position):
            return self.instructions.kinds[position]
        return self.tail[position - (self.drifted_at or 0)][1]

    @property
    def reach(self) -> int:
        """A second run that was not interrupted has run so many operators."""
        return self.instructions.reach if self.drifted_at is None else self.drifted_at + len(self.tail)

    def after_what_is_made_once(self, at: int, operator: Any) -> int | None:
        """As the instructions say; None where the forward did not follow them."""
        return self.instructions.after_what_is_made_once(at, operator) if self.drifted_at is None else None

    def run_unplanned(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """An operator behind the plan runs, and runs again, except for what it does to the buffers of the block."""
        assert self.drifted_at is not None
        at, kind = self.drifted_at + len(self.tail), RUN
        if draws(func):
            kind = DRAW
            self.states[at] = GeneratorState.before(args, kwargs)
        if numbers := numbers_among(args, kwargs):
            self.numbers[at] = numbers
        own = self._own_buffers()
        read = {
            number: each
            for number, each in enumerate(tensors_in((args, kwargs)))
            if not own.isdisjoint(addresses([each]))
        }
        self.noted[at] = {number: NotedTensor.of(each) for number, each in read.items()}
        out = func(*args, **kwargs)
        written = list(tensors_in(written_by(func, args, kwargs)))
        if updated_statistics(func, args):
            kind = QUIET
        elif written and not own.isdisjoint(addresses(written)):
            kind = PASS if gives_what_it_writes(func) else KEEP
            self.passed[at] = written
            note_write(written)
        elif gives_number(out) or (
            read and self._has_written(read.values()) and not written and not describe(func).flags & Category.VIEW
        ):
            kind = KEEP
        if kind == KEEP:
            self.entries[at] = HeldResult.of(without_history(out))
        if kind not in (RUN, DRAW) or describe(func).flags & Category.VIEW:
            del self.noted[at]
        self.tail.append((func, kind))
        return out

    def _own_buffers(self) -> set[int]:
        """The memory of the block's buffers, which its calls may write to."""
        if self._own is None:
            tables = [table.content.values() for table in self.surroundings.tensors]
            found = (each for table in tables for each in table if isinstance(each, Tensor) and not each.requires_grad)
            self._own = addresses(found)
        return self._own

    def _has_written(self, tensors: Iterable[Tensor]) -> bool:
        written = addresses(each for passed in self.passed.values() for each in passed)
        return not written.isdisjoint(addresses(tensors))

    def count_writes(self) -> None:
        """To be called when the block has returned: what it wrote itself to held values is as it should be."""
        for at, holders in self.instructions.written.items():
            if self.is_planned(at):
                for holder in holders:
                    if holder in self.entries:
                        self.entries[holder] = HeldResult.of(self.entries[holder].value)
        self.note_let_go()
        for at, noted in self.noted.items():
            for number, each in noted.items():
                if not self.is_state(at, number):  # FSDP may have filled the memory of a parameter since
                    noted[number] = NotedTensor.of(each.tensor)

    def check_given(self, value: Tensor, written: int) -> None:
        """To be called as a backward is given what autograd kept, which had then been ``written`` to so often."""
        found = self.written_since_kept.get(storage_address(value))
        if found is not None and version(value) != written:
            self.changed(*found, same=True)

    def changed(self, at: int, number: int, same: bool) -> None:
        """Raises ``PolicyGraphError``, or warns, of what an operator read and does not find as it was. ``same``: it is
        the same tensor."""
        then, (address, _) = self.noted[at][number].tensor, self.noted[at][number].memory
        problem = problems.WRITTEN_TENSOR if same else problems.OTHER_TENSOR
        found = problem.diagnostic(name=self.name, operator=self.ran(at), number=at + 1, shape=list(then.shape))
        if not same or then.requires_grad or self.is_state(at, number) or written_since(address, self.began):
            raise PolicyGraphError([found])
        problems.warn(found)

    def is_state(self, at: int, number: int) -> bool:
        """Whether an operator read there what the block itself writes to, as far as that is known."""
        return number in self.instructions.state.get(at, ()) if self.is_planned(at) else True

    def read_again(self, at: int) -> Collection[int]:
        """Which of the tensors that an operator has read, and that are noted, it reads again."""
        return self.instructions.outside.get(at, ()) if self.is_planned(at) else self.noted[at]

    def written_by_blocks(self, address: int | None) -> bool:
        """Whether a block has written to memory since, even where autograd does not count it (``.data``). What was let
        go is filled again before it is read."""
        filled = (each for at in self.let_go for each in self.passed[at])
        return written_since(address, self.began) and address not in addresses(filled)

    def is_planned(self, at: int) -> bool:
        return self.drifted_at is None or at < self.drifted_at

    def note_let_go(self) -> None:
        """What was written from outside, and is gone by now, has to be written again: whoever let go of that memory
        fills it where it is needed."""
        for at, tensors in self.passed.items():
            if any(map(storage_is_freed, take_apart(tensors)[0])):
                self.let_go.add(at)


def observed_call(call: FollowedCall, observation: Observation) -> FollowedCall:
    """Of a call that was observed and has a plan now: what the plan does not save is let go."""
    kinds, read = call.instructions.kinds, call.instructions.read
    held = {at: entry for at, entry in observation.entries.items() if kinds[at] == KEEP}
    call.entries = {at: _without_unread(entry, read.get(at)) for at, entry in held.items()}
    call.states = {at: state for at, state in observation.states.items() if kinds[at] == DRAW}
    call.passed = {at: own for at, own in observation.writes.items() if kinds[at] == PASS}
    call.numbers = observation.numbers
    for at, numbers in call.instructions.noted.items():
        call.noted[at] = {number: observation.noted[at][number] for number in numbers}
    call.count_writes()
    return call


def unfinished_call(observation: Observation) -> FollowedCall:
    """Of a call that is being observed and runs again from within: all that it has made so far is held."""
    found = observation.before.surroundings(observation.before.volatile())
    return FollowedCall(observation.name, instructions_so_far(observation), problems.warn, found, observation.entries)


def _without_unread(held: HeldResult, read: frozenset[int] | None) -> HeldResult:
    """Its memory is as it was when it was made; only what stands in for a result that nobody reads is new."""
    value = without_unread(held.value, read)
    pairs = zip(tensors_in(value), tensors_in(held.value), held.memory, strict=True)
    with outside_of_modes():
        return HeldResult(value, [own if leaf is before else memory_of(leaf) for leaf, before, own in pairs])


def without_unread(out: Any, read: frozenset[int] | None) -> Any:
    """Results that no operator reads give way to one element in their shape: a second run has to give something.

    Not so integers on a CPU, which Python and C++ read without any operator: the lengths of a packed sequence, what
    ``tolist`` gives.
    """
    if read is None or not isinstance(out, tuple | list) or len(read) == len(out):
        return out
    with outside_of_modes():
        return type(out)([part if at in read else _hollow(part) for at, part in enumerate(out)])


def _hollow(value: Any) -> Any:
    if type(value) is not Tensor or value.numel() < 2 or value.layout is not torch.strided:
        return value
    if value.is_floating_point():  # whoever reads it after all is to notice
        return value.new_full((1,) * value.dim(), torch.nan).expand(value.shape)
    return value if value.device.type == "cpu" else value.new_zeros((1,) * value.dim()).expand(value.shape)
