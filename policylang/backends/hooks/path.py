"""The hook path: tags a joint graph behind a hook of Inductor's, for PyTorch's min-cut partitioner.

Min-cut knows no lines but tags, and decides after the policy, so nothing can be audited here; ranks are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

from torch import fx

from policylang.backends import refusals
from policylang.backends.path import BackendPath
from policylang.backends.runtime.stages import timed
from policylang.backends.surgery import tags
from policylang.language.diagnostics import Diagnostic, diagnose
from policylang.language.syntax import Action
from policylang.planning.plan import Plan

NOT_BY_MIN_CUT = "APL330"


class HookPath(BackendPath):
    name: ClassVar[str] = "hook"
    compares_ranks: ClassVar[bool] = False

    def refusals(self, plan: Plan) -> Sequence[Diagnostic]:
        return (*refusals.unsaveable(plan), *_beyond_min_cut(plan))

    def carry_out(self, gm: fx.GraphModule, plan: Plan, seconds: dict[str, float]) -> None:
        with timed(seconds, "tag"):
            tags.write(gm.graph, plan)


def _beyond_min_cut(plan: Plan) -> Iterator[Diagnostic]:
    """The lines that min-cut would pass over in silence."""
    for rule in plan.policy.rules:
        if rule.action is Action.PREFER_SAVE:
            message = f"`{rule.text}` would do nothing behind a hook of Inductor's: min-cut knows no `prefer_save`"
            help = "write `save`, or compile with `policylang.backend`, which partitions itself"
            yield diagnose(NOT_BY_MIN_CUT, message, rule.span, help=help)
    for expectation, planned in zip(plan.policy.expectations, plan.expectations, strict=True):
        if planned.status == "deferred":
            message = f"`{planned.text}` cannot be checked behind a hook of Inductor's: min-cut decides after it"
            help = "write `undecided -> save` or `undecided -> recompute`, or compile with `policylang.backend`"
            yield diagnose(NOT_BY_MIN_CUT, message, expectation.span, help=help)
