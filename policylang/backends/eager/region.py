"""Plans one block of a model under a policy, each time it is first called in some way, and keeps the plans."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Mapping
from functools import partial
from typing import Any

from attrs import define, evolve, field
from torch import Tensor, nn

from policylang.audit.data import Audit
from policylang.backends.eager import problems
from policylang.backends.eager.call_key import call_key
from policylang.backends.eager.eligibility import check_parts
from policylang.backends.eager.execution.followed_call import FollowedCall, observed_call, unfinished_call
from policylang.backends.eager.execution.instructions import PlannedInstructions
from policylang.backends.eager.execution.surroundings import Before, Surroundings, Volatile, surroundings
from policylang.backends.eager.observation.block_trace import BlockTrace, fingerprint, trace_of
from policylang.backends.eager.observation.first_call import Observation
from policylang.backends.eager.observation.fsdp_hooks import gathered_over
from policylang.backends.eager.observation.origins import HeldResult, tensors_in
from policylang.backends.eager.path import EagerPath, HeldTensors
from policylang.backends.path import raise_differences
from policylang.errors import PolicyGraphError
from policylang.graph.blocks import BlockTable, blocks_of
from policylang.language.codes import is_error
from policylang.language.diagnostics import Diagnostic
from policylang.language.globs import PathGlob
from policylang.language.syntax import Policy
from policylang.planning.block_graph import Place
from policylang.planning.plan import Plan
from policylang.planning.refusals import MATCHES_NOTHING
from policylang.ranks.comparison import Known, comparing

_PATH = EagerPath()


@define(eq=False)
class CachedPlan:
    """What is remembered of a block called in one way."""

    instructions: PlannedInstructions
    volatile: Volatile
    audit: Audit | None = None


@define(eq=False)
class RunningBlock:
    """A call of a block that has not returned: one that follows a plan, or one that is observed."""

    key: Hashable
    module: nn.Module
    kept: CachedPlan | None = None
    call: FollowedCall | None = None
    observation: Observation | None = None
    before: Before | None = None
    gathered_over: tuple[tuple[int, ...], ...] = ()
    """Ranks that FSDP gathers weights over inside the block, each time it runs."""


Traces = dict[Hashable, BlockTrace]
"""Of the blocks of one model: those that do the same share what is known of it."""


@define(eq=False)
class CheckpointRegion:
    """A block. ``names`` are those of all blocks of its model where they are known, and ``number`` is its own."""

    policy: Policy
    root: str
    strict: bool
    names: tuple[str, ...] = ()
    number: int | None = None
    traces: Traces = field(factory=dict)
    kept: dict[Hashable, CachedPlan] = field(factory=dict)
    nothing: dict[Hashable, tuple[Diagnostic, ...]] = field(factory=dict)
    """By the way it is called, the errors that say "matches nothing": another block may have what a rule names."""
    agreed: Known = field(factory=list)
    """What the ranks that share the block have agreed on."""
    idle: bool = False
    """Whether it has been called without anything for its backward to read."""

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RunningBlock:
        """A call of the block: the first of its kind is observed, the others follow what was planned then."""
        modules = list(module.modules())
        key = call_key(modules, args, kwargs)
        running = RunningBlock(key, module, self.kept.get(key))
        if running.kept is None:
            check_parts(module, self.root)
            running.observation = Observation.of(module, args, kwargs)
            running.before = Before.of(modules, (args, kwargs))
            running.gathered_over = gathered_over(module)
        else:
            found = surroundings(modules, (args, kwargs), running.kept.volatile)
            running.call = self._call(running, running.kept.instructions, found)
        return running

    def end(self, running: RunningBlock, returned: Iterable[Tensor]) -> FollowedCall | None:
        """After the forward: what its backward is to follow; None where nothing is read by any.

        Raises ``PolicyMatchError`` where policy and block do not fit, and ``PolicyAuditError`` where the first call of
        its kind holds other values than planned. Other memory for the same values, which is a kernel's choice, is said
        in the report.
        """
        if running.observation is not None:
            self._plan(running, running.observation, list(returned))
        call, kept = running.call, running.kept
        if call is None or kept is None:
            return None
        if call.left_out and self.kept.get(running.key) is kept:
            del self.kept[running.key]  # observed again: from now on the block does without what it makes once
        return call

    def so_far(self, running: RunningBlock) -> FollowedCall:
        """Of a call that has not returned and runs again from within."""
        if running.call is not None:
            return running.call
        assert running.observation is not None
        assert running.before is not None
        found = running.before.surroundings(running.before.volatile())
        return unfinished_call(self._named(running.module), running.observation, found)

    def _plan(self, running: RunningBlock, observation: Observation, returned: list[Tensor]) -> None:
        if not observation.read_by_backward:
            if observation.hooked and not self.idle and any(each.requires_grad for each in returned):
                problems.warn(problems.HOOKED.diagnostic(name=self._named(running.module)))
            self.idle = True
            return
        trace = self._trace(observation, returned)
        # all its ranks have run the block's collectives by now; what runs again in the backward is compared before
        topic = f"checkpoint of {self._named(running.module)}"
        with comparing(topic, known=self.agreed, around=running.gathered_over):
            instructions, self.nothing[running.key] = self._instructions(trace, running.module)
        before = running.before
        assert before is not None
        volatile = before.volatile()
        running.kept = self.kept[running.key] = CachedPlan(instructions, volatile)
        running.call = observed_call(self._call(running, instructions, before.surroundings(volatile)), observation)
        self._audit(running.kept, running.call, before)

    def _instructions(self, trace: BlockTrace, module: nn.Module) -> tuple[PlannedInstructions, tuple[Diagnostic, ...]]:
        """What is done with the block, and the errors that say "matches nothing"."""
        deferred = (MATCHES_NOTHING,) if len(self.names) > 1 else ()
        plan = _PATH.plan(trace.facts, self.policy, place=self._place(trace, module), deferred=deferred)
        nothing = tuple(found for found in plan.diagnostics if is_error(found))
        return _PATH.carry_out(trace, _of_one_block(plan, self._named(module)), {}), nothing

    def _trace(self, observation: Observation, returned: list[Tensor]) -> BlockTrace:
        """Blocks that do the same share what is known of it."""
        key = fingerprint(observation, returned)
        found = self.traces.get(key)
        if found is None:
            found = self.traces[key] = trace_of(observation, returned)
        return found.under(self.root)

    def _call(self, running: RunningBlock, instructions: PlannedInstructions, found: Surroundings) -> FollowedCall:
        return FollowedCall(self._named(running.module), instructions, partial(self._drifted, running.key), found)

    def _audit(self, kept: CachedPlan, call: FollowedCall, before: Before) -> None:
        instructions = kept.instructions
        held = {instructions.rows[at]: _read(entry, instructions.read.get(at)) for at, entry in call.entries.items()}
        kept.audit = _PATH.audit(instructions.plan, HeldTensors(instructions.needs, held, before.alive()))
        raise_differences([found for found in kept.audit.differences if is_error(found)])

    def _place(self, trace: BlockTrace, module: nn.Module) -> Place:
        place, facts = Place(trace.reach_row, unchanged=trace.unchanged, inner=trace.inner), trace.facts
        if self.number is not None:
            blocks = BlockTable(array("i", [self.number]) * len(facts), self.names, alone=self.number)
            return evolve(place, blocks=blocks)
        if self.policy.blocks is not None:
            glob = PathGlob(self.policy.blocks.glob)
            is_block = bool(self.root) and glob.outermost(self.root) == self.root
            if not is_block and blocks_of(facts, glob).names:
                return place
        name = self.root or type(module).__name__
        return evolve(place, blocks=BlockTable(array("i", bytes(4 * len(facts))), (name,), alone=0), numbered=False)

    def _named(self, module: nn.Module) -> str:
        return problems.block(module, self.root)

    def _drifted(self, key: Hashable, found: Diagnostic) -> None:
        self.kept.pop(key, None)
        if self.strict:
            raise PolicyGraphError([found])
        problems.warn(found)


def _of_one_block(plan: Plan, name: str) -> Plan:
    """The plan of a block that is the whole graph counts it as one block, whichever it is."""
    if not plan.block_names or len(set(plan.block_of)) > 1:
        return plan
    number = plan.block_of[0] if len(plan.block_of) else 0
    if number < 0:
        return plan
    return evolve(plan, block_of=array("i", bytes(4 * len(plan.facts))), block_names=(plan.block_names[number],))


def _read(held: HeldResult, read: frozenset[int] | None) -> list[Tensor]:
    """Of what an operator gave, what anyone reads: the rest is only stood in for."""
    if read is None or not isinstance(held.value, tuple | list):
        return list(tensors_in(held.value))
    return list(tensors_in([part for at, part in enumerate(held.value) if at in read]))
