"""Sums the reports on a model's graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from attrs import fields

from policylang.audit.summary.data import AuditReport, Report, RuleReport, ValuesReport

_SUMMED = tuple(each.name for each in fields(RuleReport) if each.name not in ("source", "text"))


def combined(reports: Iterable[Report]) -> Report:
    """The graphs of one model as one report. A rule's account is the sum of its accounts."""
    graphs = tuple(reports)
    if len(graphs) == 1:
        return graphs[0]
    return Report(
        policy=", ".join(dict.fromkeys(graph.policy for graph in graphs)),
        forward_nodes=sum(graph.forward_nodes for graph in graphs),
        blocks=sum(graph.blocks for graph in graphs),
        decisions={
            f"{number}/{name}": decision
            for number, graph in enumerate(graphs)
            for name, decision in graph.decisions.items()
        },
        rules=_summed_rules(graphs),
        undecided=sum(graph.undecided for graph in graphs),
        undecided_fate=graphs[0].undecided_fate,
        saved=_summed([graph.saved for graph in graphs]),
        recomputed=_summed([graph.recomputed for graph in graphs]),
        offloaded=_summed([graph.offloaded for graph in graphs]),
        forward_flops=sum(graph.forward_flops for graph in graphs),
        undecided_saved_bytes=_sum(graph.undecided_saved_bytes for graph in graphs),
        rewrites=tuple(rewrite for graph in graphs for rewrite in graph.rewrites),
        expectations=tuple(expectation for graph in graphs for expectation in graph.expectations),
        warnings=tuple(dict.fromkeys(warning for graph in graphs for warning in graph.warnings)),
        notes=tuple(dict.fromkeys(note for graph in graphs for note in graph.notes)),
        audit=_joined([graph.audit for graph in graphs]),
        from_cache=all(graph.from_cache for graph in graphs),
        graphs=graphs,
    )


def _joined(audits: Sequence[AuditReport | None]) -> AuditReport | None:
    there = [(number, audit) for number, audit in enumerate(audits) if audit is not None]
    if not there:
        return None
    differences = tuple(f"graph {number}: {difference}" for number, audit in there for difference in audit.differences)
    return AuditReport(all(audit.agrees for _, audit in there), differences)


def _summed(parts: Sequence[ValuesReport | None]) -> ValuesReport | None:
    there = [(number, values) for number, values in enumerate(parts) if values is not None]
    if not there:
        return None
    return ValuesReport(
        tuple(f"{number}/{name}" for number, values in there for name in values.names),
        sum(values.bytes for _, values in there),
        sum(values.flops for _, values in there),
    )


def _summed_rules(graphs: Sequence[Report]) -> tuple[RuleReport, ...]:
    """Graphs of one policy have the same rules in the same order; parts of a model may follow different policies."""
    by_rule: dict[tuple[str, int, str, str], list[RuleReport]] = {}
    for graph in graphs:
        for number, account in enumerate(graph.rules):
            by_rule.setdefault((graph.policy, number, account.source, account.text), []).append(account)
    return tuple(
        RuleReport(source, text, **{name: _sum(getattr(each, name) for each in accounts) for name in _SUMMED})
        for (_, _, source, text), accounts in by_rule.items()
    )


def _sum(figures: Iterable[int | None]) -> Any:
    """The sum of the figures there are; None where there is none."""
    there = [figure for figure in figures if figure is not None]
    return sum(there) if there else None
