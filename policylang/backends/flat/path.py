"""The flat path: rematerialises and audits a graph of forward, loss and backward in one."""

from __future__ import annotations

from typing import ClassVar

from torch import fx

from policylang.audit.flat import audit_flat
from policylang.audit.outcome import Audit
from policylang.backends.flat.remat import rematerialise
from policylang.backends.path import BackendPath
from policylang.backends.runtime.stages import timed
from policylang.errors import PolicyGraphError
from policylang.graph import marks
from policylang.graph.facts import Facts
from policylang.language.diagnostics import diagnose
from policylang.language.syntax import Policy
from policylang.planning.plan import Plan

APPLIED_BEFORE = "APL382"
_DONE = {marks.RECOMPUTED: "recomputes", marks.MOVED: "moves"}


class FlatPath(BackendPath):
    name: ClassVar[str] = "flat"

    def check(self, gm: fx.GraphModule, policy: Policy, facts: Facts) -> None:
        """What was erased and copied under one policy cannot be decided again by another."""
        for node, found in ((node, marks.custom(node.meta)) for node in gm.graph.nodes):
            for mark, verb in _DONE.items():
                if mark in found:
                    done = f"`{node.name}` {verb} `{found[mark]}`"
                    help = "trace the step again, and apply one policy; `include` puts two policies into one"
                    message = f"a policy was carried out on this graph before: {done}"
                    raise PolicyGraphError([diagnose(APPLIED_BEFORE, message, help=help)])

    def carry_out(self, gm: fx.GraphModule, plan: Plan, seconds: dict[str, float]) -> None:
        super().carry_out(gm, plan, seconds)
        with timed(seconds, "rematerialise"):
            rematerialise(gm, plan)

    def audit(self, plan: Plan, graph: fx.Graph) -> Audit:
        return audit_flat(plan, graph)
