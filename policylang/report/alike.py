"""Graphs of a report that are alike, folded: one row for all blocks that do the same, one line for an expectation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from policylang.audit.summary.report import ExpectationReport, Report, ValuesReport
from policylang.language.wording import counted, figure, folded_names

_IN_BLOCK = re.compile(r" in block \d+$")
_WORST_FIRST = ("failed", "deferred", "held")


def graph_rows(graphs: Sequence[Report]) -> list[tuple[str, ...]]:
    """The rows of a table, head first: a row for all graphs in which the same happens, with the figures of one and the
    sums of all."""
    named = all(graph.label for graph in graphs)
    first, blocks = ("block", []) if named else ("graph", ["blocks"])
    together = _alike(graphs)
    if len(together) == len(graphs):
        head = (first, "forward values", *blocks, "saved", "recomputed", "")
        return [
            head,
            *((_name(graph, at), *_figures(graph, blocks), _cached(graph)) for at, graph in enumerate(graphs)),
        ]
    rows: list[tuple[str, ...]] = [
        (first, "times", "forward values", *blocks, "saved", "recomputed", "all saved", "all recomputed", "")
    ]
    for numbers in together:
        same = [graphs[number] for number in numbers]
        label = folded_names([_name(graph, number) for graph, number in zip(same, numbers, strict=True)])
        sums = (_sum([graph.saved for graph in same]), _sum([graph.recomputed for graph in same]))
        rows.append((label, str(len(same)), *_figures(same[0], blocks), *sums, _cached(same[0])))
    return rows


def _alike(graphs: Sequence[Report]) -> list[list[int]]:
    """The numbers of the graphs that are alike in every decision and figure, in the order of the first of each."""
    found: dict[object, list[int]] = {}
    for number, graph in enumerate(graphs):
        key = (
            graph.policy,
            (graph.forward_nodes, graph.blocks, graph.forward_flops, graph.undecided, graph.from_cache, graph.half),
            graph.rules,
            tuple(graph.decisions.items()),
            tuple(_amounts(each) for each in (graph.saved, graph.recomputed, graph.offloaded)),
            graph.audit is None or graph.audit.agrees,
        )
        found.setdefault(key, []).append(number)
    return list(found.values())


def _amounts(values: ValuesReport | None) -> object:
    return None if values is None else (values.names, values.bytes, values.flops)


def _name(graph: Report, number: int) -> str:
    return graph.label or str(number)


def _figures(graph: Report, blocks: Sequence[str]) -> tuple[str, ...]:
    amounts = (figure(values.bytes, "bytes") if values else "" for values in (graph.saved, graph.recomputed))
    return f"{graph.forward_nodes:,}", *(f"{graph.blocks:,}" for _ in blocks), *amounts


def _sum(values: Sequence[ValuesReport | None]) -> str:
    there = [each.bytes for each in values if each is not None]
    return figure(sum(there), "bytes") if there else ""


def _cached(graph: Report) -> str:
    return "from the compile cache" if graph.from_cache else ""


def expectation_lines(report: Report) -> Iterator[str]:
    """Each expectation once, in the order of the policy: what all graphs found, or the worst of it and where."""
    graphs = report.graphs or (report,)
    asked: dict[tuple[str, str], list[tuple[ExpectationReport, str]]] = {}
    for number, graph in enumerate(graphs):
        for each in graph.expectations:
            asked.setdefault((each.source, each.text), []).append((each, _name(graph, number)))
    for answers in asked.values():
        yield _answer(answers, "block" if all(graph.label for graph in graphs) else "graph")


def _answer(answers: Sequence[tuple[ExpectationReport, str]], noun: str) -> str:
    worst = min(answers, key=lambda answer: (_WORST_FIRST.index(answer[0].status), _margin(answer[0])))[0]
    text = f"{worst.text.removeprefix('expect ')}: {worst.status}, {worst.found}"
    if len({(each.status, each.found) for each, _ in answers}) == 1:
        return text
    if len({(each.status, each.margin) for each, _ in answers}) == 1 and worst.margin is not None:
        return f"{_IN_BLOCK.sub('', text)} in each of {counted(len(answers), noun)}"
    same = [where for each, where in answers if each.status == worst.status]
    if len(same) == len(answers):
        return f"{text}, the worst of {counted(len(answers), noun)}"
    places = folded_names(same)
    return f"{text}; {worst.status} in {len(same)} of {counted(len(answers), noun)}: {places}"


def _margin(expectation: ExpectationReport) -> float:
    return float("inf") if expectation.margin is None else expectation.margin
