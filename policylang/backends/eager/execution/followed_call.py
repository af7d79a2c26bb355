"""One call of a block: what its forward holds for its recomputation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attrs import define, field
from torch import Tensor

from policylang.backends.eager import problems
from policylang.backends.eager.execution.instructions import DRAW, KEEP, PASS, Instructions, instructions_so_far
from policylang.backends.eager.observation.first_call import Observation
from policylang.backends.eager.observation.origins import HeldResult, memory_of, tensors_in
from policylang.backends.eager.observation.stream import GeneratorState
from policylang.backends.eager.observation.surroundings import Surroundings
from policylang.language.diagnostics import Diagnostic
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
    noted: dict[int, list[Tensor]] = field(factory=dict)
    """What an operator that runs again has read, and that is neither of the block's making nor one of its inputs."""
    noted_memory: dict[int, list[tuple[int | None, int]]] = field(factory=dict)
    """Of these tensors, when the block has returned: the address and how often it has been written to."""
    drifted_at: int | None = None
    tail: list[Any] = field(factory=list)
    """The operators that ran from there on."""
    left_out: bool = False
    """Whether operators did not run that had made something which is kept since."""

    def ran(self, position: int) -> Any:
        """The operator that the forward ran at a position; None where it was over."""
        if self.drifted_at is None or position < self.drifted_at:
            return self.instructions.operators[position]
        at = position - self.drifted_at
        return self.tail[at] if at < len(self.tail) else None

    def count_writes(self) -> None:
        """To be called when the block has returned: what it wrote itself to held values is as it should be."""
        for at, holders in self.instructions.written.items():
            if self.drifted_at is None or at < self.drifted_at:
                for holder in holders:
                    if holder in self.entries:
                        self.entries[holder] = HeldResult.of(self.entries[holder].value)
        self.note_let_go()
        for at, tensors in self.noted.items():
            self.noted_memory[at] = [(storage_address(each), version(each)) for each in tensors]

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
    call.noted = {at: observation.noted[at] for at in call.instructions.from_outside}
    call.count_writes()
    return call


def unfinished_call(name: str, observation: Observation) -> FollowedCall:
    """Of a call that is being observed and runs again from within: all that it has made so far is held."""
    found = observation.before.surroundings(observation.before.volatile())
    return FollowedCall(name, instructions_so_far(observation), problems.warn, found, observation.entries)


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
