"""Sums the reports on a model's graphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from attrs import evolve, fields

from policylang.audit.summary.decided_values import DecidedValues
from policylang.audit.summary.report import AuditReport, Report, RuleReport, ValuesReport

_SUMMED = tuple(each.name for each in fields(RuleReport) if each.name not in ("source", "text"))


def combined(reports: Iterable[Report]) -> Report:
    """The graphs of one model as one report. A rule's account is the sum of its accounts."""
    graphs = _told_apart(reports)
    if len(graphs) == 1:
        return graphs[0]
    names = [graph.label or str(number) for number, graph in enumerate(graphs)]

    def each(name: str) -> list[Any]:
        return [getattr(graph, name) for graph in graphs]

    together: dict[str, Any] = {
        **{name: sum(each(name)) for name in ("forward_nodes", "blocks", "undecided", "forward_flops")},
        **{name: _summed(each(name), names) for name in ("saved", "recomputed", "offloaded")},
        **{name: _counts(each(name)) for name in ("uncounted", "uncounted_recomputed")},
        **{name: tuple(chain.from_iterable(each(name))) for name in ("rewrites", "orders", "expectations", "code")},
        **{name: tuple(dict.fromkeys(chain.from_iterable(each(name)))) for name in ("warnings", "notes")},
    }
    return Report(
        policy=", ".join(dict.fromkeys(each("policy"))),
        decisions=DecidedValues(
            {
                f"{graph_name}/{name}": decision
                for graph_name, graph in zip(names, graphs, strict=True)
                for name, decision in graph.decisions.items()
            }
        ),
        rules=_summed_rules(graphs),
        undecided_fate=graphs[0].undecided_fate,
        undecided_saved_bytes=_sum(each("undecided_saved_bytes")),
        audit=_joined(each("audit"), names),
        device=", ".join(dict.fromkeys(filter(None, each("device")))) or None,
        forward_seconds=_sum(each("forward_seconds")),
        from_cache=all(each("from_cache")),
        graphs=graphs,
        **together,
    )


def _told_apart(reports: Iterable[Report]) -> tuple[Report, ...]:
    """With a number behind the label of a block that is called in several ways, from the second on."""
    seen = Counter[str]()
    found = []
    for report in reports:
        seen[report.label] += 1
        again = report.label and seen[report.label] > 1
        found.append(evolve(report, label=f"{report.label}#{seen[report.label]}") if again else report)
    return tuple(found)


def _joined(audits: Sequence[AuditReport | None], names: Sequence[str]) -> AuditReport | None:
    places = [name if not name.isdecimal() else f"graph {name}" for name in names]
    there = [(place, audit) for place, audit in zip(places, audits, strict=True) if audit is not None]
    if not there:
        return None
    differences = tuple(f"{place}: {difference}" for place, audit in there for difference in audit.differences)
    return AuditReport(all(audit.agrees for _, audit in there), differences)


def _summed(parts: Sequence[ValuesReport | None], names: Sequence[str]) -> ValuesReport | None:
    there = [(graph, values) for graph, values in zip(names, parts, strict=True) if values is not None]
    if not there:
        return None
    return ValuesReport(
        tuple(f"{graph}/{name}" for graph, values in there for name in values.names),
        sum(values.bytes for _, values in there),
        sum(values.flops for _, values in there),
        _sum(values.seconds for _, values in there),
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


def _counts(parts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in parts:
        total.update(each)
    return dict(sorted(total.items()))


def _sum(figures: Iterable[float | None]) -> Any:
    """The sum of the figures there are; None where there is none."""
    there = [figure for figure in figures if figure is not None]
    return sum(there) if there else None
