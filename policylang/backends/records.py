"""Records of an applied plan: by graph module, as findings for reports and the cache sidecar, and in PyTorch's
structured trace."""

from __future__ import annotations

import logging
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from attrs import evolve, field, frozen
from torch import fx

from policylang.audit.outcome import Audit
from policylang.audit.report import (
    NO_GRADIENTS,
    AuditReport,
    Report,
    order_figures,
)
from policylang.audit.summary import partition_report, plan_report
from policylang.errors import PolicyGraphError
from policylang.graph.facts import Facts
from policylang.graph.snapshot import dump
from policylang.language.plain_data import from_plain
from policylang.language.shown import as_page, counted, format_quantity
from policylang.language.syntax import Bucket, Policy
from policylang.planning import model_wide_errors
from policylang.planning.graph_edit import Edits
from policylang.planning.model_wide_errors import Complaint
from policylang.planning.plan import Plan
from policylang.torch_compat.compilers import is_tracing, trace_artifact


@frozen(eq=False)
class AppliedPlan:
    """A plan that was applied to a graph."""

    path: str
    """The name of the path."""
    plan: Plan
    audit: Audit | None = None
    """None where the graph is only prepared, so that what it saves cannot be read off it yet."""
    seconds: Mapping[str, float] = field(factory=dict)
    """By stage, in the order they ran."""
    halves: Mapping[str, Edits] = field(factory=dict)
    """The edits made in the ``forward`` and in the ``backward`` of a partition."""
    orders: Mapping[str, Plan] = field(factory=dict)
    """The plans of the forward and the backward graph, where scheduling lines were applied to them."""
    without_backward: bool = False
    """True if it is a graph that no gradient is computed through."""


_applied: WeakKeyDictionary[fx.GraphModule, AppliedPlan] = WeakKeyDictionary()
_audited: WeakKeyDictionary[fx.GraphModule, AppliedPlan] = WeakKeyDictionary()
_checkpoints: WeakKeyDictionary[fx.GraphModule, Sequence[Policy]] = WeakKeyDictionary()


def remember(done: AppliedPlan, *modules: fx.GraphModule) -> None:
    """Keep what was done, to be asked for by the graph, or by the forward or backward graph of its partition."""
    kept = _applied if done.audit is None else _audited
    for module in modules:
        kept[module] = done


def applied_plan(gm: fx.GraphModule) -> AppliedPlan | None:
    """The plan that was last applied to a graph: audited, or else prepared."""
    return last_audited(gm) or _applied.get(gm)


def last_audited(gm: fx.GraphModule) -> AppliedPlan | None:
    """The audited plan of a graph, or of the joint graph that it was split from."""
    return _audited.get(gm)


def plan_of(gm: fx.GraphModule) -> Plan | None:
    """The plan that a graph was last prepared for."""
    found = _applied.get(gm)
    return None if found is None else found.plan


def remember_checkpoints(gm: fx.GraphModule, policies: Sequence[Policy]) -> None:
    """Keep what our checkpoints follow in the model that a graph was traced from."""
    _checkpoints[gm] = tuple(policies)


def checkpoints_of(gm: fx.GraphModule) -> Sequence[Policy]:
    """The policies that our checkpoints follow in the model that a graph was traced from."""
    return _checkpoints.get(gm, ())


@frozen
class Findings:
    complaints: tuple[Complaint, ...]
    """Errors of this graph that another graph of the model may answer."""
    report: Report
    facts: Facts | None = field(default=None, repr=False)
    """The facts of the graph as it was given, for snapshots; None for what an earlier process planned, since the
    sidecar does not hold them."""
    rewritten: Facts | None = field(default=None, repr=False)
    """The facts of the graph that the report is about, with all that ``fuse`` and ``collapse`` made."""


def without_gradients(policy: Policy) -> Policy:
    """The lines that hold on a graph without gradients: those that rewrite collectives in their place. None of them has
    to find something there."""
    rewrites = tuple(evolve(each, optional=True) for each in policy.rewrites if not isinstance(each, Bucket))
    return evolve(policy, rules=(), undecided=None, expectations=(), rewrites=rewrites, scheduling=())


def findings_of(done: AppliedPlan) -> Findings:
    """The findings that are kept of an applied plan."""
    plan, audit = done.plan, done.audit
    report = plan_report(plan) if audit is None else partition_report(plan, audit, done.halves, done.orders)
    if done.without_backward:
        report = evolve(report, half=NO_GRADIENTS, audit=AuditReport(True))  # edits that come out otherwise are errors
    # a copy: what planning has worked out on the facts meanwhile is not kept with them
    given = evolve(plan.before)
    complaints = model_wide_errors.complaints(plan.policy, plan.diagnostics)
    return Findings(complaints, report, given, given if plan.facts is plan.before else evolve(plan.facts))


def findings_to_json(findings: Findings) -> dict[str, Any]:
    return {"complaints": model_wide_errors.to_json(findings.complaints), "report": findings.report.to_dict()}


def findings_from_json(data: Mapping[str, Any], policy: Policy) -> Findings:
    """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for data that :func:`findings_to_json` does not write. The
    spans of the rules and their spelling are taken from ``policy``, whose layout may have changed."""
    report = from_plain(Report, data["report"])
    if report.half:
        policy = without_gradients(policy)
    pairs = list(zip(report.rules, policy.rules, strict=True))
    moved = {account.source: rule.source for account, rule in pairs}
    decisions = {
        name: evolve(decision, rule=moved.get(decision.rule, decision.rule) if decision.rule else None)
        for name, decision in report.decisions.items()
    }
    first = [account for account in report.rewrites if not account.half]  # one a line, in their order
    now = {account.source: line.span.location for account, line in zip(first, policy.rewrites, strict=True)}
    orders = []
    for order in report.orders:
        lines = zip(order.lines, (*policy.buckets, *policy.scheduling), strict=True)
        orders.append(evolve(order, lines=tuple(evolve(each, source=line.span.location) for each, line in lines)))
    report = evolve(
        report,
        rewrites=tuple(evolve(each, source=now.get(each.source, each.source)) for each in report.rewrites),
        orders=tuple(orders),
        rules=tuple(evolve(account, source=rule.source, text=rule.text) for account, rule in pairs),
        decisions=decisions,
        from_cache=True,
    )
    return Findings(model_wide_errors.from_json(data["complaints"]), report)


log = logging.getLogger("policylang")


def announce(done: AppliedPlan) -> None:
    """Log what was done to a graph: INFO has one line a graph, DEBUG the report and how long each stage took; with
    ``TORCH_TRACE`` set, artifacts go into torch's trace. A joint graph is announced when it is split, not when it is
    only prepared. Nothing is worked out where nobody listens."""
    prepared = done.path == "joint" and done.audit is None
    level = logging.DEBUG if prepared else logging.INFO
    traces = is_tracing() and not prepared
    if not traces and not log.isEnabledFor(level):
        return
    report = findings_of(done).report
    nodes, names = counted(len(done.plan.facts), "node"), done.plan.block_names
    is_block = done.path == "eager" and names
    _log(report, level, f"{names[0]} of {nodes}" if is_block else f"a {done.plan.facts.kind.value} graph of {nodes}")
    if log.isEnabledFor(logging.DEBUG):
        took = ", ".join(f"{stage} {seconds:.3f} s" for stage, seconds in done.seconds.items())
        log.debug("%s%s", report, f"\nseconds     {took}" if took else "")
    if traces:
        trace_artifact("policylang_report", "json", report.to_json)
        trace_artifact("policylang_report_text", "string", lambda: str(report))
        trace_artifact("policylang_plan_page", "string", lambda: as_page(done.plan))
        trace_artifact("policylang_snapshot", "string", lambda: _snapshot(done))


def announce_cached(report: Report) -> None:
    """Log a graph that a compile cache had: its plan was made by an earlier process."""
    _log(report, logging.INFO, "a graph from the compile cache")
    log.debug("%s", report)
    if is_tracing():
        trace_artifact("policylang_report", "json", report.to_json)
        trace_artifact("policylang_report_text", "string", lambda: str(report))


def _log(report: Report, level: int, graph: str) -> None:
    if not log.isEnabledFor(level):
        return
    found = [counted(report.operators, "operator") if report.half else counted(report.forward_nodes, "forward value")]
    amounts = ((report.saved, "saved"), (report.recomputed, "recomputed"), (report.offloaded, "offloaded"))
    found += [
        f"{format_quantity(each.bytes, 'bytes')} in {counted(len(each), 'value')} {word}"
        for each, word in amounts
        if each
    ]
    if report.recomputed:
        seconds = report.recomputed.seconds
        time = f" in {format_quantity(seconds, 'seconds')} on {report.device}" if seconds else ""
        found.append(f"{format_quantity(report.recomputed.flops, 'flops')} again{time}")
    gone = sum(rewrite.gone for rewrite in report.rewrites)
    found += [f"{counted(gone, 'collective')} fewer"] if gone else []
    figures = order_figures(report.orders)
    found += [counted(int(buckets), "bucket")] if (buckets := figures.get("buckets")) else []
    if "exposed_seconds" in figures and "exposed_seconds_as_traced" in figures:
        before, after = (format_quantity(figures[f"exposed_seconds{end}"], "seconds") for end in ("_as_traced", ""))
        found.append(f"exposed {before} -> {after}")
    found += [counted(len(report.warnings), "warning")] if report.warnings else []
    if report.audit is not None:
        found.append("audit agrees" if report.audit.agrees else "audit differs")
    log.log(level, "%s on %s: %s", report.policy, graph, ", ".join(found))


def _snapshot(done: AppliedPlan) -> str:
    """As base64; in place of one that is too large for a file, why."""
    try:
        return b64encode(dump(done.plan.before)).decode("ascii")
    except PolicyGraphError as error:
        return str(error)
