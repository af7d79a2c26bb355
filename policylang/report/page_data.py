"""The data that the HTML page of a plan draws: columns, one entry a forward value, ready for JSON."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from policylang.audit.summary import word
from policylang.graph.facts import Facts, GraphKind
from policylang.language.diagnostics import Source, Span
from policylang.language.syntax import Policy
from policylang.planning.inspection.breakdown import Breakdown, Scenario, operator_of
from policylang.planning.inspection.communication import bucket_statements
from policylang.planning.inspection.worth import Worth
from policylang.planning.plan import Plan
from policylang.planning.value_outcome import Why
from policylang.report.order_text import said_of
from policylang.report.plan_json import worth_data
from policylang.simulation.memory import Timeline


def page_data(found: Breakdown, worth: Sequence[Worth], graph: str) -> dict[str, Any]:
    """``graph`` is what the page calls the graph. Lines count from 1, all else from 0."""
    plan = found.plan
    rows = [row for row in plan.facts.forward if plan.decisions[row] is not None]
    sources = _sources(plan.policy)
    return {
        "graph": graph,
        "device": None if plan.shown_times is None else plan.shown_times.device.name,
        "memory": _memory_data(found),
        "sources": [{"name": source.name, "lines": _lines(source)} for source in sources],
        "rules": _rules(plan, worth, sources, rows),
        "notes": _notes(found, sources),
        "nodes": _nodes(found, rows),
    }


def _lines(source: Source) -> list[str]:
    return [line.removesuffix("\r") for line in source.text.split("\n")]


def _sources(policy: Policy) -> list[Source]:
    """Every file that a statement of the policy stands in, the user's before those of the bundled library."""
    spans: list[Span] = [rule.span for rule in policy.rules]
    spans += [each.span for each in (policy.blocks, policy.undecided) if each is not None]
    spans += [each.span for each in policy.statements]
    found = dict.fromkeys(span.source for span in spans if span.source.text)
    return sorted(found, key=lambda source: source.name.startswith("<") and source.name != "<policy>")


def _rules(plan: Plan, worth: Sequence[Worth], sources: Sequence[Source], rows: Sequence[int]) -> list[dict[str, Any]]:
    place = {row: at for at, row in enumerate(rows)}
    of_file = {source: at for at, source in enumerate(sources)}
    margins = {each.rule: each for each in worth}
    rules = []
    for index, outcome in enumerate(plan.rules):
        span = outcome.rule.span
        rules.append(
            {
                "text": outcome.rule.text,
                "source": outcome.rule.source,
                "file": of_file.get(span.source, -1),
                "line": span.line,
                "end": span.end_line,
                "matched": [place[row] for row in outcome.matched if row in place],
                "decided": len(outcome.decided),
                "worth": worth_data(margins.get(index)),
            }
        )
    return rules


def _notes(found: Breakdown, sources: Sequence[Source]) -> list[dict[str, Any]]:
    """What stands beside scheduling lines: how many collectives each picks and moves."""
    if found.communication is None:
        return []
    of_file = {source: at for at, source in enumerate(sources)}
    policy = found.plan.policy
    statements = (*(policy.rewrites[at] for at in bucket_statements(policy)), *policy.scheduling)
    return [
        {
            "file": of_file.get(statement.span.source, -1),
            "line": statement.span.line,
            "note": f"{len(line.moved):,} of {len(line.matched):,}" if line.matched else "no match",
            "title": said_of(line),
        }
        for statement, line in zip(statements, found.communication.lines, strict=True)
    ]


def _nodes(found: Breakdown, rows: Sequence[int]) -> dict[str, Any]:
    plan, facts = found.plan, found.plan.facts
    place = {row: at for at, row in enumerate(rows)}
    decisions = [decision for row in rows if (decision := plan.decisions[row]) is not None]
    return {
        "name": [facts.names[row] for row in rows],
        "operator": coded(operator_of(facts, row) for row in rows),
        "module": coded(facts.modules[row] or facts.modules[facts.owners[row]] for row in rows),
        "shape": coded("×".join(map(str, facts.shapes[row] or ())) for row in rows),
        "dtype": coded(facts.dtypes[row] for row in rows),
        "bytes": [facts.bytes[row] for row in rows],
        "flops": [facts.flops[row] for row in rows],
        "seconds": [] if plan.shown_times is None else [plan.shown_times.seconds[row] for row in rows],
        "uncounted": coded(facts.uncounted[row] if facts.uncounted else "" for row in rows),
        "owner": [place.get(facts.owners[row], at) for at, row in enumerate(rows)],
        "fate": coded("" if (outcome := found.outcomes[row]) is None else outcome.word for row in rows),
        "action": coded(word(decision.action) for decision in decisions),
        "rule": [-1 if decision.rule is None else decision.rule for decision in decisions],
        "always": [int(decision.why is Why.ALWAYS) for decision in decisions],
        "reason": coded(decision.reason for decision in decisions),
    }


def coded(values: Iterable[Hashable]) -> dict[str, Any]:
    """A column with few distinct values: those, and for each row the number of its own."""
    known: dict[Hashable, int] = {}
    codes = [known.setdefault(value, len(known)) for value in values]
    return {"values": list(known), "codes": codes}


def _memory_data(found: Breakdown) -> dict[str, Any]:
    """Two timelines over one axis: the operators in the order in which they run for the first time.

    Where values are recomputed before an operator runs, its moment shows the most that was alive on the way. Nodes that
    only one of the two has, as buckets, stand where they do in its order.
    """
    sides = (("peak under the policy", found.under), ("nothing recomputed", found.without))
    orders = [_first_runs(found.plan, scenario) for _, scenario in sides]
    axis = _merged([[name for name, _, _ in order] for order in orders])
    halves: dict[str, int] = {}
    blocks: dict[str, str] = {}
    for order in orders:
        for name, half, block in order:
            halves.setdefault(name, half)
            blocks.setdefault(name, block)
    place = {name: at for at, name in enumerate(axis)}
    return {
        "names": axis,
        "backward": [halves[name] for name in axis],
        "block": coded(blocks[name] for name in axis),
        "resident": max(scenario.timeline.resident for _, scenario in sides),
        "curves": [
            {"name": name, "moments": _curve(scenario.timeline, scenario.facts, place)} for name, scenario in sides
        ],
    }


def _first_runs(plan: Plan, scenario: Scenario) -> list[tuple[str, int, str]]:
    """Name, half and block of each operator that runs, in the order of the graph, of a partition half by half; where
    the policy schedules, in the order that this comes to."""
    facts, timeline = scenario.facts, scenario.timeline
    halves = {row: timeline.backward[step] for step, row in enumerate(timeline.rows) if not timeline.again[step]}
    flat = facts.kind is GraphKind.FLAT
    own = plan if plan.order is None or facts is plan.facts else plan.order
    rows = sorted(halves, key=lambda row: (0 if flat else halves[row], row)) if own is plan else list(halves)
    found = []
    for row in rows:
        block = own.block_of[row] if own.block_names else -1
        found.append((facts.names[row], halves[row], own.block_names[block] if block >= 0 else ""))
    return found


def _merged(orders: Sequence[Sequence[str]]) -> list[str]:
    """Each name once: those of the first order in it, those of later ones before the next name that is there too."""
    first, *later = orders
    for order in later:
        known, there = set(first), set(order)
        ahead: dict[str, list[str]] = {}
        waiting: list[str] = []
        for name in order:
            if name in known:
                ahead[name], waiting = waiting, []
            else:
                waiting.append(name)
        first = [each for name in first for each in (*(ahead[name] if name in there else ()), name)] + waiting
    return list(first)


def _curve(timeline: Timeline, facts: Facts, place: dict[str, int]) -> list[int]:
    moments = array("q", [-1]) * len(place)
    most = 0
    for step, row in enumerate(timeline.rows):
        most = max(most, timeline.live[step])
        if not timeline.again[step]:
            moments[place[facts.names[row]]] = most
            most = 0
    before = timeline.resident
    for at, moment in enumerate(moments):
        if moment < 0:
            moments[at] = before
        before = moments[at]
    return list(moments)
