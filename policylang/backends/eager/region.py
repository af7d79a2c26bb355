"""Plans one block of a model under a policy, once for each kind of call, and keeps the plans.

The key of a plan is all of a call that changes which operators it runs, as far as that is visible from outside.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from policylang.audit.graphs import audit_eager
from policylang.audit.outcome import Audit
from policylang.backends.applied_plans import AppliedPlan, announce
from policylang.backends.eager import problems
from policylang.backends.eager.block_trace import BlockTrace, fingerprint, trace_of
from policylang.backends.eager.first_call import Observation, is_first_fsdp
from policylang.backends.eager.followed_call import (
    FollowedCall,
    PlannedInstructions,
    instructions_of,
    observed_call,
    unfinished_call,
)
from policylang.backends.eager.moved_values import MovedTensor, NarrowedPart, Offloading
from policylang.backends.eager.origins import leaves_in, tensors_in
from policylang.backends.eager.surroundings import Before, Surroundings, Volatile, surroundings
from policylang.backends.fsdp_weights import NamedBlock, weights_of_blocks
from policylang.backends.path import BackendPath, raise_differences, raise_errors
from policylang.errors import PolicyGraphError
from policylang.graph import marks
from policylang.graph.blocks import BlockTable, blocks_of
from policylang.graph.facts import StepKind
from policylang.language.diagnostics import Diagnostic, is_error
from policylang.language.globs import PathGlob
from policylang.language.syntax import Policy
from policylang.planning.plan import Plan
from policylang.planning.refusals import MATCHES_NOTHING
from policylang.planning.schedule import BlockContext
from policylang.ranks.comparison import AgreedAccounts, agree_on_collectives, comparing, tell_stopped
from policylang.ranks.rank_account import GraphRun
from policylang.torch_compat import eager
from policylang.torch_compat.compilers import compiled_in_place, compiler_of, is_compiled
from policylang.torch_compat.tracing import take_apart


def traced_for_others() -> bool:
    """torch's exporters are tracing the model: their result has no backward of its own."""
    return bool(torch.jit.is_tracing() or torch.compiler.is_exporting())


def runs_for_backward(module: nn.Module) -> bool:
    """The block runs as in training, and nothing traces or transforms it."""
    if not (module.training and torch.is_grad_enabled()) or eager.transformed() or traced_for_others():
        return False
    return eager.graph_being_traced() is None and any(each.requires_grad for each in module.parameters())


def stands_aside(module: nn.Module, root: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The block is to run without its checkpoint. Warns where a backward could follow. Raises ``PolicyGraphError``
    under a transformation that differentiates by itself, whose values no checkpoint reaches, and for nested tensors of
    strided layout, before torch's checkpoint gets them."""
    if traced_for_others() or any(isinstance(each, fx.Proxy) for each in (*args, *kwargs.values())):
        return True
    check_given(module, root, args, kwargs)
    if not eager.transformed():
        return False
    name = problems.block(module, root)
    if eager.differentiated_by_transform():
        raise problems.DIFFERENTIATED.error(name=name)
    if torch.is_grad_enabled() and any(each.requires_grad for each in module.parameters()):
        problems.warn(problems.RUNS_TRANSFORMED.diagnostic(name=name))
    return True


def check_given(module: nn.Module, root: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises ``PolicyGraphError`` for nested tensors of strided layout."""
    if any(each.is_nested and each.layout is torch.strided for each in tensors_in((args, kwargs))):
        raise problems.NESTED_GIVEN.error(name=problems.block(module, root))


def carries_policies(module: nn.Module) -> bool:
    """A compiled module has a backend of policylang's, which applies policies by itself."""
    return bool(getattr(compiler_of(module), marks.COMPILER, False))


def check_parts(module: nn.Module, root: str) -> None:
    """Raises ``PolicyGraphError`` where a block or a part of it does not run as operators that repeat. A block that
    policylang's compiler left to eager is followed there; any other compiled code has no operators."""
    name = problems.block(module, root)
    parts = {inner: ".".join(filter(None, (root, path))) for path, inner in module.named_modules()}
    for inner, path in parts.items():
        if is_compiled(inner):
            if inner is not module:
                raise problems.COMPILED_PART.error(name=name, part=problems.block(inner, path))
            if not carries_policies(module):
                raise problems.COMPILED.error(name=name)
            problems.warn(problems.RUNS_UNCOMPILED.diagnostic(name=name))
    for inner, path in parts.items():
        if is_first_fsdp(inner):
            raise problems.FIRST_FSDP.error(name=name, part=problems.block(inner, path))


class EagerPath(BackendPath):
    """The first call of each kind traces the block; the trace is planned, and a checkpoint follows the plan operator by
    operator."""

    name: ClassVar[str] = "eager"
    front: ClassVar[str] = "policylang.backends.torch_compile.backend:of_checkpoints"

    def refuse(self, found: Sequence[Diagnostic], deferred: Collection[str]) -> None:
        """All or nothing: what other blocks may answer is raised with what none can."""
        if any(is_error(each) and each.code not in deferred for each in found):
            raise_errors(found)


_PATH = EagerPath()


@define(eq=False)
class CachedPlan:
    """The plan of a block for one kind of call."""

    instructions: PlannedInstructions
    volatile: Volatile
    audit: Audit | None = None
    saved: tuple[int, int] = (0, 0)
    """The least and the most bytes that a call has held, where sizes come from data."""


@frozen(eq=False)
class RunningBlock:
    """A call of a block that has not returned: one that is observed, or one that follows a plan."""

    region: CheckpointRegion
    key: Hashable
    module: nn.Module
    run: Observation | FollowedCall
    kept: CachedPlan | None = None

    def so_far(self) -> FollowedCall:
        """The results so far, for a part of the block that is recomputed from within."""
        return self.run if isinstance(self.run, FollowedCall) else unfinished_call(self.run)

    def failed(self, error: BaseException) -> None:
        """It will never return. Ranks that run the block for the first time, too, are about to wait for this one."""
        if isinstance(self.run, Observation):
            tell_stopped(self.region.topic(self.module), error)


Traces = dict[Hashable, BlockTrace]
"""Traces of the blocks of one model: equal blocks share one."""


@define(eq=False)
class CheckpointRegion:
    """A block. ``names`` are those of all blocks of its model where they are known, and ``number`` is its own."""

    policy: Policy
    root: str
    strict: bool
    names: tuple[str, ...] = ()
    number: int | None = None
    traces: Traces = field(factory=dict)
    offloading: Offloading = field(factory=Offloading)
    """Shared by the blocks of a model."""
    kept: dict[Hashable, CachedPlan] = field(factory=dict)
    nothing: dict[Hashable, tuple[Diagnostic, ...]] = field(factory=dict)
    """By call key, the errors that say "matches nothing": another block may have what a rule names."""
    agreed: AgreedAccounts = field(factory=list)
    """The agreements of the ranks that share the block."""
    seen: Traces = field(factory=dict)
    """This block's part of :attr:`traces`, without its name."""
    around: tuple[Diagnostic, ...] = ()
    """The warning of another checkpoint around it."""
    idle: bool = False
    """A call had nothing for its backward to read."""

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RunningBlock:
        """A call of the block: the first of its kind is observed, the others follow what was planned then."""
        check_given(module, self.root, args, kwargs)
        modules = list(module.modules())
        key = call_key(modules, args, kwargs)
        kept = self.kept.get(key)
        if kept is None:
            check_parts(module, self.root)
            return RunningBlock(self, key, module, Observation.of(self._named(module), module, args, kwargs))
        found = surroundings(modules, (args, kwargs), kept.volatile)
        return RunningBlock(self, key, module, self._call(key, module, kept, found), kept)

    def end(self, running: RunningBlock, returned: Iterable[Tensor]) -> FollowedCall | None:
        """After the forward: what its backward is to follow; None where nothing is read by any. Raises
        ``PolicyMatchError`` where policy and block do not fit, and ``PolicyAuditError`` where the first call of its
        kind holds other values than planned. Other memory for the same values is in the report."""
        call = running.run
        if isinstance(call, Observation):
            return self._plan(running, call, list(returned))
        if running.kept is not None and call.drifted_at is None:
            instructions = running.kept.instructions
            plain = take_apart(list(returned))[0]
            self.offloading.returned(plain, instructions.returned)
            if instructions.plan.facts.data_sizes:
                handed = self._handed(instructions, plain)
                held = [part for each in call.entries.values() for part in _on_device(each.value)]
                now = eager.held_bytes([*held, *(part for parts in handed.values() for part in parts)])
                least, most = running.kept.saved
                running.kept.saved = min(least, now), max(most, now)
        if call.left_out and self.kept.get(running.key) is running.kept:
            del self.kept[running.key]  # observed again: from now on the block does without what it makes once
        return call

    def _plan(self, running: RunningBlock, observation: Observation, returned: list[Tensor]) -> FollowedCall | None:
        key, module = running.key, running.module
        if not observation.free and (
            observation.own_checkpoint or any(map(eager.made_by_reentrant_checkpoint, returned))
        ):
            raise problems.OWN_CHECKPOINT.error(name=self._named(module))
        if not observation.read_by_backward:
            if observation.hooked and not self.idle and any(each.requires_grad for each in returned):
                problems.warn(problems.HOOKED.diagnostic(name=self._named(module)))
            self.idle = True
            moves = self.policy.offloads or self.policy.narrowing  # then the next checkpoint moves the block's output
            if not moves:
                return None
        # all its ranks have run the block's collectives by now; the recomputed ones are compared before they run
        with comparing(self.topic(module), known=self.agreed, around=observation.gathered_over):
            observation.finish()
            same = fingerprint(observation, returned)
            if same not in self.traces:
                self.traces[same] = trace_of(observation, returned)
            self.seen[same] = self.traces[same]
            trace = self.traces[same].under(self.root)
            plan, self.nothing[key] = self._planned(trace, module)
            number = plan.block_of[0] if len(plan.block_of) else -1
            if plan.block_names and number >= 0 and len(set(plan.block_of)) == 1:  # one block, whichever it is
                names = (plan.block_names[number],)
                plan = evolve(plan, block_of=array("i", bytes(4 * len(plan.facts))), block_names=names)
            instructions = instructions_of(trace, plan)
            again = frozenset(plan.schedule.rows_of(StepKind.SECOND_RUN))
            agree_on_collectives(plan, [GraphRun("forward", trace.facts), GraphRun("backward", trace.facts, again)])
            before, volatile = observation.before, observation.before.volatile()
            kept = self.kept[key] = CachedPlan(instructions, volatile)
            self._spend(plan, instructions.needs.offloaded)
            call = observed_call(self._call(key, module, kept, before.surroundings(volatile)), observation)
            for positions in instructions.leaving.values():
                call.leave(positions)
            self._audit(kept, call, before, returned)
        announce(AppliedPlan(_PATH.name, instructions.plan, kept.audit))
        return call

    def _handed(self, instructions: PlannedInstructions, plain: Sequence[Tensor]) -> dict[int, list[Tensor]]:
        """By node, what the next checkpoint is to hold on the device because a rule says so."""
        return {row: self.offloading.held_of(plain[part]) for part, row in instructions.handed.items()}

    def _spend(self, plan: Plan, offloaded: Sequence[int]) -> None:
        spent = self.offloading.spent[self.number or 0] = Counter[int]()
        for row in offloaded:
            if (decision := plan.decisions[row]) is not None and decision.rule is not None:
                spent[decision.rule] += plan.facts.bytes[row]

    def topic(self, module: nn.Module) -> str:
        """The topic of its comparison among ranks."""
        return f"checkpoint of {self._named(module)}"

    def unmatched_in(self, trace: BlockTrace, module: nn.Module) -> tuple[Diagnostic, ...]:
        """The "matches nothing" errors, assuming that the block does what an equal block did."""
        return self._planned(trace.under(self.root), module)[1]

    def _planned(self, trace: BlockTrace, module: nn.Module) -> tuple[Plan, tuple[Diagnostic, ...]]:
        """The plan for the block, and the errors that say "matches nothing"."""
        deferred = (MATCHES_NOTHING,) if len(self.names) > 1 else ()
        block = NamedBlock(module, self.root, max(0, self.number or 0))
        aside = weights_of_blocks([block], self.names or (self.root or type(module).__name__,))
        plan = _PATH.plan(trace.facts, self.policy, place=self._place(trace, module), aside=aside, deferred=deferred)
        plan = evolve(plan, diagnostics=(*plan.diagnostics, *self.around))
        return plan, tuple(found for found in plan.diagnostics if is_error(found))

    def _call(self, key: Hashable, module: nn.Module, kept: CachedPlan, found: Surroundings) -> FollowedCall:
        def drifted(problem: Diagnostic) -> None:
            self.kept.pop(key, None)
            if self.strict:
                raise PolicyGraphError([problem])
            problems.warn(problem)

        return FollowedCall(self._named(module), kept.instructions, drifted, found, offloading=self.offloading)

    def _audit(self, kept: CachedPlan, call: FollowedCall, before: Before, returned: Sequence[Tensor]) -> None:
        instructions = kept.instructions
        planned = [at for at in call.entries if instructions.is_planned(at)]
        held = {
            instructions.rows[at]: list(_on_device(call.entries[at].value, instructions.read.get(at))) for at in planned
        }
        plain = take_apart(list(returned))[0]
        self.offloading.returned(plain, instructions.returned)
        held |= self._handed(instructions, plain)
        outside = take_apart(before.alive())[0]
        kept.audit = audit_eager(instructions.plan, instructions.needs, held, outside)
        kept.saved = kept.audit.saved_bytes, kept.audit.saved_bytes
        raise_differences([found for found in kept.audit.differences if is_error(found)])

    def _place(self, trace: BlockTrace, module: nn.Module) -> BlockContext:
        number, names, facts = self.number or 0, self.names, trace.facts
        crosses, before = self.number is not None and number < len(names) - 1, Counter[int]()
        for other, spent in self.offloading.spent.items():
            before.update(spent if other < number else {})
        place = BlockContext(
            trace.reach_row, unchanged=trace.unchanged, inner=trace.inner, crosses=crosses, spent=before
        )
        if self.number is None:
            names = (self.root or type(module).__name__,)
            glob = None if self.policy.blocks is None else PathGlob(self.policy.blocks.glob)
            is_block = glob is None or (bool(self.root) and glob.outermost(self.root) == self.root)
            if glob is not None and not is_block and blocks_of(facts, glob).names:
                return place
        blocks = BlockTable(array("i", [number]) * len(facts), names, alone=number)
        return evolve(place, blocks=blocks, numbered=self.number is not None)

    def _named(self, module: nn.Module) -> str:
        return problems.block(module, self.root)


def is_alike(module: nn.Module, other: nn.Module) -> bool:
    """Two blocks have the same modules and parameters, and are taken to do the same."""
    one, two = (
        (
            [(path, type(each)) for path, each in made.named_modules()],
            [(path, _parameter(each)) for path, each in made.named_parameters()],
        )
        for made in (module, other)
    )
    return one == two


def _on_device(value: Any, read: Collection[int] | None = None) -> Iterator[Tensor]:
    """The results of an operator that stay on the device, as plain tensors: those in ``read``, since those that nobody
    reads have placeholders. A narrowed one is its narrow value, and the scales."""
    number = 0
    for leaf in leaves_in(value, (Tensor, MovedTensor)):
        for part in leaf.parts if isinstance(leaf, MovedTensor) else take_apart([leaf])[0]:
            if read is None or number in read:
                yield from (
                    part.tensors if isinstance(part, NarrowedPart) else [part] if isinstance(part, Tensor) else ()
                )
            number += 1


def call_key(modules: Sequence[nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Shapes, strides, dtypes, devices and gradients of inputs, plain values, the modes of the modules, which
    parameters are trained, which modules are compiled, autocast, and whether derivatives are taken forwards."""
    devices: dict[str, None] = {"cpu": None}
    inputs = (_kind(args, devices), _kind(kwargs, devices))
    modes = tuple([each.training for each in modules])
    parameters = tuple([_parameter(value) for each in modules for value in each._parameters.values()])
    autocast = tuple([_autocast(device) for device in devices])
    return inputs, modes, parameters, compiled_in_place(modules), autocast, eager.forward_derivatives()


def _parameter(value: Tensor | None) -> Hashable:
    if value is None:
        return None
    if is_lazy(value):  # its shape is known once it has been used
        return (type(value),)
    return value.requires_grad, value.dtype, value.shape


def _kind(value: Any, devices: dict[str, None]) -> Hashable:
    if isinstance(value, Tensor):
        devices[value.device.type] = None
        layout = value.stride() if value.layout is torch.strided else value.layout
        return type(value), value.shape, layout, value.dtype, value.device, value.requires_grad
    if isinstance(value, tuple | list):
        return type(value), tuple([_kind(part, devices) for part in value])
    if isinstance(value, Mapping):
        return type(value), tuple([(key, _kind(part, devices)) for key, part in value.items()])
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return type(value), value
    return (type(value),)


def _autocast(device: str) -> Hashable:
    if not torch.amp.is_autocast_available(device):  # there is none of tensors without data
        return device
    enabled = torch.is_autocast_enabled(device)
    return device, enabled, torch.get_autocast_dtype(device) if enabled else None
