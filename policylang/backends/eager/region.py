"""One block of a model under a policy: its recordings by the way it is called, and what became of them."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Hashable, Mapping
from typing import Any

from attrs import define, evolve, field
from torch import Tensor, nn

from policylang._torch_eager import is_compiled
from policylang.audit import Audit
from policylang.audit_eager import audit_eager
from policylang.backends.eager import problems
from policylang.backends.eager.compilers import carries_policies
from policylang.backends.eager.recording import Forward, record
from policylang.backends.eager.replay import Call
from policylang.backends.eager.schedule import Schedule, schedule_of
from policylang.backends.eager.signature import signature_of
from policylang.errors import PolicyAuditError, PolicyGraphError, PolicyMatchError, PolicyWarning
from policylang.graph.blocks import Blocks, blocks_of
from policylang.graph.facts import Facts
from policylang.language.codes import is_error
from policylang.language.diagnostics import Diagnostic
from policylang.language.globs import PathGlob
from policylang.language.syntax import Policy
from policylang.planning.paths import EAGER
from policylang.planning.place import Place
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from policylang.planning.refusals import MATCHES_NOTHING
from policylang.tracing.model_state import read_state


@define(eq=False)
class Kept:
    """What is remembered of a block called in one way."""

    schedule: Schedule
    audit: Audit | None = None


@define(eq=False)
class Region:
    """A block. ``names`` are those of all blocks of its model where they are known, and ``number`` is its own."""

    policy: Policy
    root: str
    strict: bool
    names: tuple[str, ...] = ()
    number: int | None = None
    kept: dict[Hashable, Kept] = field(factory=dict)
    nothing: dict[Hashable, tuple[Diagnostic, ...]] = field(factory=dict)
    """By the way it is called, the errors that say "matches nothing": another block may have what a rule names."""

    def begin(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """What one call of the block is to follow. The block is recorded and planned where that has not been done.

        Raises ``PolicyMatchError`` where policy and block do not fit, ``PolicyGraphError`` where it cannot be recorded.
        """
        key = signature_of(module, args, kwargs)
        kept = self.kept.get(key)
        if kept is None:
            kept = self.kept[key] = Kept(self._planned(module, forward, args, kwargs, key))
        return Call(self._named(module), kept.schedule, lambda found: self._drifted(key, found))

    def end(self, call: Call, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """After the forward. Raises ``PolicyAuditError`` where the first call of its kind holds other values than
        planned. Other memory for the same values, which is a kernel's choice, is said in the report."""
        kept = next((each for each in self.kept.values() if each.schedule is call.schedule), None)
        if kept is None or kept.audit is not None or call.drifted_at is not None:
            return
        rows = call.schedule.rows
        held = {rows[at]: _tensors(entry) for at, entry in call.entries.items()}
        outside = [*read_state(module).tensors, *_tensors((*args, *kwargs.values()))]
        kept.audit = audit_eager(call.schedule.plan, call.schedule.needs, held, outside)
        wrong = [found for found in kept.audit.differences if is_error(found)]
        if wrong:
            raise PolicyAuditError(wrong)

    def _planned(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Hashable
    ) -> Schedule:
        self._refuse_compiled(module)
        recording = record(module, forward, self.root, args, kwargs)
        plan = make_plan(self.policy, recording.facts, EAGER, self._place(recording.facts, recording.reach, module))
        errors = [found for found in plan.diagnostics if is_error(found)]
        nothing = tuple(found for found in errors if found.code == MATCHES_NOTHING)
        if errors and (len(self.names) < 2 or len(nothing) < len(errors)):
            raise PolicyMatchError(errors)
        self.nothing[key] = nothing
        return schedule_of(recording, _of_one_block(plan, self._named(module)))

    def _refuse_compiled(self, module: nn.Module) -> None:
        """A block that our compiler left to eager is followed there; any other compiled code has no operators."""
        name = self._named(module)
        for path, inner in module.named_modules():
            if not is_compiled(inner):
                continue
            if inner is not module:
                raise problems.compiled_part(name, problems.block(inner, ".".join(filter(None, (self.root, path)))))
            if not carries_policies(module):
                raise problems.compiled(name)
            _warn(problems.runs_uncompiled(name))

    def _place(self, facts: Facts, reach: int, module: nn.Module) -> Place:
        if self.number is not None:
            return Place(reach, Blocks(array("i", [self.number]) * len(facts), self.names, alone=self.number))
        glob = self.policy.blocks
        if glob is not None and not _is_block(glob.glob, self.root):
            matcher = PathGlob(glob.glob)
            if blocks_of(facts, matcher).names:
                return Place(reach)
        name = self.root or type(module).__name__
        return Place(reach, Blocks(array("i", bytes(4 * len(facts))), (name,), alone=0), numbered=False)

    def _named(self, module: nn.Module) -> str:
        return problems.block(module, self.root)

    def _drifted(self, key: Hashable, found: Diagnostic) -> None:
        self.kept.pop(key, None)
        if self.strict:
            raise PolicyGraphError([found])
        _warn(found)


def _warn(found: Diagnostic) -> None:
    warnings.warn(f"{found.message} ({found.code}); {found.help}", PolicyWarning, stacklevel=3)


def _is_block(glob: str, root: str) -> bool:
    return bool(root) and PathGlob(glob).outermost(root) == root


def _of_one_block(plan: Plan, name: str) -> Plan:
    """The plan of a block that is the whole graph counts it as one block, whichever it is."""
    if not plan.block_names or len(set(plan.block_of)) > 1:
        return plan
    number = plan.block_of[0] if len(plan.block_of) else 0
    if number < 0:
        return plan
    return evolve(plan, block_of=array("i", bytes(4 * len(plan.facts))), block_names=(plan.block_names[number],))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return [leaf for part in value for leaf in _tensors(part)] if isinstance(value, tuple | list) else []
