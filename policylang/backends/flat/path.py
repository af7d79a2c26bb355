"""A policy on a flat graph: plan, rematerialise, audit."""

from __future__ import annotations

from attrs import field, frozen
from torch import fx

from policylang.audit.flat import audit_flat
from policylang.audit.joint import Audit
from policylang.backends.flat.remat import Rematerialised, rematerialise
from policylang.backends.runtime.stages import timed
from policylang.backends.surgery.edits import carry_out
from policylang.errors import PolicyAuditError, PolicyGraphError, PolicyMatchError
from policylang.graph import marks
from policylang.graph.facts import Facts, GraphKind
from policylang.graph.reading.collect import collect
from policylang.language.codes import diagnose
from policylang.language.diagnostics import Severity
from policylang.language.syntax import Policy
from policylang.planning.capabilities import FLAT
from policylang.planning.plan import Plan
from policylang.planning.planner import plan as make_plan
from policylang.ranks.comparison import agree_on_plan, ranks_of

APPLIED_BEFORE = "APL382"


@frozen(eq=False)
class FlatOutcome:
    """What a policy came to on a flat graph."""

    plan: Plan
    rematerialised: Rematerialised
    audit: Audit
    seconds: dict[str, float] = field(factory=dict)
    """By stage, in the order they ran."""


def plan_flat(facts: Facts, policy: Policy) -> Plan:
    """Plan a flat graph. Raises ``PolicyMatchError`` with every error between the policy and the graph, and
    ``PolicyDivergenceError`` where other ranks have another plan."""
    made = make_plan(policy, facts, FLAT, ranks=ranks_of(facts, policy, facts.kind.value))
    errors = [found for found in made.diagnostics if found.severity is Severity.ERROR]
    if errors:
        raise PolicyMatchError(errors)
    agree_on_plan(made)
    return made


def apply_flat(gm: fx.GraphModule, policy: Policy, facts: Facts | None = None) -> FlatOutcome:
    """Carry a policy out on a flat graph, in place.

    Raises ``PolicyMatchError`` where policy and graph do not fit, ``PolicyGraphError`` where a policy has been carried
    out on the graph before (the graph is untouched then), and ``PolicyAuditError`` where what came out is not what was
    planned.
    """
    _refuse_second_time(gm.graph)
    seconds: dict[str, float] = {}
    with timed(seconds, "collect"):
        facts = collect(gm, kind=GraphKind.FLAT) if facts is None else facts
    with timed(seconds, "plan"):
        made = plan_flat(facts, policy)
    with timed(seconds, "rewrite"):
        carry_out(gm, made)
    with timed(seconds, "rematerialise"):
        outcome = rematerialise(gm, made)
    with timed(seconds, "audit"):
        audit = audit_flat(made, gm.graph)
    if not audit.agrees:
        raise PolicyAuditError(audit.differences)
    return FlatOutcome(made, outcome, audit, seconds)


def _refuse_second_time(graph: fx.Graph) -> None:
    """What was erased and copied under one policy cannot be decided again by another."""
    done = next((words for node in graph.nodes if (words := _done(node)) is not None), None)
    if done is None:
        return
    raise PolicyGraphError(
        [
            diagnose(
                APPLIED_BEFORE,
                f"a policy was carried out on this graph before: {done}",
                help="trace the step again, and apply one policy; `include` puts two policies into one",
            )
        ]
    )


def _done(node: fx.Node) -> str | None:
    found = marks.custom(node.meta)
    if marks.RECOMPUTED in found:
        return f"`{node.name}` recomputes `{found[marks.RECOMPUTED]}`"
    return f"`{node.name}` moves `{found[marks.MOVED]}`" if marks.MOVED in found else None
