"""The hook path: tags a joint graph behind a hook of Inductor's, for PyTorch's min-cut partitioner.

Min-cut knows no lines but tags, and decides after the policy, so nothing can be audited here; ranks are not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import fx

from policylang.backends import refusals
from policylang.backends.path import BackendPath
from policylang.backends.runtime.stages import timed
from policylang.backends.surgery import tags
from policylang.language.codes import diagnose
from policylang.language.diagnostics import Diagnostic
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


def _beyond_min_cut(plan: Plan) -> list[Diagnostic]:
    """The lines that min-cut would pass over in silence."""
    policy = plan.policy
    found = [
        diagnose(
            NOT_BY_MIN_CUT,
            f"`{rule.text}` would do nothing behind a hook of Inductor's: min-cut knows no `prefer_save`",
            rule.span,
            help="write `save`, or compile with `policylang.backend`, which partitions itself",
        )
        for rule in policy.rules
        if rule.action is Action.PREFER_SAVE
    ]
    for expectation, planned in zip(policy.expectations, plan.expectations, strict=True):
        if planned.status == "deferred":
            found.append(
                diagnose(
                    NOT_BY_MIN_CUT,
                    f"`{planned.text}` cannot be checked behind a hook of Inductor's: min-cut decides after it",
                    expectation.span,
                    help="write `undecided -> save` or `undecided -> recompute`, or compile with `policylang.backend`",
                )
            )
    return found
