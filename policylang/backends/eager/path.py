"""The eager path: a checkpoint that follows its plan operator by operator as the block runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import ClassVar

from attrs import frozen
from torch import Tensor

from policylang.audit.graphs import audit_eager
from policylang.audit.outcome import Audit
from policylang.backends.eager.block_trace import BlockTrace
from policylang.backends.eager.followed_call import PlannedInstructions, instructions_of
from policylang.backends.path import BackendPath, raise_errors
from policylang.backends.runtime import timed
from policylang.graph.schedule import StepKind
from policylang.language.diagnostics import Diagnostic, is_error
from policylang.planning.liveness import SavedForBackward
from policylang.planning.plan import Plan
from policylang.ranks.comparison import agree_on_collectives
from policylang.ranks.rank_account import GraphRun
from policylang.torch_compat.tracing import take_apart


@frozen(eq=False)
class HeldTensors:
    """The tensors that a block holds once its first call has returned."""

    needs: SavedForBackward
    by_row: Mapping[int, Sequence[Tensor]]
    outside: Iterable[Tensor]
    """Tensors that were alive before the call."""


class EagerPath(BackendPath):
    """A block of a model is traced the first time it is called in some way; its trace is what is planned."""

    name: ClassVar[str] = "eager"
    front: ClassVar[str] = "policylang.backends.torch_compile.hooks:of_checkpoints"

    def refuse(self, found: Sequence[Diagnostic], deferred: Collection[str]) -> None:
        """All or nothing: what other blocks may answer is raised with what none can."""
        if any(is_error(each) and each.code not in deferred for each in found):
            raise_errors(found)

    def lower(self, trace: BlockTrace, plan: Plan, seconds: dict[str, float]) -> PlannedInstructions:
        """The plan as instructions for each operator. Nothing runs: the checkpoint follows them, call by call."""
        with timed(seconds, "schedule"):
            instructions = instructions_of(trace, plan)
        again = frozenset(plan.schedule.rows_of(StepKind.SECOND_RUN))
        agree_on_collectives(plan, [GraphRun("forward", trace.facts), GraphRun("backward", trace.facts, again)])
        return instructions

    def audit(self, plan: Plan, held: HeldTensors) -> Audit:
        plain = {row: take_apart(tensors)[0] for row, tensors in held.by_row.items()}
        return audit_eager(plan, held.needs, plain, take_apart(list(held.outside))[0])
