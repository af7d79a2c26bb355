"""The base class of the paths: a plan is made, compared between ranks, lowered onto the graph, audited and remembered.

The order of collectives is applied last, to the graph that was audited for its values. A class for each path overrides
what it does otherwise. The classes are registered in :mod:`policylang.planning.capabilities`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from attrs import evolve
from torch import fx

from policylang.audit.order import audit_order
from policylang.audit.outcome import Audit
from policylang.backends import applied_plans, rewriting
from policylang.backends.applied_plans import AppliedPlan, Findings, announce, findings_of
from policylang.backends.refusals import not_a_graph, refuse_another
from policylang.backends.runtime import timed
from policylang.errors import PolicyAuditError, PolicyMatchError
from policylang.graph.collect import collect
from policylang.graph.facts import Facts, GraphKind
from policylang.language.diagnostics import Diagnostic, is_error
from policylang.language.syntax import Policy
from policylang.planning import capabilities
from policylang.planning.capabilities import Capabilities, PathEntry, path_entry
from policylang.planning.decisions.rule_warnings import FsdpParameters
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from policylang.planning.schedule import BlockContext
from policylang.ranks.comparison import agree_on_plan, comparing, ranks_of


class BackendPath:
    """The base of all paths. A path that overrides nothing applies the plan's edits and audits nothing."""

    name: ClassVar[str]
    front: ClassVar[str] = ""
    """``module:function``: finds the decisions for an object of this path that users hold, except graphs; returns None
    for others. Named, not imported, since it imports what imports the path."""
    compares_ranks: ClassVar[bool] = True

    @property
    def entry(self) -> PathEntry:
        return path_entry(self.name)

    @property
    def capabilities(self) -> Capabilities:
        return self.entry.capabilities

    def check(self, gm: fx.GraphModule, policy: Policy, facts: Facts) -> None:
        """Raise ``PolicyGraphError`` for a graph of the right kind that the policy cannot be applied to."""

    def plan(
        self,
        facts: Facts,
        policy: Policy,
        *,
        place: BlockContext | None = None,
        aside: FsdpParameters | None = None,
        deferred: Collection[str] = (),
    ) -> Plan:
        """Plan a graph without touching it. ``aside``: the weights that FSDP gathers around it. Raises
        ``PolicyMatchError`` with every error whose code is not deferred, and ``PolicyDivergenceError`` where other
        ranks have another plan."""
        ranks = ranks_of(facts, policy, facts.kind.value) if self.compares_ranks else None
        made = make_plan(self.part_of(policy), facts, self.capabilities, place, ranks=ranks, aside=aside)
        self.refuse((*made.diagnostics, *self.refusals(made)), deferred)
        if self.compares_ranks:
            agree_on_plan(made)
        return evolve(made, diagnostics=(*made.diagnostics, *self.notes(policy, facts.kind)))

    def part_of(self, policy: Policy) -> Policy:
        """The lines of a policy that the path applies."""
        return policy

    def notes(self, policy: Policy, kind: GraphKind) -> tuple[Diagnostic, ...]:
        """Notes on the lines of a policy that the path passes over on a graph of this kind."""
        return ()

    def refusals(self, plan: Plan) -> Sequence[Diagnostic]:
        """Errors for what the path cannot do, where planning found none."""
        return ()

    def refuse(self, found: Sequence[Diagnostic], deferred: Collection[str]) -> None:
        """Raise ``PolicyMatchError`` with the errors whose codes are not deferred, and with their causes."""
        raised = [each for each in found if each.code not in deferred]
        causes = {each.cause for each in raised if is_error(each)} - {""}
        raise_errors([each for each in found if each in raised or {each.code, each.cause} & causes])

    def lower(self, given: Any, plan: Plan, seconds: dict[str, float]) -> Any:
        """Lower a plan onto the graph it was made for, in place, and note how long each stage takes."""
        with timed(seconds, "rewrite"):
            return rewriting.apply_edits(given, plan)

    def audit(self, plan: Plan, came_out: Any) -> Audit | None:
        """Compare the graph with the plan; None if that cannot be done."""
        return None

    def put_in_order(self, gm: fx.GraphModule, plan: Plan, seconds: dict[str, float]) -> None:
        """Apply the planned order of collectives, and compare: raises ``PolicyAuditError`` where the graph differs."""
        if plan.order is None:
            return
        with timed(seconds, "order"):
            rewriting.put_in_order(gm, plan.policy, plan.order)
        with timed(seconds, "audit order"):
            raise_differences(audit_order(plan.order, gm.graph))

    def apply(self, gm: fx.GraphModule, policy: Policy, facts: Facts | None = None) -> AppliedPlan:
        """Apply a policy to a graph, in place. Raises as :meth:`check` and :meth:`plan` do, with the graph as it was,
        and ``PolicyAuditError`` if the result is not as planned."""
        seconds: dict[str, float] = {}
        with timed(seconds, "collect"):
            facts = collect(gm, kind=self.entry.kinds[0]) if facts is None else facts
        self.check(gm, policy, facts)
        with timed(seconds, "plan"):
            plan = self.plan(facts, policy)
        if plan.order is not None:
            rewriting.check_order(plan.order)
        self.lower(gm, plan, seconds)
        with timed(seconds, "audit"):
            audit = self.audit(plan, gm.graph)
        if audit is not None:
            raise_differences(audit.differences)
        self.put_in_order(gm, plan, seconds)
        done = AppliedPlan(self.name, plan, audit, seconds)
        applied_plans.remember(done, gm)
        announce(done)
        return done

    def report(self, subject: Any) -> Sequence[Findings] | None:
        """The findings on a graph, a model or what else users hold, graph by graph; None if it is not of this path."""
        if isinstance(subject, fx.GraphModule):
            done = applied_plans.applied_plan(subject)
            return (findings_of(done),) if done is not None and done.path == self.name else None
        found: Sequence[Findings] | None = _imported(self.front)(subject) if self.front else None
        return found


@cache
def path_named(name: str) -> BackendPath:
    made: BackendPath = _imported(path_entry(name).implementation)()
    return made


def apply_policy(
    gm: object, policy: Policy, mesh: Any = None, *, agree: bool = True, facts: Facts | None = None
) -> fx.GraphModule:
    """See :func:`policylang.apply`. ``facts``: if the caller knows more of the graph than its nodes have."""
    with comparing("apply", agree, mesh=mesh):
        module = checked_module(gm, "a policy is applied to a graph module")
        for followed in applied_plans.checkpoints_of(module):
            refuse_another(followed, policy, "the graph")
        known = collect(module, mesh=mesh) if facts is None else facts
        path_named(capabilities.path_taking(known.kind).name).apply(module, policy, known)
        return module


def checked_module(gm: object, wanted: str) -> fx.GraphModule:
    """A graph module; raises ``PolicyGraphError`` for anything else."""
    if not isinstance(gm, fx.GraphModule):
        raise not_a_graph(gm, wanted)
    return gm


def _imported(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    return getattr(import_module(module), name)


def findings_on(subject: Any) -> Sequence[Findings] | None:
    """The findings of the first path that knows a subject; None where none does."""
    found = (path_named(entry.name).report(subject) for entry in capabilities.PATHS)
    return next((each for each in found if each is not None), None)


def raise_errors(found: Sequence[Diagnostic]) -> None:
    errors = [each for each in found if is_error(each)]
    if errors:
        raise PolicyMatchError(errors)


def raise_differences(found: Sequence[Diagnostic]) -> None:
    if found:
        raise PolicyAuditError(tuple(found))
