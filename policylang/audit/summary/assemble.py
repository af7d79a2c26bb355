"""Assembles the report on a graph from its plan and, where it was partitioned, the audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import fsum
from typing import TYPE_CHECKING

from attrs import evolve

from policylang.audit.summary.order_account import order_account
from policylang.audit.summary.report import (
    AuditReport,
    DecisionReport,
    ExpectationReport,
    LeftAlone,
    Report,
    RewriteReport,
    RuleReport,
    ValuesReport,
)
from policylang.graph.facts import GraphKind, storage_roots, uncounted_operators
from policylang.language.diagnostics import Diagnostic, Severity
from policylang.language.syntax import Action, Policy
from policylang.planning.expectations.data_sizes import counted_by_data
from policylang.planning.graph_edit import Edit, Edits
from policylang.planning.plan import Plan, RuleOutcome
from policylang.planning.value_decision import Decision, Why

if TYPE_CHECKING:
    from policylang.audit.outcome import Audit
    from policylang.planning.schedule.order_plan import OrderPlan

_ROUNDING = "sums are taken in another order: equal up to rounding, not bitwise"
_HALVES = (GraphKind.FORWARD, GraphKind.BACKWARD)


def plan_report(plan: Plan) -> Report:
    """Of a graph that is planned and not partitioned: decisions and rules, no bytes. Of a half: its rewrites."""
    # buckets of a joint graph are made on its halves
    report = _report(plan, None, plan.order if plan.facts.kind is not GraphKind.JOINT else None)
    if plan.facts.kind not in _HALVES:
        return report
    operators = sum(op == "call_function" and plan.facts.owners[row] == row for row, op in enumerate(plan.facts.ops))
    return evolve(
        report, half=plan.facts.kind.value, operators=operators, forward_nodes=0, blocks=0, decisions={}, undecided=0
    )


def partition_report(
    plan: Plan, audit: Audit, halves: Mapping[str, Edits] | None = None, orders: Mapping[str, Plan] | None = None
) -> Report:
    """Of a graph that was split, or rematerialised, after a plan, with what the audit found in it.

    ``halves``: what was rewritten in the ``forward`` and the ``backward`` once they were apart; ``orders``: the plans
    of those that were put in another order.
    """
    report = _report(plan, audit, plan.order if plan.facts.kind is GraphKind.FLAT else None)
    later = (rewrite_reports(plan.policy, edits, half) for half, edits in (halves or {}).items())
    ordered = (order_account(made, half) for half, made in (orders or {}).items())
    return evolve(
        report,
        rewrites=report.rewrites + tuple(each for half in later for each in half),
        orders=report.orders + tuple(each for each in ordered if each is not None),
    )


def _report(plan: Plan, audit: Audit | None, order: OrderPlan | None = None) -> Report:
    """``order``: what was carried out of it on the graph itself."""
    facts = plan.facts
    owned = [row for row in facts.forward if facts.owners[row] == row]
    amounts = _amounts_by_rule(plan, audit) if audit else {}
    again = [facts.index[name] for name in audit.recomputed] if audit else []
    seconds = None if plan.shown_times is None else plan.shown_times.seconds
    by_rule = _seconds_by_rule(plan, again) if audit else {}
    return Report(
        policy=plan.policy.name,
        forward_nodes=len(owned),
        blocks=len(plan.block_names),
        decisions=_decisions(plan),
        rules=tuple(_rule(outcome, amounts, by_rule, index) for index, outcome in enumerate(plan.rules)),
        undecided=sum((by := plan.decisions[row]) is not None and by.why is Why.UNDECIDED for row in owned),
        undecided_fate=plan.undecided,
        saved=ValuesReport(audit.saved, audit.saved_bytes) if audit else None,
        recomputed=_recomputed(audit, None if seconds is None else fsum(seconds[row] for row in again)),
        offloaded=ValuesReport(audit.offloaded, audit.offloaded_bytes) if audit else None,
        forward_flops=audit.forward_flops if audit else sum(facts.flops[row] for row in facts.forward),
        undecided_saved_bytes=audit.saved_bytes - amounts["saved_bytes"].total() if audit else None,
        rewrites=rewrite_reports(plan.policy, plan.edits if order is None else plan.edits.followed_by(order.edits)),
        orders=tuple(filter(None, (order_account(plan),))),
        expectations=tuple(ExpectationReport(e.source, e.text, e.status, e.found, e.margin) for e in plan.expectations),
        warnings=tuple(_sentence(d) for d in plan.diagnostics if d.severity is Severity.WARNING),
        notes=(
            *(_sentence(d) for d in plan.diagnostics if d.severity is Severity.NOTE),
            *_no_times(plan),
            *_by_data(plan, audit),
        ),
        audit=AuditReport(audit.agrees, tuple(map(_sentence, audit.differences))) if audit else None,
        digest=plan.digest,
        uncounted=uncounted_operators(facts, facts.forward) or {},
        uncounted_recomputed=uncounted_operators(facts, again) or {},
        device=None if plan.shown_times is None else plan.shown_times.device.name,
        forward_seconds=None if seconds is None else fsum(seconds[row] for row in facts.forward),
    )


def _no_times(plan: Plan) -> tuple[str, ...]:
    """Why a policy that names a device has none."""
    return () if plan.untold is None else (f"no times: {_sentence(plan.untold)}",)


def _by_data(plan: Plan, audit: Audit | None) -> tuple[str, ...]:
    """What of the saved bytes is counted by a hint; of an eager block the report says what its calls held."""
    if audit is None or plan.checkpoints is not None:
        return ()
    found = counted_by_data(plan.facts, [plan.facts.index[name] for name in audit.saved])
    return (f"saved counts {found}",) if found else ()


def _recomputed(audit: Audit | None, seconds: float | None) -> ValuesReport | None:
    if audit is None:
        return None
    return ValuesReport(audit.recomputed, audit.recomputed_bytes, audit.recomputed_flops, seconds)


def _decisions(plan: Plan) -> dict[str, DecisionReport]:
    """One object a distinct decision, as the plan has it: a graph may have a million nodes."""
    known: dict[Decision, DecisionReport] = {}
    found: dict[str, DecisionReport] = {}
    for row in plan.facts.forward:
        planned = plan.decisions[row]
        if planned is None:
            continue
        if planned not in known:
            rule = plan.rule_of(row)
            known[planned] = DecisionReport(word(planned.action), rule.source if rule else None, planned.reason)
        found[plan.facts.names[row]] = known[planned]
    return found


def word(action: Action | None) -> str:
    """An action as the language writes it; ``auto`` for what is left to PyTorch's partitioner."""
    return "auto" if action is None else action.word


def _amounts_by_rule(plan: Plan, audit: Audit) -> dict[str, Counter[int]]:
    """What each rule's saved and offloaded values keep alive and its recomputed ones cost, by the number of the rule.

    Memory that values of several rules look into counts for the first of them in graph order.
    """
    facts, roots = plan.facts, storage_roots(plan.facts)
    saved, recomputed, offloaded = (
        [facts.index[name] for name in names] for names in (audit.saved, audit.recomputed, audit.offloaded)
    )
    first = {roots[row]: row for row in reversed(saved)}
    return {
        "saved_bytes": _summed(
            plan, ((row, facts.bytes[root]) for root, row in first.items() if facts.ops[root] == "call_function")
        ),
        "recomputed_flops": _summed(plan, ((row, facts.flops[row]) for row in recomputed)),
        "offloaded_bytes": _summed(plan, ((row, facts.bytes[row]) for row in offloaded)),
    }


def _summed(plan: Plan, costs: Iterable[tuple[int, int]]) -> Counter[int]:
    amounts = Counter[int]()
    for row, amount in costs:
        planned = plan.decisions[row]
        if planned is not None and planned.rule is not None:
            amounts[planned.rule] += amount
    return amounts


def _seconds_by_rule(plan: Plan, recomputed: Iterable[int]) -> dict[int, float]:
    """What the rows that each rule recomputes take; empty without a device."""
    if plan.shown_times is None:
        return {}
    found = dict.fromkeys(range(len(plan.rules)), 0.0)
    for row in recomputed:
        planned = plan.decisions[row]
        if planned is not None and planned.rule is not None:
            found[planned.rule] += plan.shown_times.seconds[row]
    return found


def _rule(
    outcome: RuleOutcome, amounts: Mapping[str, Counter[int]], seconds: Mapping[int, float], index: int
) -> RuleReport:
    return RuleReport(
        source=outcome.rule.source,
        text=outcome.rule.text,
        matched=len(outcome.matched),
        decided=len(outcome.decided),
        overridden=sum(outcome.overridden_by.values()),
        kept_by_user=outcome.kept_by_user,
        recomputed_seconds=seconds.get(index),
        **{name: by_rule[index] for name, by_rule in amounts.items()},
    )


def _sentence(diagnostic: Diagnostic) -> str:
    where = f"{diagnostic.span.location}: " if diagnostic.span else ""
    return f"{where}{diagnostic.message} ({diagnostic.code})"


def rewrite_reports(policy: Policy, edits: Edits, half: str = "") -> tuple[RewriteReport, ...]:
    """One account a line. ``half``: of which half of a partition; there, lines that did nothing more are left out."""
    found = []
    for index, statement in enumerate(policy.rewrites):
        mine = edits.of(index)
        if half and not mine.done:
            continue
        left = () if half else mine.refused
        found.append(
            RewriteReport(
                source=statement.span.location,
                text=" ".join(statement.span.text.split()),
                half=half,
                done=len(mine.done),
                gone=sum(edit.fewer_collectives for edit in mine.done),
                ranks=max((edit.proof.ranks for edit in mine.done), default=0),
                proven=not any(edit.proof.assumed for edit in mine.done),
                notes=_notes(mine.done),
                left=tuple(LeftAlone(each.collectives, each.reason, each.detail) for each in left),
            )
        )
    return tuple(found)


def _notes(done: Sequence[Edit]) -> tuple[str, ...]:
    """Each once, in the order of their first appearance."""
    said: list[str] = []
    for edit in done:
        assumed = edit.proof.assumed and f"taken for granted: {edit.proof.assumed}"
        said += (edit.note, assumed, "" if edit.proof.exact else _ROUNDING)
    return tuple(dict.fromkeys(filter(None, said)))
