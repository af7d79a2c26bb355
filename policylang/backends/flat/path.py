"""The flat path: rematerialises and audits a graph of forward, loss and backward in one."""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from policylang.audit.data import Audit
from policylang.audit.flat import audit_flat
from policylang.backends.flat.remat import rematerialise
from policylang.backends.path import BackendPath
from policylang.backends.runtime.stages import timed
from policylang.errors import PolicyGraphError
from policylang.graph import marks
from policylang.graph.facts import Facts
from policylang.language.codes import diagnose
from policylang.language.syntax import Policy
from policylang.planning.plan import Plan

APPLIED_BEFORE = "APL382"


class FlatPath(BackendPath):
    name: ClassVar[str] = "flat"

    def check(self, gm: fx.GraphModule, policy: Policy, facts: Facts) -> None:
        """What was erased and copied under one policy cannot be decided again by another."""
        done = next((words for node in gm.graph.nodes if (words := _done(node)) is not None), None)
        if done is not None:
            message = f"a policy was carried out on this graph before: {done}"
            help = "trace the step again, and apply one policy; `include` puts two policies into one"
            raise PolicyGraphError([diagnose(APPLIED_BEFORE, message, help=help)])

    def carry_out(self, gm: fx.GraphModule, plan: Plan, seconds: dict[str, float]) -> None:
        super().carry_out(gm, plan, seconds)
        with timed(seconds, "rematerialise"):
            rematerialise(gm, plan)

    def audit(self, plan: Plan, graph: fx.Graph) -> Audit:
        return audit_flat(plan, graph)


def _done(node: fx.Node) -> str | None:
    found = marks.custom(node.meta)
    if marks.RECOMPUTED in found:
        return f"`{node.name}` recomputes `{found[marks.RECOMPUTED]}`"
    return f"`{node.name}` moves `{found[marks.MOVED]}`" if marks.MOVED in found else None
