"""Tells what was done to a graph: one line in the log, and with ``TORCH_TRACE`` set artifacts in torch's trace.

The logger is ``policylang``: INFO has one line a graph, DEBUG the report and how long each stage took. Nothing is
worked out where nobody listens.
"""

from __future__ import annotations

import logging
from base64 import b64encode

from policylang.audit.summary.order_figures import order_figures
from policylang.audit.summary.report import Report
from policylang.backends.findings import findings_of
from policylang.backends.graph_registry import CarriedOut
from policylang.errors import PolicyGraphError
from policylang.graph.files.snapshot import dump
from policylang.language.wording import as_page, counted, figure
from policylang.torch_compat.watching import is_tracing, trace_artifact

log = logging.getLogger("policylang")


def announce(done: CarriedOut) -> None:
    """To be called when a graph is as its plan says. A joint graph that is prepared alone is no news yet: it is told of
    when it is split."""
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
    """The same of a graph that a compile cache had: its plan was made by an earlier process."""
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
        f"{figure(each.bytes, 'bytes')} in {counted(len(each), 'value')} {word}" for each, word in amounts if each
    ]
    if report.recomputed:
        seconds = report.recomputed.seconds
        time = f" in {figure(seconds, 'seconds')} on {report.device}" if seconds else ""
        found.append(f"{figure(report.recomputed.flops, 'flops')} again{time}")
    gone = sum(rewrite.gone for rewrite in report.rewrites)
    found += [f"{counted(gone, 'collective')} fewer"] if gone else []
    found += _order(report)
    found += [counted(len(report.warnings), "warning")] if report.warnings else []
    if report.audit is not None:
        found.append("audit agrees" if report.audit.agrees else "audit differs")
    log.log(level, "%s on %s: %s", report.policy, graph, ", ".join(found))


def _order(report: Report) -> list[str]:
    """How many buckets there are, and what is exposed before and after."""
    figures = order_figures(report.orders)
    said = [counted(int(buckets), "bucket")] if (buckets := figures.get("buckets")) else []
    if "exposed_seconds" in figures and "exposed_seconds_as_traced" in figures:
        before, after = (figure(figures[f"exposed_seconds{end}"], "seconds") for end in ("_as_traced", ""))
        said.append(f"exposed {before} -> {after}")
    return said


def _snapshot(done: CarriedOut) -> str:
    """As base64; in place of one that is too large for a file, why."""
    try:
        return b64encode(dump(done.plan.before)).decode("ascii")
    except PolicyGraphError as error:
        return str(error)
