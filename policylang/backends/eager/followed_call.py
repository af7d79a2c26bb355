"""One call of a block that follows a plan: what is done at each operator, and what is held for the recomputation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from policylang.backends import finalize
from policylang.backends.copies import await_copies
from policylang.backends.eager import origins, problems
from policylang.backends.eager.block_trace import BlockTrace
from policylang.backends.eager.first_call import Observation, moments, note_write, written_since
from policylang.backends.eager.moved_values import MovedTensor, Offloading, moved_in
from policylang.backends.eager.surroundings import Surroundings
from policylang.errors import PolicyGraphError
from policylang.graph.facts import Facts, Flag, MovedRows
from policylang.language.diagnostics import Diagnostic
from policylang.operators.calls import describe, statistics_positions, updated_statistics
from policylang.operators.names import GETITEM, Category
from policylang.planning.liveness import SavedForBackward, saved_and_recomputed
from policylang.planning.plan import Plan
from policylang.planning.schedule import kept_rows
from policylang.planning.value_outcome import Decision
from policylang.torch_compat.eager import running_backward, storage_address, storage_is_freed, version
from policylang.torch_compat.graphs import outside_of_modes
from policylang.torch_compat.tracing import take_apart

RUN = 0
"""Run it both times."""
KEEP = 1
"""Hold the result, and return it in the recomputation."""
HELD = 2
"""Writes to a held value: run it in the forward only, since the held value includes the write."""
PASS = 3
"""Writes to memory from outside the block: run it the first time only."""
DRAW = 4
"""Draws random numbers: recompute from the generator state of the forward."""
QUIET = 5
"""BatchNorm: recompute without the running statistics."""

_WRITES = int(Flag.WRITES)
_REPEATABLE = int(Flag.REPEATABLE)
_RANDOM = int(Flag.RANDOM)


@frozen(eq=False)
class Instructions:
    """By operator; ``operators`` and ``kinds`` have one more, the end. Other fields are as in the observed stream."""

    operators: tuple[Any, ...]
    kinds: tuple[int, ...]
    reach: int
    read: dict[int, frozenset[int]] = field(factory=dict)
    """By operator with several results, the results that anyone reads."""
    written: dict[int, tuple[int, ...]] = field(factory=dict)
    """By operator that writes to a held value, the operators that hold it."""
    outside: dict[int, tuple[int, ...]] = field(factory=dict)
    """``from_outside`` of the stream, for recomputed operators."""
    kept: dict[int, tuple[int, ...]] = field(factory=dict)
    """``kept`` of the stream; ``state`` is the stream's as well."""
    state: dict[int, tuple[int, ...]] = field(factory=dict)
    noted: dict[int, tuple[int, ...]] = field(init=False)
    """Either of the first two."""
    to_the_end: bool = False
    overwritten: Mapping[int, int] = field(factory=dict)
    """These two are those of the stream as well."""
    differentiable: Collection[int] = ()
    numbered: Collection[int] = ()
    moved: dict[int, MovedRows] = field(factory=dict)
    """By operator, the parts of its result that wait on the host or narrowed."""
    leaving: dict[int, list[int]] = field(factory=dict)
    """By the last operator that touches the memory of such parts, the operators that gave them."""

    @noted.default
    def _either(self) -> dict[int, tuple[int, ...]]:
        both = dict.fromkeys((*self.outside, *self.kept))
        return {at: tuple(dict.fromkeys((*self.outside.get(at, ()), *self.kept.get(at, ())))) for at in both}

    def decided_by(self, at: int) -> str:
        """The line that decided an operator's recomputation, or another reason; empty where none is known."""
        return ""

    def after_what_is_made_once(self, at: int, operator: Any) -> int | None:
        """The next position of an operator (None: the end) behind operators without gradients: these may have made
        something once, a table in an attribute or in a cache, and need not run again."""
        for position in range(at, len(self.operators)):
            if self.operators[position] is operator:
                return position
            if position in self.differentiable:
                break
        return None


@frozen(eq=False, kw_only=True)
class PlannedInstructions(Instructions):
    plan: Plan
    needs: SavedForBackward
    rows: tuple[int, ...]
    returned: MovedRows
    """The parts of what the block returns that the next checkpoint is to move, or to hold narrowed."""
    handed: Mapping[int, int]
    """The parts that it holds on the device because a rule says so, with their nodes."""

    def is_planned(self, at: int) -> bool:
        """The plan decides about an operator's held result: it is no number that Python has read, and no extra result
        of a write to memory from outside."""
        row = self.rows[at]
        return row >= 0 and self.plan.facts.flags[row] & (_WRITES | _REPEATABLE) != _WRITES

    def decided_by(self, at: int) -> str:
        row = self.rows[at] if at < len(self.rows) else -1
        decision = self.plan.decisions[row] if row >= 0 else None
        return "" if decision is None else finalize.provenance(self.plan, decision)


def instructions_of(trace: BlockTrace, plan: Plan) -> PlannedInstructions:
    facts, stream = plan.facts, trace.stream
    needs = saved_and_recomputed(plan)
    kept = kept_rows(facts, (*needs.saved, *needs.offloaded))
    held = frozenset(row for row in kept if row < trace.reach_row)
    steps = zip(stream.operators, trace.rows, strict=True)
    kinds = [
        KEEP if at in stream.numbers else _kind(facts, plan.decisions, row, operator, held)
        for at, (operator, row) in enumerate(steps)
    ]
    owners = [facts.owners[row] for row in trace.rows]
    made = {at: tuple(each for each in before if kinds[each] == KEEP) for at, before in stream.within.items()}
    written = {at: holders for at, holders in made.items() if holders}
    recomputed = (at for at, kind in enumerate(kinds[: stream.reach]) if kind in (RUN, DRAW))
    outside = {at: found for at in recomputed if (found := stream.from_outside.get(at))}
    roots, forms = facts.storage_roots, plan.schedule.forms
    handed = kept.difference(held, needs.offloaded)
    narrow = {roots[row]: row for row in handed if row in forms}
    elsewhere: MovedRows = {roots[row]: forms.get(row) for row in (*needs.offloaded, *forms)}

    def moving(results: Sequence[int]) -> MovedRows:
        rows = {part: roots[row] for part, row in enumerate(results) if row >= 0}
        return {part: elsewhere[root] for part, root in rows.items() if root in elsewhere}

    moved = {at: parts for at, kind in enumerate(kinds) if kind == KEEP and (parts := moving(trace.results[at]))}
    last = _last_readers(trace, elsewhere) if moved else {}
    leaving: dict[int, list[int]] = {}
    for at in moved:
        leaving.setdefault(max(at, last.get(owners[at], at)), []).append(at)
    for at in written:
        if torch.Tag.inplace_view in getattr(stream.operators[at], "tags", ()):
            kinds[at] = RUN  # a change of geometry is replayed: a saved tensor keeps its original shape
    return PlannedInstructions(
        operators=(*stream.operators, None),
        kinds=(*kinds, RUN),
        reach=stream.reach,
        read=trace.read,
        written=written,
        outside=outside,
        kept={at: found for at, found in stream.kept.items() if at <= stream.reach and found},
        state=stream.state,
        to_the_end=stream.to_the_end,
        overwritten=stream.overwritten,
        differentiable=stream.differentiable,
        numbered=stream.numbered,
        plan=plan,
        needs=needs,
        rows=trace.rows,
        moved=moved,
        leaving=leaving,
        returned=moving(trace.returned),
        handed={
            part: narrow.get(roots[row], row)
            for part, row in enumerate(trace.returned)
            if row in handed or (row >= 0 and roots[row] in narrow)
        },
    )


def _last_readers(trace: BlockTrace, memory: Collection[int]) -> dict[int, int]:
    """By row that some memory belongs to, the last operator that reads or writes any of it."""
    facts, found = trace.facts, dict[int, int]()
    operators = {row: at for at, row in enumerate(trace.rows) if row >= 0}
    for row in facts.forward:
        at = operators.get(row, operators.get(trace.inner.get(row, facts.owners[row]), -1))
        for touched in (row, *facts.inputs[row]):
            root = facts.storage_roots[touched]
            if root in memory:
                found[facts.owners[root]] = max(at, found.get(facts.owners[root], -1))
    return found


def _write(operator: Any) -> int:
    """For an operator that writes to memory from outside: its other results are held."""
    return PASS if origins.gives_what_it_writes(operator) else KEEP


def _kind(facts: Facts, decisions: Sequence[Decision | None], row: int, operator: Any, held: frozenset[int]) -> int:
    if row < 0:
        return _write(operator) if origins.writes(operator) else RUN
    flags = facts.flags[row]
    if flags & _WRITES and origins.writes(operator):
        if not flags & _REPEATABLE:
            return _write(operator)
        if (decision := decisions[row]) is not None and decision.outcome.is_held:
            is_own = row in held or flags & Flag.MULTI_OUTPUT
            return KEEP if is_own and not origins.gives_what_it_writes(operator) else HELD
    elif row in held or any(piece in held for piece in facts.users[row] if facts.targets[piece] == GETITEM):
        return KEEP
    elif flags & _WRITES and statistics_positions(operator):
        return QUIET
    return DRAW if flags & _RANDOM else RUN


FREED = origins.HeldResult(None, [])
"""Stands for what a backward has used up."""


@define(eq=False)
class FollowedCall:
    """One call of a block; its operators are counted from 0, and most fields are by that position."""

    name: str
    instructions: Instructions
    on_drift: Callable[[Diagnostic], None]
    """Called where the forward leaves the plan. May raise."""
    surroundings: Surroundings
    entries: dict[int, origins.HeldResult] = field(factory=dict)
    states: dict[int, origins.GeneratorState] = field(factory=dict)
    passed: dict[int, list[Tensor]] = field(factory=dict)
    """By operator that is not recomputed, the tensors from outside that it wrote to."""
    freed: set[int] = field(factory=set)
    """The operators of ``passed`` whose memory has been freed since."""
    noted: dict[int, dict[int, origins.NotedTensor]] = field(factory=dict)
    """By operator and position among its tensor arguments: tensors that the recomputation has to find unchanged."""
    numbers: dict[int, list[Any]] = field(factory=dict)
    """The plain numbers that an operator was called with."""
    written_since_kept: dict[int | None, tuple[int, int]] = field(factory=dict)
    """By address of memory that autograd keeps and that was written to since, its place in ``noted``."""
    began: int = field(factory=lambda: next(moments))
    ended: int = -1
    """When the block returned: what it writes to held values until then is expected."""
    offloading: Offloading = field(factory=Offloading)
    inputs: list[MovedTensor] = field(factory=list)
    """Replacements for tensors that the checkpoint was called with."""
    before: Callable[[], FollowedCall | None] = lambda: None
    """The call before it that has something on the host, while that lives."""
    _fetched_by: int | None = None
    drifted_at: int | None = None
    tail: list[tuple[Any, int]] = field(factory=list)
    """The operators that ran from there on, and the instruction for each."""
    _own: set[int] | None = None
    left_out: bool = False
    """Operators were missing that had once made something which the block keeps."""

    def ran(self, position: int) -> Any:
        """The operator that the forward ran at a position; None where it was over."""
        if self.drifted_at is None or position < self.drifted_at:
            return self.instructions.operators[position]
        at = position - self.drifted_at
        return self.tail[at][0] if at < len(self.tail) else None

    def kind(self, position: int) -> int:
        """The instruction for an operator that the forward has run."""
        if self.is_planned(position):
            return self.instructions.kinds[position]
        return self.tail[position - (self.drifted_at or 0)][1]

    @property
    def reach(self) -> int:
        """The length of a complete recomputation."""
        return self.instructions.reach if self.drifted_at is None else self.drifted_at + len(self.tail)

    def after_what_is_made_once(self, at: int, operator: Any) -> int | None:
        """The instructions' answer; None where the forward did not follow them."""
        return self.instructions.after_what_is_made_once(at, operator) if self.drifted_at is None else None

    def run_unplanned(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator behind the point of drift; it is recomputed, except for its writes to the block's buffers."""
        assert self.drifted_at is not None
        at, kind = self.drifted_at + len(self.tail), RUN
        if numbers := origins.numbers_among(args, kwargs):
            self.numbers[at] = numbers
        own = self._own_buffers()
        given = enumerate(origins.tensors_in((args, kwargs)))
        read = {number: each for number, each in given if not own.isdisjoint(origins.addresses([each]))}
        self.noted[at] = {number: origins.NotedTensor.of(each) for number, each in read.items()}
        is_view = bool(describe(func).flags & Category.VIEW)
        if origins.draws(func):
            kind = DRAW
            out, self.states[at] = origins.GeneratorState.around(partial(func, *args, **kwargs), args, kwargs)
        else:
            out = func(*args, **kwargs)
        written = list(origins.tensors_in(origins.written_by(func, args, kwargs)))
        if updated_statistics(func, args):
            kind = QUIET
        elif written and not own.isdisjoint(origins.addresses(written)):
            kind = PASS if origins.gives_what_it_writes(func) else KEEP
            self.passed[at] = written
            note_write(func, written)
        elif origins.gives_number(out) or (
            not (written or is_view)
            and not origins.addresses(read.values()).isdisjoint(
                origins.addresses(each for own in self.passed.values() for each in own)
            )
        ):
            kind = KEEP
        if kind == KEEP:
            self.entries[at] = origins.HeldResult.of(origins.without_history(out))
        if kind not in (RUN, DRAW) or is_view:
            del self.noted[at]
        self.tail.append((func, kind))
        return out

    def _own_buffers(self) -> set[int]:
        """The memory of the block's buffers, which its calls may write to."""
        if self._own is None:
            tables = [table.content.values() for table in self.surroundings.tensors]
            found = (each for table in tables for each in table if isinstance(each, Tensor) and not each.requires_grad)
            self._own = origins.addresses(found)
        return self._own

    def count_writes(self) -> None:
        """Called when the block has returned: its own writes to held values are expected."""
        for at, holders in self.instructions.written.items():
            if self.is_planned(at):
                for holder in holders:
                    if holder in self.entries:
                        self.entries[holder] = origins.HeldResult.of(self.entries[holder].value)
        self.ended = next(moments)
        self.note_freed()
        for at, noted in self.noted.items():
            for number, each in noted.items():
                if not self.is_state(at, number):  # FSDP may have filled the memory of a parameter since
                    noted[number] = origins.NotedTensor.of(each.tensor)

    def leave(self, positions: Iterable[int]) -> None:
        """Moves results of these operators to the host, or narrows them."""
        for at in positions:
            if (held := self.entries.get(at)) is not None and held is not FREED:
                self.entries[at] = origins.HeldResult.of(self.offloading.moved(held.value, self.instructions.moved[at]))

    def finish(self, inputs: list[MovedTensor]) -> None:
        """Called when the block has returned, and knows what its checkpoint has moved of what it was called with."""
        self.inputs = inputs
        moved = {address for each in inputs for address in each.addresses}
        for at, noted in self.noted.items() if moved else ():
            for number in [each for each, found in noted.items() if found.memory[0] in moved]:
                if number not in self.read_again(at):  # else it holds the memory
                    del noted[number]

    @property
    def on_host(self) -> list[MovedTensor]:
        return [*self.inputs, *(each for held in self.entries.values() for each in moved_in(held.value))]

    def fetch(self) -> None:
        """The recomputation begins: start the copies back, and those of the calls before, once in a backward."""
        if self._fetched_by == running_backward():
            return
        self._fetched_by = running_backward()
        await_copies()
        call: FollowedCall | None = self
        for _ in range(self.offloading.ahead + 1):
            for each in [] if call is None else call.on_host:
                for part in each.moved:
                    part.memory.fetch()
            call = None if call is None else call.before()

    @property
    def to_the_end(self) -> bool:
        """Its recomputation is not to stop with the last saved value: something is written to that afterwards."""
        return self.instructions.to_the_end or self.drifted_at is not None

    def check_given(self, value: Tensor, written: int, number: int) -> None:
        """Called as a backward receives a tensor that autograd kept and that had then been ``written`` to so often.
        ``number``: in autograd's order."""
        at = self.instructions.overwritten.get(number)
        if at is not None and self.is_planned(at):
            operator, shape = self.ran(at), list(value.shape)
            raise problems.OVERWRITTEN.error(name=self.name, operator=operator, number=at + 1, shape=shape)
        found = self.written_since_kept.get(storage_address(value))
        if found is not None and version(value) != written:
            self.changed(*found, same=True)

    def changed(self, at: int, number: int, same: bool) -> None:
        """Raises ``PolicyGraphError``, or warns, of a read that is not as it was. ``same``: it is the same tensor."""
        then, (address, _) = self.noted[at][number].tensor, self.noted[at][number].memory
        problem = problems.WRITTEN_TENSOR if same else problems.OTHER_TENSOR
        found = problem.diagnostic(name=self.name, operator=self.ran(at), number=at + 1, shape=list(then.shape))
        if not same or then.requires_grad or self.is_state(at, number) or written_since(address, self.began):
            raise PolicyGraphError([found])
        problems.warn(found)

    def is_state(self, at: int, number: int) -> bool:
        """The block itself writes to what an operator read there, as far as that is known."""
        return number in self.instructions.state.get(at, ()) if self.is_planned(at) else True

    def read_again(self, at: int) -> Collection[int]:
        """The noted tensors that the recomputed operator reads once more."""
        return self.instructions.outside.get(at, ()) if self.is_planned(at) else self.noted[at]

    def written_by_blocks(self, address: int | None) -> bool:
        """A block has written to memory since, even where autograd does not count it (``.data``). Freed memory is
        filled again before it is read."""
        filled = (each for at in self.freed for each in self.passed[at])
        return written_since(address, self.began) and address not in origins.addresses(filled)

    def change_of(self, held: origins.HeldResult) -> str:
        """The change of a held value's memory since the block returned, as a phrase; empty where there is none."""
        written = any(written_since(each, self.ended) for each in origins.addresses(origins.tensors_in(held.value)))
        return held.changed() or (origins.WRITTEN_TO if written else "")

    def is_planned(self, at: int) -> bool:
        return self.drifted_at is None or at < self.drifted_at

    def note_freed(self) -> None:
        """Tensors from outside that were written and freed are written again: who freed them fills them when needed."""
        for at, tensors in self.passed.items():
            if any(map(storage_is_freed, take_apart(tensors)[0])):
                self.freed.add(at)


def observed_call(call: FollowedCall, observation: Observation) -> FollowedCall:
    """The call that was observed, once it has a plan: results that the plan does not save are dropped."""
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
    """A call that is still being observed and recomputes a part of itself: everything it has made so far is held, and
    everything it has written stays written."""
    operators, held = observation.stream.operators, observation.entries
    kinds = [_write(each) if origins.writes(each) else KEEP if at in held else RUN for at, each in enumerate(operators)]
    instructions = Instructions((*operators, None), (*kinds, RUN), len(operators))
    found = observation.before.surroundings(observation.before.volatile())
    return FollowedCall(observation.name, instructions, problems.warn, found, held)


def _without_unread(held: origins.HeldResult, read: frozenset[int] | None) -> origins.HeldResult:
    """Keeps the recorded memory, except for placeholders of unread results."""
    value = without_unread(held.value, read)
    pairs = zip(origins.tensors_in(value), origins.tensors_in(held.value), held.memory, strict=True)
    with outside_of_modes():
        return origins.HeldResult(
            value, [own if leaf is before else origins.memory_of(leaf) for leaf, before, own in pairs]
        )


def without_unread(out: Any, read: frozenset[int] | None) -> Any:
    """Replace results that no operator reads by one element in their shape. Not so integers on a CPU, which Python and
    C++ read without any operator: the lengths of a packed sequence, the argument of ``tolist``."""
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
