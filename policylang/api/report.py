"""``policylang.report``: the report on a graph, a model, a backend or a partitioner."""

from __future__ import annotations

from typing import Any

from attrs import evolve
from torch import fx

from policylang.audit.report import AuditReport, FsdpOrderReport, Report, ValuesReport
from policylang.audit.summary import combined
from policylang.backends import refusals
from policylang.backends.eager.checkpoint import sessions_of
from policylang.backends.eager.fsdp_prefetch import order_reports
from policylang.backends.path import findings_on
from policylang.backends.torch_compile.backend import frames_left_of
from policylang.errors import PolicyGraphError
from policylang.graph import marks
from policylang.torch_compat.compilers import backend_of


def report_on(subject: Any) -> Report:
    """See :func:`policylang.report`."""
    found = findings_on(subject)
    orders = tuple(order_reports(subject))
    empty = [each for each in sessions_of(subject) if each.without_layers]
    notes = tuple(f"{each.without_layers} holds no layers, and a checkpoint has nothing to do" for each in empty)
    if not found and (orders or empty):
        names = dict.fromkeys([*(each.policy for each in orders), *(each.policy.name for each in empty)])
        report = Report(policy=", ".join(names), notes=notes)
        if empty:
            report = evolve(report, saved=ValuesReport(), recomputed=ValuesReport(), audit=AuditReport(True))
        return _with_orders(report, orders)
    if found is None:
        no_policy = isinstance(subject, fx.GraphModule)
        raise PolicyGraphError([refusals.no_policy() if no_policy else refusals.nothing_to_report(subject)])
    sessions = sessions_of(subject)
    left = () if sessions else frames_left_of(subject, others=not found)
    if not found:
        compiled = bool(getattr(subject, marks.COMPILER, False) or getattr(backend_of(subject), marks.COMPILER, False))
        skipped = next(filter(None, (session.skipped() for session in sessions)), None)
        raise PolicyGraphError(
            [refusals.nothing_decided(checkpointed=bool(sessions), compiled=compiled, left=left, skipped=skipped)]
        )
    report = combined([each.report for each in found])
    said = [sentence for session in sessions_of(subject) for sentence in (*session.outside(), *session.loads())]
    uncompiled = tuple(f"{each.message} ({each.code})" for each in map(refusals.runs_as_it_is, left))
    warnings = (*report.warnings, *uncompiled)
    return _with_orders(evolve(report, warnings=warnings, notes=(*report.notes, *notes, *said)), orders)


def _with_orders(report: Report, orders: tuple[FsdpOrderReport, ...]) -> Report:
    """With what FSDP was told, and in the audit where it stands otherwise by now."""
    if not orders:
        return report
    audit = report.audit or AuditReport(True)
    wrong = tuple(each for order in orders for each in order.differences)
    audit = AuditReport(audit.agrees and not wrong, (*audit.differences, *wrong))
    return evolve(report, by_fsdp=orders, audit=audit)
