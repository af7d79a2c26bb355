"""The findings on one graph: its report, and the errors that other graphs may answer, as data for the cache sidecar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, field, frozen

from policylang.audit.report import NO_GRADIENTS, AuditReport, OrderAccount, Report, RewriteReport
from policylang.audit.summary import partition_report, plan_report
from policylang.backends.graph_registry import CarriedOut
from policylang.graph.facts import Facts
from policylang.language.plain_data import from_plain
from policylang.language.syntax import Bucket, Policy
from policylang.planning import model_wide_errors
from policylang.planning.model_wide_errors import Complaint


@frozen
class Findings:
    complaints: tuple[Complaint, ...]
    """What this graph lacks and another graph of the model may have."""
    report: Report
    facts: Facts | None = field(default=None, repr=False)
    """Of the graph as it was given, for snapshots. They are few bytes beside the graph. The sidecar does not hold
    them: None for what an earlier process planned."""
    rewritten: Facts | None = field(default=None, repr=False)
    """The same of the graph that the report is about, with all that ``fuse`` and ``collapse`` made."""


def without_gradients(policy: Policy) -> Policy:
    """The lines that hold on a graph without gradients: those that rewrite collectives in their place. None of them has
    to find something there."""
    rewrites = tuple(evolve(each, optional=True) for each in policy.rewrites if not isinstance(each, Bucket))
    return evolve(policy, rules=(), undecided=None, expectations=(), rewrites=rewrites, scheduling=())


def findings_of(done: CarriedOut) -> Findings:
    """What is kept of a plan that was carried out."""
    plan, audit = done.plan, done.audit
    report = plan_report(plan) if audit is None else partition_report(plan, audit, done.halves, done.orders)
    if done.without_backward:
        report = evolve(report, half=NO_GRADIENTS, audit=AuditReport(True))  # edits that come out otherwise are errors
    # a copy: what planning has worked out on the facts meanwhile is not kept with them
    given = evolve(plan.before)
    complaints = model_wide_errors.complaints(plan.policy, plan.diagnostics)
    return Findings(complaints, report, given, given if plan.facts is plan.before else evolve(plan.facts))


def to_json(findings: Findings) -> dict[str, Any]:
    return {"complaints": model_wide_errors.to_json(findings.complaints), "report": findings.report.to_dict()}


def from_json(data: Mapping[str, Any], policy: Policy) -> Findings:
    """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for data that is not what :func:`to_json` writes.

    The policy may have been laid out differently when the sidecar was written: where its rules stand and how they are
    spelled is taken from ``policy``.
    """
    report = from_plain(Report, data["report"])
    if report.half:
        policy = without_gradients(policy)
    rules = tuple(
        evolve(account, source=rule.source, text=rule.text)
        for account, rule in zip(report.rules, policy.rules, strict=True)
    )
    moved = {account.source: rule.source for account, rule in zip(report.rules, policy.rules, strict=True)}
    decisions = {
        name: evolve(decision, rule=moved.get(decision.rule, decision.rule) if decision.rule else None)
        for name, decision in report.decisions.items()
    }
    report = evolve(
        report,
        rewrites=_moved(report.rewrites, policy),
        orders=tuple(_moved_order(account, policy) for account in report.orders),
        rules=rules,
        decisions=decisions,
        from_cache=True,
    )
    return Findings(model_wide_errors.from_json(data["complaints"]), report)


def _moved(accounts: Sequence[RewriteReport], policy: Policy) -> tuple[RewriteReport, ...]:
    """With the places where the lines stand now. The first accounts are one a line, in their order."""
    first = [account for account in accounts if not account.half]
    now = {account.source: statement.span.location for account, statement in zip(first, policy.rewrites, strict=True)}
    return tuple(evolve(account, source=now.get(account.source, account.source)) for account in accounts)


def _moved_order(account: OrderAccount, policy: Policy) -> OrderAccount:
    """The same of the lines that order collectives."""
    now = zip(account.lines, (*policy.buckets, *policy.scheduling), strict=True)
    return evolve(account, lines=tuple(evolve(line, source=each.span.location) for line, each in now))
